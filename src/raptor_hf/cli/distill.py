"""`raptor-hf distill TEACHER`: a teacher and images become a Raptor, saved and measured."""

import copy
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub import get_token

from ..arguments import DistillationArguments
from ..cards import load_config, own_results, write_card
from ..data import ImageDataset
from ..modeling_raptor import RaptorModel
from ..phases import Phases
from ..report import write_report
from ..results import (
    RESULTS_FILE,
    dataset_record,
    new_results,
    read_json,
    summary_rows,
    teacher_record,
    write_json,
)
from ..runs import MODEL_FOLDER, PHASES_FILE, discover_phases, distill
from ..streams import ImageStream
from ..teachers import Teacher, public_name
from .common import ImageArguments, TeacherArguments, check_finished, load_teacher, push_and_report
from .console import is_main_process, note, status, table
from .parsing import parse, require_world_size
from .training_data import StreamArguments, evaluation_images, phase_pixels, training_images
from .values import UsageError

STUDENT_OPTIONS = ("init", "mlp_type", "intermediate_size", "depth_scale_init", "adapter_rank")


@dataclass
class StudentArguments:
    """The student."""

    _argument_group_name = "Student"

    num_blocks: int | None = field(default=None, metadata={"help": "Blocks; 3 unless repeats or phases are given."})
    repeats: list[int] | None = field(default=None, metadata={"help": "Applications of each block, as 7 3 2."})
    phases: str | None = field(default=None, metadata={"help": "phases.json of an earlier `raptor-hf phases`."})
    phase_images: int = field(default=1000, metadata={"help": "Training images that the phases are found on."})
    init: str | None = field(
        default=None, metadata={"help": "first, middle, last, mean or random; default the preset's."}
    )
    mlp_type: str | None = field(default=None, metadata={"help": "gelu or swiglu; default the preset's."})
    intermediate_size: int | str | None = field(default=None, metadata={"help": "MLP width, research or dinov2."})
    depth_scale: bool = field(default=True, metadata={"help": "Whether blocks are scaled by depth."})
    depth_scale_init: str | None = field(default=None, metadata={"help": "zeros or normal; default the preset's."})
    adapter_rank: int | None = field(
        default=None, metadata={"help": "Rank of the adapters of every application; none by default."}
    )
    blocks: list[int] | None = field(
        default=None, metadata={"help": "Train these blocks alone, stage 1 only; `raptor-hf assemble` joins the runs."}
    )
    student: str | None = field(
        default=None, metadata={"help": "Folder of a Raptor to go on from in stage 2, as `assemble` leaves it."}
    )
    name: str | None = field(default=None, metadata={"help": "Name in the report; default raptor-k and the blocks."})
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0, or 1 if the Raptor is saved but could not be pushed.

    Raises:
        ValueError: for wrong input.
    """
    student, source, images, stream, args = parse(
        "distill",
        [StudentArguments, TeacherArguments, ImageArguments, StreamArguments, DistillationArguments],
        argv,
        ["teacher"],
        description=__doc__,
    )
    processes = PartialState(cpu=args.use_cpu)
    require_world_size(processes.num_processes, "distill")
    args, push = _without_push(args)
    args = _of_stage(student, args)
    output_dir = Path(str(args.output_dir))
    check_finished(output_dir, student.overwrite)
    if student.overwrite and is_main_process():
        shutil.rmtree(output_dir, ignore_errors=True)
    processes.wait_for_everyone()
    teacher = load_teacher(source)
    train_images, train = training_images(images, stream, teacher.image_processor, args.seed)
    evaluation = None
    if images.eval_split is not None and student.blocks is None:  # one block alone is no student to measure
        evaluation = evaluation_images(images, stream, teacher.image_processor, args.seed)
    start = _started(student)
    record = None
    if start is None:
        phases, record = _phases(student, teacher, train_images, train.processor, output_dir)
    else:
        phases = Phases.from_schedule(start.config.block_schedule or ())
    note(f"phases: {phases}")
    _, entry = distill(
        teacher, phases, args, train, evaluation, name=student.name or f"raptor-k{phases.num_blocks}",
        student={"depth_scale": student.depth_scale, **_options(student)}, start=start, blocks=student.blocks,
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


def _started(student: StudentArguments) -> RaptorModel | None:
    """The Raptor that `--student` names, in float32."""
    if student.student is None:
        return None
    given = [
        name for name in ("num_blocks", "repeats", "phases", *STUDENT_OPTIONS) if getattr(student, name) is not None
    ]
    if given:
        raise UsageError(f"--student and --{given[0]} exclude each other; the Raptor has its blocks already.")
    load_config(student.student)
    return RaptorModel.from_pretrained(student.student, dtype=torch.float32)


def _options(student: StudentArguments) -> dict[str, Any]:
    return {name: getattr(student, name) for name in STUDENT_OPTIONS}


def _phases(
    student: StudentArguments,
    teacher: Teacher,
    train_images: ImageDataset | ImageStream,
    processor: Any,
    output_dir: Path,
) -> tuple[Phases, dict | None]:
    """Phases that were given, or those found on the training images; the record of the search if there is one."""
    given = [name for name in ("num_blocks", "repeats", "phases") if getattr(student, name) is not None]
    if "repeats" in given:
        if len(given) > 1:
            raise UsageError(f"--{given[0]} and --{given[1]} exclude each other; give the repeats alone.")
        return Phases.from_repeats(student.repeats or ()), None
    count = str(student.num_blocks or 3)
    if student.phases is not None:
        path = Path(student.phases)
        record = read_json(path / PHASES_FILE if path.is_dir() else path)
        if count not in record["partitions"]:
            raise UsageError(f"{path} has no partition into {count} blocks, only {', '.join(record['partitions'])}.")
    else:
        pixels = phase_pixels(train_images, processor, student.phase_images)
        with status(f"phases on {len(pixels)} images"), PartialState().main_process_first():
            record = discover_phases(teacher, pixels, (int(count),), output_dir / PHASES_FILE)
    return Phases.from_schedule(record["partitions"][count]["block_schedule"]), record
