"""`raptor-hf probe MODEL [MODEL ...]`: a linear probe of frozen backbones, the same code for Raptors and ViTs."""

import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModel

from ..modeling_raptor import RaptorModel
from ..probes import LinearProbe, ProbeArguments
from ..report import write_report
from ..results import RESULTS_FILE, new_results, write_json
from ..teachers import Teacher, public_name
from .common import ImageArguments, check_finished, load_split
from .console import note, status, table
from .parsing import parse
from .values import UsageError


@dataclass
class ProbeCommandArguments:
    """What is probed, and how the head is trained."""

    _argument_group_name = "Probe"

    models: list[str] = field(
        default_factory=list, metadata={"help": "Raptors and ViTs: folders or Hub ids (required)."}
    )
    reference: str | None = field(default=None, metadata={"help": "Model that retained accuracy is relative to."})
    random_baseline: bool = field(default=False, metadata={"help": "Also probe the reference's shape, untrained."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Of AdamW; small sets need more, such as 1e-2."})
    weight_decay: float = field(default=1e-2, metadata={"help": "Of AdamW."})
    num_epochs: int = field(default=15, metadata={"help": "Passes over the training images."})
    batch_size: int = field(default=512, metadata={"help": "Images per step."})
    warmup_steps: int = field(default=100, metadata={"help": "At most a tenth of the run."})
    augment: str = field(default="crop_flip", metadata={"help": "crop_flip, or none (features are computed once)."})
    select: str = field(default="last", metadata={"help": "last epoch, or best on the evaluation set."})
    num_seeds: int = field(default=3, metadata={"help": "Heads trained; mean and sigma are over them."})
    num_workers: int = field(default=0, metadata={"help": "Processes that read images."})
    output_dir: str = field(default="runs/probe", metadata={"help": "Folder of the results."})
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    args, images = parse("probe", [ProbeCommandArguments, ImageArguments], argv, ["models"], description=__doc__)
    names = list(dict.fromkeys(([args.reference] if args.reference else []) + args.models))
    if not names:
        raise UsageError("no model given; name folders or Hub ids of Raptors or ViTs.")
    if args.random_baseline and args.reference is None:
        raise UsageError("--random_baseline needs --reference, whose shape it has.")
    output_dir = Path(args.output_dir)
    check_finished(output_dir, args.overwrite)
    if args.overwrite:
        shutil.rmtree(output_dir, ignore_errors=True)
    probe = LinearProbe(
        load_split(images, images.train_split),
        load_split(images, images.eval_split),
        ProbeArguments(
            learning_rate=args.learning_rate, weight_decay=args.weight_decay, num_epochs=args.num_epochs,
            batch_size=args.batch_size, warmup_steps=args.warmup_steps, augment=args.augment, select=args.select,
            seeds=tuple(range(args.num_seeds)),
        ),
        image_size=images.image_size, num_workers=args.num_workers,
    )  # fmt: skip
    labels = _labels(names)
    if args.reference and "teacher" not in labels:
        labels[0] = "teacher"  # what reports call the reference
    backbones = {label: _load(name) for label, name in zip(labels, names, strict=True)}
    reference = next(iter(backbones)) if args.reference else ""
    if args.random_baseline:
        backbones["random"] = _random(backbones[reference])
    outcomes = {}
    for label, (backbone, processor) in backbones.items():
        with status(f"probing {label}"):
            outcomes[label] = probe(backbone, processor, label)
    teacher = outcomes.get(reference)
    results = new_results(
        f"Linear probe on {public_name(images.dataset)}", shlex.join(["raptor-hf", "probe", *argv]), 0
    )
    results["probe"] = {
        "task": probe.task.name,
        "dataset": public_name(images.dataset),
        "protocol": probe.get_config_dict(),
        "results": {label: outcome.to_dict(teacher) for label, outcome in outcomes.items()},
    }
    write_json(output_dir / RESULTS_FILE, results)
    write_report(output_dir, results)
    rows = [
        [label, outcome.mean, outcome.std, None if teacher is None else outcome.retained(teacher), outcome.num_scored]
        for label, outcome in outcomes.items()
    ]
    table(["model", "top-1", "sigma", "retained", "images"], rows, title=results["title"])
    note(f"wrote {output_dir}")
    return 0


def _labels(names: list[str]) -> list[str]:
    """Short names, as long as needed to be told apart."""
    short = [public_name(name) for name in names]
    parents = [f"{Path(name).resolve().parent.name}/{label}" for name, label in zip(names, short, strict=True)]
    return [long if short.count(label) > 1 else label for label, long in zip(short, parents, strict=True)]


def _load(name: str) -> tuple[Any, Any]:
    try:
        config = AutoConfig.from_pretrained(name)
        if config.model_type == "raptor":
            model, processor = RaptorModel.from_pretrained(name), AutoImageProcessor.from_pretrained(name)
            return _to_accelerator(model), processor
        teacher = Teacher.from_pretrained(name)
    except OSError as error:
        raise UsageError(f"model {name!r} cannot be loaded: {error}") from error
    if teacher.image_processor is None:
        raise UsageError(f"model {name!r} has no image processor; add a preprocessor_config.json to its folder.")
    _to_accelerator(teacher.model)
    return teacher, teacher.image_processor


def _random(reference: tuple[Any, Any]) -> tuple[Any, Any]:
    backbone, processor = reference
    if not isinstance(backbone, Teacher):
        raise UsageError("--random_baseline needs a ViT as --reference, not a Raptor.")
    torch.manual_seed(0)
    model = AutoModel.from_config(backbone.model.config)
    return Teacher(_to_accelerator(model)), processor


def _to_accelerator(model: Any) -> Any:
    return model.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else model
