"""`raptor-hf distill --dry_run`: what a run is and what it will take. Images and the teacher's weights are not loaded:
of the teacher and of a Hub dataset the descriptions alone are downloaded.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..arguments import MODEL_PRESETS, DistillationArguments
from ..cards import own_results, write_card
from ..data import PixelDataset
from ..estimates import StageEstimate, estimate_stages
from ..modeling_raptor import RaptorModel
from ..phases import Phases
from ..results import model_record, new_results, teacher_record
from ..teachers import Teacher
from ..vision_models import public_name
from .common import ImageArguments, TeacherArguments, load_split
from .console import is_main_process, note, status, table
from .student import StudentArguments, given_phases, started, student_options
from .training_data import CacheArguments, StreamArguments
from .values import UsageError


def count_images(images: ImageArguments, stream: StreamArguments, required: bool = True) -> int | None:
    """Training images, counted without reading them; `None` for a stream, or if the Hub does not say.

    Args:
        images, stream: of the command.
        required: whether a Hub dataset that cannot be looked up is an error.

    Raises:
        ValueError: as [`~raptor_hf.data.load_images`]; for a Hub dataset that cannot be looked up.
    """
    if stream.streaming:
        return None
    if images.dataset == "digits" or Path(images.dataset).expanduser().is_dir():
        return len(load_split(images, images.train_split))
    import datasets

    try:
        info = datasets.load_dataset_builder(images.dataset, revision=images.dataset_revision).info
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if not required:
            return None
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{images.dataset!r} is no folder here and cannot be looked up on the Hub ({reason}); check id and login "
            "(`hf auth login`), or pass a folder of images."
        ) from error
    if info.splits is None:
        return None
    if images.train_split not in info.splits:
        raise UsageError(f"{images.dataset!r} has no split {images.train_split!r}, only {', '.join(info.splits)}.")
    count = info.splits[images.train_split].num_examples
    return count if images.max_images is None else min(count, images.max_images)


def dry_run(
    student: StudentArguments,
    source: TeacherArguments,
    images: ImageArguments,
    stream: StreamArguments,
    cache: CacheArguments,
    args: DistillationArguments,
    argv: Sequence[str],
) -> int:
    """Prints the plan of a run and what its stages take; exit code 0.

    Args:
        student, source, images, stream, cache, args: of the command.
        argv: what the command was given, for the card.

    Raises:
        ValueError: for wrong input, as the run itself would.
    """
    if source.teacher is None:
        raise UsageError("no teacher given; name a Hub id or a folder.")
    start = started(student)
    phases = given_phases(student, start)
    teacher = _untrained(source, source.teacher)
    num_images = count_images(images, stream, required=args.max_steps <= 0)
    how = {**MODEL_PRESETS[args.preset], **{k: v for k, v in student_options(student).items() if v is not None}}
    if start is None:
        start = RaptorModel.from_teacher(teacher, phases or _even(teacher.num_layers, student.num_blocks or 3), **how)
    size, cached = _image_size(teacher, images.image_size), cache.activation_cache is not None
    plan = {
        "teacher": _teacher_text(teacher),
        "student": _student_text(teacher, start, phases),
        "images": f"{images.dataset}, {_count_text(num_images, stream)}",
        "image": f"{size[0]} x {size[1]} pixels, {_num_tokens(start, size)} tokens",
        **_training_plan(args),
        "model on disk": _bytes_text(sum(parameter.nbytes for parameter in start.parameters())),
    }
    if cached and num_images is not None:
        stored = 2 * num_images * (teacher.num_layers + 1) * _num_tokens(start, size) * teacher.hidden_size
        plan["activation cache"] = f"{_bytes_text(stored)}, at most {_bytes_text(cache.activation_cache_gb * 1e9)}"
    with status("measuring steps of each stage"):
        stages = estimate_stages(
            teacher, start, args, num_images=num_images, image_size=size, blocks=student.blocks, cached=cached
        )
    table(["", "this run"], plan.items(), title="Plan")
    table(["", *(stage.stage for stage in stages)], _stage_rows(stages), title="Stages, measured on this machine")
    if student.card is not None and is_main_process():
        entry = model_record(
            start, args, name=student.name or f"raptor-k{start.config.num_blocks}", path=".",
            steps=sum(stage.steps for stage in stages), history=[], student=how, blocks=student.blocks,
        )  # fmt: skip
        results = new_results(f"Raptor of {public_name(source.teacher)}", _run_command(argv), args.seed)
        results |= {"teacher": teacher_record(teacher), "dataset": {"name": public_name(images.dataset)}}
        note(f"wrote {_write_card(Path(student.card), start, results, {**entry, 'planned': True})}")
    return 0


def _write_card(folder: Path, student: RaptorModel, results: dict[str, Any], entry: dict[str, Any]) -> Path:
    """Configuration, results without any, and card of a Raptor that is planned."""
    del results["environment"]  # of the machine that the plan was made on
    folder.mkdir(parents=True, exist_ok=True)
    student.config.to_json_file(folder / "config.json")  # without the code that a saved model brings
    return write_card(folder, own_results({**results, "models": [entry]}, entry))


def _run_command(argv: Sequence[str]) -> str:
    """The command line of the run itself."""
    words, kept = iter(argv), ["raptor-hf", "distill"]
    for word in words:
        name, _, value = word.replace("_", "-").partition("=")
        if name == "--card" and not value:
            next(words, None)
        elif name not in ("--dry-run", "--card"):
            kept.append(word)
    return shlex.join(kept)


def _untrained(source: TeacherArguments, name: str) -> Teacher:
    kwargs = {} if source.attn_implementation is None else {"attn_implementation": source.attn_implementation}
    try:
        teacher = Teacher.untrained(name, revision=source.revision, **kwargs)
    except OSError as error:
        raise UsageError(f"teacher {name!r} cannot be looked up: {error}") from error
    if torch.accelerator.is_available():
        teacher.model.to(torch.accelerator.current_accelerator())
    return teacher


def _teacher_text(teacher: Teacher) -> str:
    return f"{teacher.name_or_path}, {teacher.num_layers} layers, {teacher.model.num_parameters():,} parameters"


def _student_text(teacher: Teacher, student: RaptorModel, phases: Phases | None) -> str:
    schedule = str(phases) if phases else f"{student.config.num_blocks} blocks, phases are found on the images"
    share = 100 * student.num_parameters() / teacher.model.num_parameters()
    return f"{schedule}, {student.num_parameters():,} parameters ({share:.1f} %)"


def _count_text(num_images: int | None, stream: StreamArguments) -> str:
    if num_images is None:
        return "a stream" if stream.streaming else "not counted"
    return f"{num_images:,} to train on"


def _training_plan(args: DistillationArguments) -> dict[str, str]:
    own = (args.per_device_train_batch_size or 1) * args.gradient_accumulation_steps
    per_process = f", {own} per process" if args.world_size > 1 else ""
    return {
        "batch": f"{own * args.world_size} images{per_process}",
        "preset": args.preset,
        "precision": "bfloat16 autocast" if args.bf16 else "float16 autocast" if args.fp16 else "float32",
        "device": _device_text(args.device),
    }


def _num_tokens(student: RaptorModel, size: tuple[int, int]) -> int:
    config = student.config
    return 1 + config.num_register_tokens + (size[0] // config.patch_size) * (size[1] // config.patch_size)


def _stage_rows(stages: list[StageEstimate]) -> list[list[Any]]:
    rows = {
        "steps": [f"{stage.steps:,}" for stage in stages],
        "images shown": [f"{stage.images:,}" for stage in stages],
        "time of a step": [_time_text(stage.seconds_per_step) for stage in stages],
        "time": [_time_text(stage.seconds) for stage in stages],
        "memory of a process": [_bytes_text(stage.memory) for stage in stages],
        "checkpoints on disk": [_bytes_text(stage.disk) for stage in stages],
    }
    return [[name, *values] for name, values in rows.items()]


def _image_size(teacher: Teacher, image_size: int | None) -> tuple[int, int]:
    """Height and width that the run's images will have; the teacher's own where its processor names none."""
    own = teacher.config_fields()["image_size"]
    if teacher.image_processor is None:
        return (image_size or own,) * 2
    return PixelDataset([], teacher.image_processor, image_size=image_size).size or (own, own)  # type: ignore[arg-type]


def _even(num_layers: int, num_blocks: int) -> Phases:
    """Blocks of about the same length, in place of phases that are not known yet."""
    if not 1 <= num_blocks <= num_layers:
        raise UsageError(f"--num_blocks {num_blocks}: a teacher of {num_layers} layers has 1 to {num_layers} blocks.")
    return Phases.from_schedule([layer * num_blocks // num_layers for layer in range(num_layers)])


def _device_text(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {torch.get_num_threads()} threads"
    )


def _bytes_text(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _time_text(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"
