"""`raptor-hf study swaps MODEL [MODEL ...]`: layers replaced by others of the same phase, and of other phases.

`raptor-hf study partitions TEACHER`: score against the number of blocks, how surely boundaries are found, and Raptors
of the max-cut beside those of random partitions.

`raptor-hf study recurrence MODEL [MODEL ...]`: phases shorter, longer and past their end, linear maps in their place,
exponents.

`raptor-hf study paradigms TEACHER`: Raptors that learn from their own states or the teacher's, all of them or the last.

`raptor-hf study complexity TEACHER RAPTOR [RAPTOR ...]`: the eps of the Block-Recurrent Hypothesis, bits of blocks and
schedule, operations and time.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..arguments import DistillationArguments
from ..data import ImageDataset, PixelDataset, collate_pixels
from ..frozen import FrozenBackbone
from ..interventions import Head
from ..interventions.runs import layout_of
from ..modeling_raptor import RaptorModel
from ..phases import Phases, find_phases
from ..probes import IMAGE_CLASSIFICATION, LinearProbe, ProbeArguments
from ..report import write_report
from ..results import RESULTS_FILE, new_results, read_json, to_plain, write_json
from ..similarity import layer_similarity
from ..studies import (
    PARADIGMS,
    boundary_stability,
    distil_paradigms,
    distil_partitions,
    partition_schemes,
    partition_scores,
    study_complexity,
    study_recurrence,
    study_swaps,
)
from ..study_report import (
    COMPLEXITY_HEADER,
    PARADIGMS_HEADER,
    PARTITIONS_HEADER,
    RECURRENCE_HEADER,
    SWAPS_HEADER,
    complexity_rows,
    paradigm_rows,
    partition_rows,
    recurrence_rows,
    swap_rows,
)
from ..teachers import Teacher
from ..vision_models import public_name
from .backbones import load_backbone, short_names
from .common import ImageArguments, check_finished, check_ranges, load_split, make_way, to_pixels
from .console import note, status, table
from .parsing import parse
from .values import UsageError

STUDIES = ("swaps", "partitions", "recurrence", "complexity", "paradigms")
DISTILLING = ("partitions", "paradigms")  # whose runs stay in the folder, and are gone on with
NUM_BLOCKS = [2, 3, 4]
SETTINGS_FILE = "settings.json"
HEADS = ("probe", "none")


@dataclass
class StudyArguments:
    """What is studied."""

    _argument_group_name = "Study"

    model: list[str] = field(
        default_factory=list, metadata={"help": "ViTs and Raptors: folders or Hub ids (required)."}
    )
    study: str = field(
        default="swaps",
        metadata={
            "help": "swaps: layers replaced; partitions: other phases; recurrence: a phase as one map; complexity: eps "
            "and bits; paradigms: what is learnt from."
        },
    )
    num_blocks: list[int] | None = field(
        default=None, metadata={"help": "Phases of a ViT; default 2 3 4 for partitions, else 3."}
    )
    repeats: list[int] | None = field(default=None, metadata={"help": "Layers of each phase, in place of found ones."})
    num_swapped: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Layers replaced at once."})
    max_swaps: int | None = field(
        default=50, metadata={"help": "Swaps of each number, drawn where more exist; null for all."}
    )
    head: str = field(
        default="probe",
        metadata={"help": "probe (linear, of the training split; needs labels), or none."},
    )
    num_iterations: int = field(default=32, metadata={"help": "Applications past the end of a phase."})
    tolerance: float = field(default=1e-2, metadata={"help": "Angle in radians that counts as being at rest."})
    ridge: float = field(default=0.1, metadata={"help": "Relative penalty of the linear map of a phase."})
    num_exponents: int = field(default=3, metadata={"help": "Directions whose growth is followed; 0 for none."})
    num_pushed: int = field(default=8, metadata={"help": "Images of the exponents, the first ones."})
    num_pairs: int = field(default=9, metadata={"help": "Timed pairs of forward passes; 0 for no timing."})
    num_random: int = field(default=3, metadata={"help": "Random partitions of each kind and number of blocks."})
    num_seeds: int = field(default=1, metadata={"help": "Raptors distilled of each partition or paradigm."})
    distill_steps: int = field(default=300, metadata={"help": "Steps of a distillation; 0 for none, the scores alone."})
    distill_batch_size: int = field(default=64, metadata={"help": "Images per step of a distillation."})
    distill_learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate of a distillation."})
    learning_rate: float = field(default=1e-2, metadata={"help": "Of the probe."})
    num_epochs: int = field(default=15, metadata={"help": "Of the probe."})
    batch_size: int = field(default=32, metadata={"help": "Images in a forward pass."})
    num_workers: int = field(default=0, metadata={"help": "Processes that read images."})
    seed: int = field(default=0, metadata={"help": "Seed of the draw, the probe, and the subset of --max_images."})
    output_dir: str = field(default="runs/study", metadata={"help": "Folder of the results."})
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    words = ["--study", argv[0], *argv[1:]] if argv[:1] and argv[0] in STUDIES else argv
    args, images = parse("study", [StudyArguments, ImageArguments], words, ["model"], description=__doc__)
    _check(args)
    output_dir = Path(args.output_dir)
    check_finished(output_dir, args.overwrite)
    names = list(dict.fromkeys(args.model))
    backbones = {label: load_backbone(name) for label, name in zip(short_names(names), names, strict=True)}
    dataset = load_split(images, images.eval_split, args.seed)
    if args.study != "complexity" and args.head == "probe" and dataset.labels is None:
        raise UsageError(f"{dataset.name} has no labels for a probe; give --head none to do without.")
    label, (model, _) = next(iter(backbones.items()))
    if args.study in DISTILLING:
        _teacher(label, model, args)
        make_way(output_dir, args.overwrite)
    records: dict[str, Any] = {}
    header, rows = list[str](), list[list[str]]()
    if args.study in ("swaps", "recurrence"):
        found = {name: _interventions(name, *backbones[name], dataset, args, images) for name in backbones}
        records[args.study] = found
        is_swaps = args.study == "swaps"
        header, rows = (SWAPS_HEADER, swap_rows(found)) if is_swaps else (RECURRENCE_HEADER, recurrence_rows(found))
    elif args.study == "complexity":
        records["complexity"] = _complexity(backbones, dataset, args, images)
        header, rows = COMPLEXITY_HEADER, complexity_rows(records["complexity"], label)
    elif args.study == "paradigms":
        records["paradigms"] = _paradigms(label, model, dataset, args, images)
        header, rows = PARADIGMS_HEADER, paradigm_rows(records["paradigms"])
    else:
        records["partitions"] = _partitions(label, model, dataset, args, images)
        header, rows = PARTITIONS_HEADER, partition_rows(records["partitions"])
    results = new_results(
        f"Study of {args.study}: {', '.join(backbones)}", shlex.join(["raptor-hf", "study", *argv]), args.seed
    )
    results["studies"] = {**records, "dataset": public_name(images.dataset)}
    if args.study not in DISTILLING:
        make_way(output_dir, args.overwrite)  # nothing can go wrong any more
    write_report(output_dir, results)
    write_json(output_dir / RESULTS_FILE, results)  # last: a run is finished when its results are there
    table(header, rows, title=f"{len(dataset)} images of {public_name(images.dataset)}")
    note(f"wrote {output_dir}")
    return 0


def _interventions(
    label: str,
    model: RaptorModel | Teacher,
    processor: Any,
    dataset: ImageDataset,
    args: StudyArguments,
    images: ImageArguments,
) -> dict[str, Any]:
    """Swaps or recurrence of one model."""
    loader = _loader(to_pixels(dataset, processor, images.image_size), args)
    head = _head(model, processor, label, dataset, args, images)
    phases = _phases(model, loader, args)
    if args.study == "swaps":
        with status(f"swapping layers of {label}, phases {phases}"):
            return study_swaps(
                model, loader, phases, num_swapped=args.num_swapped, max_swaps=args.max_swaps, seed=args.seed, head=head
            )
    with status(f"applying the phases {phases} of {label} beyond their length"):
        return study_recurrence(
            model, loader, phases, num_iterations=args.num_iterations, tolerance=args.tolerance, ridge=args.ridge,
            num_exponents=args.num_exponents, num_pushed=args.num_pushed, seed=args.seed, head=head,
        )  # fmt: skip


def _complexity(
    backbones: dict[str, tuple[RaptorModel | Teacher, Any]],
    dataset: ImageDataset,
    args: StudyArguments,
    images: ImageArguments,
) -> dict[str, Any]:
    (name, (teacher, processor)), *others = backbones.items()
    teacher = _teacher(name, teacher, args)
    models = {label: model for label, (model, _) in others}
    loader = _loader(to_pixels(dataset, processor, images.image_size), args)
    with status(f"comparing {', '.join(models)} with {name}"):
        return {"name": name, **study_complexity(teacher, models, loader, num_pairs=args.num_pairs)}


def _teacher(label: str, model: RaptorModel | Teacher, args: StudyArguments) -> Teacher:
    """The model, which must be a ViT, of as many layers as partitions have blocks.

    Raises:
        UsageError: if it is not.
    """
    if isinstance(model, Teacher):
        most = max(args.num_blocks or NUM_BLOCKS)
        if args.study == "partitions" and most > model.num_layers:
            raise UsageError(f"--num_blocks {most} of a ViT of {model.num_layers} layers; use fewer.")
        return model
    if args.study == "complexity":
        raise UsageError(f"{label} is a Raptor; name its teacher first, then Raptors: study complexity TEACHER RAPTOR.")
    raise UsageError(f"{label} is a Raptor, whose phases are given; name a ViT for a study of {args.study}.")


def _phases(model: RaptorModel | Teacher, loader: DataLoader, args: StudyArguments) -> Phases:
    """Those that are given, a Raptor's own, or those that are found in a ViT."""
    if args.repeats is not None:
        return Phases.from_repeats(args.repeats)
    if isinstance(model, RaptorModel):
        schedule: Any = model.config.block_schedule
        return Phases.from_schedule(schedule)
    (count,) = args.num_blocks or [3]
    with status("comparing layers"):
        return find_phases(layer_similarity(_states(model, loader)), min(count, model.num_layers))


def _partitions(
    label: str, teacher: RaptorModel | Teacher, dataset: ImageDataset, args: StudyArguments, images: ImageArguments
) -> dict[str, Any]:
    teacher = _teacher(label, teacher, args)
    counts = args.num_blocks or NUM_BLOCKS
    train, evaluation = _distillation_sets(teacher, dataset, args, images)
    loader = _loader(train, args)
    with status("comparing layers"):
        similarity = layer_similarity(_states(teacher, loader))
        stability = boundary_stability(_states(teacher, loader), counts, seed=args.seed)
    record = {
        "num_layers": teacher.num_layers,
        "num_images": len(train),
        "similarity": similarity.tolist(),
        **partition_scores(similarity),
        "stability": stability,
        "runs": {},
        "base_accuracy": None,
    }
    if args.distill_steps == 0:
        return record
    score, record["base_accuracy"] = _scored(label, teacher, dataset, evaluation, args, images)
    for count in counts:
        schemes = partition_schemes(similarity, count, args.num_random, seed=args.seed)
        number = sum(map(len, schemes.values())) * args.num_seeds
        with status(f"distilling {number} Raptors of {count} blocks"):
            record["runs"][str(count)] = distil_partitions(
                teacher, schemes, partial(_distillation, args), train, evaluation, Path(args.output_dir) / f"k{count}",
                score,
                seeds=range(args.seed, args.seed + args.num_seeds),
            )  # fmt: skip
    return record


def _paradigms(
    label: str, model: RaptorModel | Teacher, dataset: ImageDataset, args: StudyArguments, images: ImageArguments
) -> dict[str, Any]:
    teacher = _teacher(label, model, args)
    train, evaluation = _distillation_sets(teacher, dataset, args, images)
    phases = _phases(teacher, _loader(train, args), args)
    score, base_accuracy = _scored(label, teacher, dataset, evaluation, args, images)
    with status(f"distilling {len(PARADIGMS) * args.num_seeds} Raptors of phases {phases}"):
        runs = distil_paradigms(
            teacher, phases, partial(_distillation, args), train, evaluation, Path(args.output_dir) / "runs", score,
            seeds=range(args.seed, args.seed + args.num_seeds),
        )  # fmt: skip
    return {"phases": list(phases.repeats), "num_images": len(train), "base_accuracy": base_accuracy, "runs": runs}


def _distillation_sets(
    teacher: Teacher, dataset: ImageDataset, args: StudyArguments, images: ImageArguments
) -> tuple[PixelDataset, PixelDataset]:
    """Training and test images of distillations, after a look at what the folder holds already."""
    _check_settings(Path(args.output_dir) / SETTINGS_FILE, args, images)
    train = load_split(images, images.train_split, args.seed)
    processor, size = teacher.image_processor, images.image_size
    return to_pixels(train, processor, size), to_pixels(dataset, processor, size)


def _scored(
    label: str,
    teacher: Teacher,
    dataset: ImageDataset,
    evaluation: PixelDataset,
    args: StudyArguments,
    images: ImageArguments,
) -> tuple[Callable[[Any], float] | None, float | None]:
    """Accuracy of a Raptor under the teacher's probe, as a function, and the teacher's own; `None` without a probe."""
    head = _head(teacher, teacher.image_processor, label, dataset, args, images)
    if head is None:
        return None, None
    score = partial(_accuracy, loader=_loader(evaluation, args), head=head)
    return score, score(teacher)


def _distillation(args: StudyArguments, folder: str, seed: int, **options: Any) -> DistillationArguments:
    return DistillationArguments(
        output_dir=folder, max_steps=args.distill_steps, per_device_train_batch_size=args.distill_batch_size,
        learning_rate=args.distill_learning_rate, seed=seed, report_to="none", dataloader_num_workers=args.num_workers,
        **options,
    )  # fmt: skip


def _check_settings(path: Path, args: StudyArguments, images: ImageArguments) -> None:
    """Refuses to go on with runs of other settings.

    Raises:
        UsageError: if the folder holds such.
    """
    left_out = ["overwrite", "output_dir", "num_workers", "num_blocks", "num_random", "num_seeds"]
    left_out += ["num_swapped", "max_swaps", "num_iterations", "tolerance", "ridge", "num_exponents", "num_pushed"]
    left_out += ["num_pairs"]  # of the other studies
    settings = to_plain({**dataclasses.asdict(args), **dataclasses.asdict(images)})
    settings = {key: value for key, value in settings.items() if key not in left_out}
    found = read_json(path) if path.is_file() else settings
    if changed := [key for key in settings if found.get(key) != settings[key]]:
        raise UsageError(
            f"{path.parent} holds runs with {changed[0]}={found.get(changed[0])!r}, not {settings[changed[0]]!r}; give "
            "--overwrite to replace them, or another --output_dir."
        )
    write_json(path, settings)


def _accuracy(model: RaptorModel | Teacher, loader: DataLoader, head: Head) -> float:
    """Share of images that a head classifies rightly on a model's final LayerNorm."""
    frozen, hits, count = FrozenBackbone(model), 0, 0
    for batch in loader:
        hits += int((head(frozen(batch["pixel_values"])).argmax(dim=-1).cpu() == batch["labels"]).sum())
        count += len(batch["labels"])
    return hits / count


def _check(args: StudyArguments) -> None:
    """What would only fail after the measuring.

    Raises:
        UsageError: if a value is out of range, or no model is named.
    """
    if args.study not in STUDIES:
        raise UsageError(f"--study {args.study} is unknown; use one of {', '.join(STUDIES)}.")
    if not args.model:
        raise UsageError("no model given; name folders or Hub ids of ViTs or Raptors.")
    if args.head not in HEADS:
        raise UsageError(f"--head {args.head} is unknown; use one of {', '.join(HEADS)}.")
    if args.study == "complexity" and len(set(args.model)) < 2:
        raise UsageError("a study of complexity compares Raptors with their teacher; name the teacher, then Raptors.")
    if args.study in ("partitions", "paradigms") and len(set(args.model)) > 1:
        raise UsageError(f"a study of {args.study} distils one teacher; name one model.")
    if args.study == "paradigms" and args.distill_steps == 0:
        raise UsageError("--distill_steps 0 leaves a study of paradigms nothing to measure; give some steps.")
    if args.study != "partitions" and args.num_blocks is not None and len(args.num_blocks) != 1:
        raise UsageError(
            f"--num_blocks {args.num_blocks}: a study of {args.study} is of one partition; give one number."
        )
    if args.num_blocks is not None and min(args.num_blocks, default=0) < 1:
        raise UsageError(f"--num_blocks {args.num_blocks}: give numbers of at least 1, such as 2 3 4.")
    check_ranges(args, {
        0: ("distill_steps", "num_random", "seed", "num_exponents", "num_workers", "num_pairs"),
        1: ("batch_size", "max_swaps", "num_seeds", "distill_batch_size", "num_pushed"),
        4: ("num_iterations",),
    }, above_zero=("ridge", "tolerance"))  # fmt: skip
    if not args.num_swapped or min(args.num_swapped) < 1:
        raise UsageError(f"--num_swapped {args.num_swapped}: replace at least one layer, such as 1 2 3.")


def _loader(pixels: PixelDataset, args: StudyArguments) -> DataLoader:
    return DataLoader(pixels, args.batch_size, num_workers=args.num_workers, collate_fn=collate_pixels)


def _states(teacher: Teacher, loader: DataLoader) -> Iterator[tuple[torch.Tensor, ...]]:
    return (teacher.hidden_states(batch["pixel_values"].to(teacher.device)) for batch in loader)


def _head(
    model: RaptorModel | Teacher,
    processor: Any,
    label: str,
    evaluation: ImageDataset,
    args: StudyArguments,
    images: ImageArguments,
) -> Head | None:
    """A linear probe of the untouched model, as a function of the final LayerNorm's output; `None` if not wanted."""
    if args.head == "none":
        return None
    options = ProbeArguments(
        learning_rate=args.learning_rate, num_epochs=args.num_epochs, augment="none", seeds=(args.seed,)
    )
    train = load_split(images, images.train_split, args.seed)
    probe = LinearProbe(train, evaluation, options, image_size=images.image_size, num_workers=args.num_workers)
    with status(f"probing {label}"):
        head: Any = probe(model, processor, label).head
    layout = layout_of(model)
    return lambda last_hidden_state: head(IMAGE_CLASSIFICATION.features(last_hidden_state.float(), layout))
