"""`raptor-hf study swaps MODEL [MODEL ...]`: layers replaced by others of the same phase, and of other phases."""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..data import ImageDataset, collate_pixels
from ..interventions import base_states
from ..interventions.runs import layout_of
from ..modeling_raptor import RaptorModel
from ..phases import Phases, find_phases, layer_similarity
from ..probes import IMAGE_CLASSIFICATION, LinearProbe, ProbeArguments
from ..report import write_report
from ..results import RESULTS_FILE, new_results, write_json
from ..studies import study_swaps
from ..study_report import SWAPS_HEADER, swap_rows
from ..teachers import Teacher, public_name
from .backbones import load_backbone, short_names
from .common import ImageArguments, check_finished, load_split, to_pixels
from .console import note, status, table
from .parsing import parse
from .values import UsageError

STUDIES = ("swaps",)
HEADS = ("probe", "none")


@dataclass
class StudyArguments:
    """What is studied."""

    _argument_group_name = "Study"

    models: list[str] = field(
        default_factory=list, metadata={"help": "ViTs and Raptors: folders or Hub ids (required)."}
    )
    study: str = field(default="swaps", metadata={"help": "swaps: layers replaced by others of the model."})
    num_blocks: int = field(default=3, metadata={"help": "Phases of a ViT; a Raptor has its own."})
    repeats: list[int] | None = field(default=None, metadata={"help": "Layers of each phase, in place of found ones."})
    num_swapped: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Layers replaced at once."})
    max_swaps: int | None = field(
        default=50, metadata={"help": "Swaps of each number, drawn where more exist; null for all."}
    )
    head: str = field(
        default="probe",
        metadata={"help": "probe (linear, of the training split; needs labels), or none."},
    )
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
    args, images = parse("study", [StudyArguments, ImageArguments], words, ["models"], description=__doc__)
    _check(args)
    output_dir = Path(args.output_dir)
    check_finished(output_dir, args.overwrite)
    if args.overwrite:
        shutil.rmtree(output_dir, ignore_errors=True)
    names = list(dict.fromkeys(args.models))
    backbones = {label: load_backbone(name) for label, name in zip(short_names(names), names, strict=True)}
    dataset = load_split(images, images.eval_split, args.seed)
    if args.head == "probe" and dataset.labels is None:
        raise UsageError(f"{dataset.name} has no labels for a probe; give --head none to measure the cosine alone.")
    train = load_split(images, images.train_split, args.seed) if args.head == "probe" else None
    records = {}
    for label, (model, processor) in backbones.items():
        pixels = to_pixels(dataset, processor, images.image_size)
        loader = DataLoader(pixels, args.batch_size, num_workers=args.num_workers, collate_fn=collate_pixels)
        head = None if train is None else _head(model, processor, label, train, dataset, args, images.image_size)
        phases = _phases(model, loader, args)
        with status(f"swapping layers of {label}, phases {phases}"):
            records[label] = study_swaps(
                model, loader, phases, num_swapped=args.num_swapped, max_swaps=args.max_swaps, seed=args.seed, head=head
            )
    results = new_results(
        f"Layers of {', '.join(backbones)} replaced", shlex.join(["raptor-hf", "study", *argv]), args.seed
    )
    results["studies"] = {"swaps": records, "dataset": public_name(images.dataset)}
    write_report(output_dir, results)
    write_json(output_dir / RESULTS_FILE, results)  # last: a run is finished when its results are there
    table(SWAPS_HEADER, swap_rows(records), title=f"{len(dataset)} images of {public_name(images.dataset)}")
    note(f"wrote {output_dir}")
    return 0


def _check(args: StudyArguments) -> None:
    """What would only fail after the measuring.

    Raises:
        UsageError: if a value is out of range, or no model is named.
    """
    if args.study not in STUDIES:
        raise UsageError(f"--study {args.study} is unknown; use one of {', '.join(STUDIES)}.")
    if not args.models:
        raise UsageError("no model given; name folders or Hub ids of ViTs or Raptors.")
    if args.head not in HEADS:
        raise UsageError(f"--head {args.head} is unknown; use one of {', '.join(HEADS)}.")
    for name in ("num_blocks", "batch_size", "max_swaps"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} is below 1.")
    if not args.num_swapped or min(args.num_swapped) < 1:
        raise UsageError(f"--num_swapped {args.num_swapped}: replace at least one layer, such as 1 2 3.")


def _phases(model: RaptorModel | Teacher, loader: DataLoader, args: StudyArguments) -> Phases:
    """Phases that were given, a Raptor's own, or those found in a ViT."""
    if args.repeats is not None:
        return Phases.from_repeats(args.repeats)
    if isinstance(model, RaptorModel):
        schedule: Any = model.config.block_schedule
        return Phases.from_schedule(schedule)
    with status("comparing layers"):
        states = (base_states(model, batch["pixel_values"]) for batch in loader)
        return find_phases(layer_similarity(states, layout=model.layout), min(args.num_blocks, model.num_layers))


def _head(
    model: RaptorModel | Teacher,
    processor: Any,
    label: str,
    train: ImageDataset,
    evaluation: ImageDataset,
    args: StudyArguments,
    image_size: int | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear probe of the untouched model, as a function of the final LayerNorm's output."""
    options = ProbeArguments(
        learning_rate=args.learning_rate, num_epochs=args.num_epochs, augment="none", seeds=(args.seed,)
    )
    with status(f"probing {label}"):
        outcome = LinearProbe(train, evaluation, options, image_size=image_size, num_workers=args.num_workers)(
            model, processor, label
        )
    layout, head = layout_of(model), outcome.head
    return lambda last_hidden_state: head(IMAGE_CLASSIFICATION.features(last_hidden_state.float(), layout))  # type: ignore[misc]
