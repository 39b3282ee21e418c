"""`raptor-hf distill TEACHER`: a teacher and images become a Raptor, saved and measured."""

import copy
import shlex
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub import get_token

from ..arguments import DistillationArguments
from ..cards import own_results, write_card
from ..report import write_report
from ..results import RESULTS_FILE, dataset_record, new_results, summary_rows, teacher_record, write_json
from ..runs import MODEL_FOLDER, distill
from ..vision_models import public_name
from .common import ImageArguments, TeacherArguments, check_finished, load_teacher, make_way, push_and_report
from .console import is_main_process, note, table
from .dry_run import dry_run
from .parsing import parse, require_world_size
from .student import StudentArguments, given_phases, run_phases, started, student_options
from .training_data import CacheArguments, StreamArguments, cached_states, evaluation_images, training_images
from .values import UsageError


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0, or 1 if the Raptor is saved but could not be pushed.

    Raises:
        ValueError: for wrong input.
    """
    student, source, images, stream, cache, args = parse(
        "distill",
        [StudentArguments, TeacherArguments, ImageArguments, StreamArguments, CacheArguments, DistillationArguments],
        argv,
        ["teacher"],
        description=__doc__,
    )
    processes = PartialState(cpu=args.use_cpu)
    require_world_size(processes.num_processes, "distill ... --use_cpu")
    args, push = _without_push(args)
    args = _of_stage(student, args)
    if student.dry_run:
        return dry_run(student, source, images, stream, cache, args, argv)
    if student.card is not None:
        raise UsageError("--card is the card of a plan; give --dry_run with it. A run leaves its own.")
    start = started(student)
    phases = given_phases(student, start)
    output_dir = Path(str(args.output_dir))
    check_finished(output_dir, student.overwrite)
    teacher = load_teacher(source)
    train_images, train = training_images(images, stream, teacher.image_processor, args.seed)
    evaluation = None
    if images.eval_split is not None and student.blocks is None:  # one block alone is no student to measure
        evaluation = evaluation_images(images, stream, teacher.image_processor, args.seed)
    make_way(output_dir, student.overwrite)
    states = cached_states(cache, teacher, train, args, processes)
    phases, record = run_phases(student, phases, teacher, train_images, train.processor, output_dir)
    note(f"phases: {phases}")
    _, entry = distill(
        teacher, phases, args, train, evaluation, name=student.name or f"raptor-k{phases.num_blocks}",
        student=student_options(student), start=start, blocks=student.blocks, cache=states,
    )  # fmt: skip
    if not is_main_process():
        return 0
    title = f"Raptor of {public_name(source.teacher)}"
    results = new_results(title, shlex.join(["raptor-hf", "distill", *argv]), args.seed)
    results |= {"teacher": teacher_record(teacher), "dataset": dataset_record(train, evaluation), "models": [entry]}
    if record is not None:
        results["phases"] = record
    _write(output_dir, results, entry)
    header, rows = summary_rows(results)
    table(header, rows, title=title)
    note(f"model: {output_dir / MODEL_FOLDER}   report: {output_dir / 'report.html'}")
    return 0 if push is None else push_and_report(output_dir / MODEL_FOLDER, **push)


def _write(output_dir: Path, results: dict[str, Any], entry: dict[str, Any]) -> None:
    """Report and card first: a run is finished when its results are there."""
    write_report(output_dir, results)
    write_card(output_dir / MODEL_FOLDER, own_results(results, entry))
    write_json(output_dir / RESULTS_FILE, results)


def _without_push(args: DistillationArguments) -> tuple[DistillationArguments, dict[str, Any] | None]:
    """Arguments of a training that pushes nothing itself, and those of the push that follows it, if one is asked for.

    Raises:
        UsageError: if there is no token: better now than after the training.
    """
    if not args.push_to_hub:
        return args, None
    token = args.hub_token or get_token()
    if token is None:
        raise UsageError("--push_to_hub needs a token for the Hub; run `hf auth login` or set HF_TOKEN.")
    repo_id = args.hub_model_id or Path(str(args.output_dir)).resolve().name
    push = {"repo_id": repo_id, "private": args.hub_private_repo, "revision": args.hub_revision, "token": token}
    args = copy.copy(args)
    args.push_to_hub = False
    return args, push


def _of_stage(student: StudentArguments, args: DistillationArguments) -> DistillationArguments:
    """Arguments of the one stage that blocks trained apart, or a Raptor that is gone on with, have left to run."""
    stage = "blocks" if student.blocks is not None else "end_to_end" if student.student is not None else args.stage
    if stage == args.stage or (student.student is not None and args.stage == "blocks"):
        return args
    own = args.stage_arguments().get(stage) if args.stage == "both" else None
    if own is None:
        raise UsageError(f"--blocks trains in stage 1, but stage={args.stage}, blocks_share={args.blocks_share}.")
    own.output_dir = args.output_dir
    return own
