"""`raptor-hf probe [classification|segmentation|depth] MODEL [MODEL ...]`: a linear probe of frozen backbones, the same
code for Raptors and ViTs.
"""

import dataclasses
import shlex
from collections import UserDict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import nn
from transformers import AutoModel

from ..activations import weights_digest
from ..dense_data import DenseDataset, load_depth, load_segmentation
from ..dense_probes import DENSE_TASKS, DenseProbe, scaled
from ..modeling_raptor import RaptorModel
from ..predictions import PREDICTIONS_FOLDER, chosen, save_pairs, save_predictions
from ..probe_heads import load_head, model_with_head
from ..probes import IMAGE_CLASSIFICATION, LinearProbe, ProbeArguments, ProbeResult
from ..processes import first_value
from ..report import write_report
from ..results import RESULTS_FILE, new_results, read_json, to_plain, write_json
from ..teachers import Teacher
from ..vision_models import public_name
from .backbones import load_backbone, short_names, to_accelerator
from .common import ImageArguments, check_finished, load_split, make_way, print_probe_table
from .console import is_main_process, note, status, table
from .parsing import parse, require_world_size
from .training_data import open_stream
from .values import UsageError

PROGRESS_FILE = "progress.json"
TASKS = ("classification", *DENSE_TASKS)
# Where the paper's numbers and its code differ from what is measured by default; options of other tasks are left out.
PRESETS: dict[str, dict[str, str]] = {
    "recommended": {},
    "paper": {"select": "best", "eval_size": "input", "align": "paper"},
    "research": {"select": "best", "eval_size": "input", "align": "paper", "silog": "code"},
}
_OWN_OPTIONS = {"classification": (), "segmentation": ("eval_size",), "depth": ("eval_size", "silog", "align", "crop")}
_COLUMNS = {"accuracy": "top-1", "mean_iou": "mIoU", "rmse": "RMSE (m)"}


@dataclass
class ProbeCommandArguments:
    """What is probed, and how the head is trained."""

    _argument_group_name = "Probe"

    model: list[str] = field(
        default_factory=list, metadata={"help": "Raptors and ViTs: folders or Hub ids (required)."}
    )
    reference: str | None = field(default=None, metadata={"help": "Model that retained accuracy is relative to."})
    random_baseline: bool = field(default=False, metadata={"help": "Also probe the reference's shape, untrained."})
    task: str = field(
        default="classification", metadata={"help": "classification, segmentation (ADE20k) or depth (NYUv2)."}
    )
    preset: str = field(
        default="recommended",
        metadata={"help": "paper or research: as its numbers were measured; fills what is not set."},
    )
    learning_rate: float | None = field(
        default=None, metadata={"help": "Of AdamW; default the paper's. Small sets need more, such as 1e-2."}
    )
    weight_decay: float | None = field(default=None, metadata={"help": "Of AdamW; default the paper's."})
    num_epochs: int | None = field(
        default=None, metadata={"help": "Passes over the training images; default the paper's 15, 10 or 25."}
    )
    batch_size: int | None = field(
        default=None, metadata={"help": "Images per step; default the paper's 512, 32 or 128."}
    )
    warmup_steps: int | None = field(
        default=None, metadata={"help": "At most a tenth of the run; default the paper's."}
    )
    augment: str | None = field(
        default=None, metadata={"help": "crop_flip, crop_flip_jitter (depth), or none (features are computed once)."}
    )
    select: str | None = field(
        default=None, metadata={"help": "last epoch (default), or best on the evaluation set, the start included."}
    )
    eval_size: str | None = field(
        default=None, metadata={"help": "Segmentation, depth: score labels at native size, or at the images' (input)."}
    )
    silog: str | None = field(default=None, metadata={"help": "Depth: SILog with AdaBins' root (adabins), or code."})
    align: str | None = field(default=None, metadata={"help": "Depth: cut the padding off (padding), or paper."})
    crop: str | None = field(default=None, metadata={"help": "Depth: score the eigen crop, or none."})
    head: str | None = field(
        default=None,
        metadata={"help": "Model whose head training starts from; with --num_epochs 0 it is scored as it is."},
    )
    num_seeds: int = field(
        default=3, metadata={"help": "Heads trained; mean and sigma are over them.", "aliases": ["--seeds"]}
    )
    save_heads: bool = field(
        default=False,
        metadata={"help": "Save every model with its first head, in output_dir/heads."},
    )
    num_pictures: int = field(
        default=4, metadata={"help": "Segmentation, depth: evaluation images shown with what the first head predicts."}
    )
    table: bool = field(
        default=False, metadata={"help": "Print the paper's Table 1, and write table.md, .csv, .json and .tex."}
    )
    streaming: bool = field(
        default=False,
        metadata={"help": "Classification, --augment none: read images once, as they come (Hub id, .tar shards)."},
    )
    num_workers: int = field(default=0, metadata={"help": "Processes that read images."})
    output_dir: str = field(default="runs/probe", metadata={"help": "Folder of the results."})
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    words = ["--task", argv[0], *argv[1:]] if argv[:1] and argv[0] in TASKS else argv
    args, images = parse("probe", [ProbeCommandArguments, ImageArguments], words, ["model"], description=__doc__)
    if args.task not in TASKS:
        raise UsageError(f"--task {args.task} is unknown; use one of {', '.join(TASKS)}.")
    names = list(dict.fromkeys(([args.reference] if args.reference else []) + args.model))
    if not names:
        raise UsageError("no model given; name folders or Hub ids of Raptors or ViTs.")
    if args.random_baseline and args.reference is None:
        raise UsageError("--random_baseline needs --reference, whose shape it has.")
    processes = PartialState(cpu=not torch.accelerator.is_available())
    require_world_size(processes.num_processes, "probe ...")
    output_dir = Path(args.output_dir)
    check_finished(output_dir, args.overwrite)
    probe = _make_probe(args, images)
    labels = short_names(names)
    if args.reference and "teacher" not in labels:
        labels[0] = "teacher"  # what reports call the reference
    backbones = {label: load_backbone(name) for label, name in zip(labels, names, strict=True)}
    reference = next(iter(backbones)) if args.reference else ""
    if args.random_baseline:
        backbones["random"] = _random(backbones[reference])
    make_way(output_dir, args.overwrite)
    settings = {
        "format": 3,
        "task": args.task,
        "head": args.head,
        "save_heads": args.save_heads,
        "streaming": args.streaming,
        "num_pictures": args.num_pictures,
        **dataclasses.asdict(images),
    }
    progress = _Progress(output_dir / PROGRESS_FILE, {**settings, **probe.get_config_dict()})
    outcomes, sizes = {}, {}
    for label, (backbone, processor) in backbones.items():
        with status(f"probing {label}"):
            keep = partial(_keep_first, output_dir, label, backbone, processor, probe, args)
            outcomes[label] = probe(backbone, processor, label, progress.of(backbone), keep)
            sizes[label] = probe.size(backbone, processor)
    if not is_main_process():
        return 0
    teacher = outcomes.get(reference)
    results = new_results(
        f"Linear probe on {public_name(images.dataset)}", shlex.join(["raptor-hf", "probe", *argv]), 0
    )
    results["probe"] = _record(probe, outcomes, teacher, sizes, args, images)
    write_report(output_dir, results)
    write_json(output_dir / RESULTS_FILE, results)  # last: a run is finished when its results are there
    progress.path.unlink(missing_ok=True)
    if args.table:
        print_probe_table(output_dir, results)
    else:
        _print_outcomes(outcomes, teacher, probe, results["title"])
    note(f"wrote {output_dir}")
    return 0


def _record(
    probe: LinearProbe | DenseProbe, outcomes: dict[str, ProbeResult], teacher: ProbeResult | None,
    sizes: dict[str, Any], args: ProbeCommandArguments, images: ImageArguments,
) -> dict[str, Any]:  # fmt: skip
    """What results.json says of the probe."""
    record: dict[str, Any] = {
        "task": probe.task.name,
        "metric": probe.primary_metric,
        "dataset": public_name(images.dataset),
        "protocol": {**probe.get_config_dict(), **({"head": public_name(args.head)} if args.head else {})},
        "results": {label: {**outcomes[label].to_dict(teacher), "size": size} for label, size in sizes.items()},
    }
    if isinstance(probe, DenseProbe):
        record["label_names"] = probe.eval_pairs.label_names
        if args.num_pictures > 0:
            record["predictions"] = PREDICTIONS_FOLDER
    return record


def _print_outcomes(
    outcomes: dict[str, ProbeResult], teacher: ProbeResult | None, probe: LinearProbe | DenseProbe, title: str
) -> None:
    rows = [
        [label, outcome.mean, outcome.std, None if teacher is None else outcome.retained(teacher), outcome.num_scored]
        for label, outcome in outcomes.items()
    ]
    table(["model", _COLUMNS[probe.primary_metric], "sigma", "retained", "images"], rows, title=title)


def _keep_first(
    output_dir: Path, label: str, backbone: RaptorModel | Teacher, processor: Any, probe: LinearProbe | DenseProbe,
    args: ProbeCommandArguments, seed: int, head: Any,
) -> None:  # fmt: skip
    """Keeps of the first seed's head what it predicts for some images and, if wanted, itself with its backbone."""
    if seed != probe.arguments.seeds[0] or not is_main_process():
        return
    if isinstance(probe, DenseProbe) and args.num_pictures > 0:
        indices = chosen(len(probe.eval_pairs), args.num_pictures)
        maps = [found.numpy() for found in probe.predict(backbone, processor, head, indices)]
        save_pairs(output_dir / PREDICTIONS_FOLDER, (probe.eval_pairs[index] for index in indices))
        save_predictions(output_dir / PREDICTIONS_FOLDER, label, maps)
    if args.save_heads:
        folder = output_dir / "heads" / label
        model, own_processor = model_with_head(backbone, head, processor, probe)
        model.save_pretrained(folder)
        own_processor.save_pretrained(folder)
        note(f"wrote {folder}")


class _Progress:
    """What seeds gave so far, in a file that an interrupted command goes on from; of other settings it is not used.

    A backbone is known by its weights, so that one that was trained again is probed again.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, to_plain({k: v for k, v in settings.items() if k != "seeds"})
        found = read_json(path) if path.is_file() else {}
        same = found.get("settings") == self.settings
        self.seeds: dict[str, dict[str, Any]] = first_value(found["seeds"] if same else {})

    def of(self, backbone: RaptorModel | Teacher) -> MutableMapping[int, Any]:
        """Outcomes of a backbone by seed, written to the file as they come."""
        model = backbone.model if isinstance(backbone, Teacher) else backbone
        own = self.seeds.setdefault(weights_digest(model), {})
        return _Outcomes(own, self._write)

    def _write(self) -> None:
        if is_main_process():
            write_json(self.path, {"settings": self.settings, "seeds": self.seeds})


class _Outcomes(UserDict):
    """Outcomes by seed over a mapping with text keys, as JSON has them."""

    def __init__(self, stored: dict[str, Any], write: Callable[[], Any]) -> None:
        super().__init__({int(seed): value for seed, value in stored.items()})
        self.stored, self.write = stored, write

    def __setitem__(self, seed: int, value: Any) -> None:
        super().__setitem__(seed, value)
        if hasattr(self, "stored"):  # not while the stored ones are taken over
            self.stored[str(seed)] = value
            self.write()


def _make_probe(args: ProbeCommandArguments, images: ImageArguments) -> LinearProbe | DenseProbe:
    if args.preset not in PRESETS:
        raise UsageError(f"--preset {args.preset} is unknown; use one of {', '.join(PRESETS)}.")
    preset = PRESETS[args.preset]
    own_options = _OWN_OPTIONS[args.task]
    changes: dict[str, Any] = {
        "learning_rate": args.learning_rate, "weight_decay": args.weight_decay, "num_epochs": args.num_epochs,
        "batch_size": args.batch_size, "warmup_steps": args.warmup_steps, "augment": args.augment,
        "select": args.select or preset.get("select"), "seeds": tuple(range(args.num_seeds)),
    }  # fmt: skip
    own = {"eval_size": args.eval_size, "silog": args.silog, "align": args.align, "crop": args.crop}
    own = {name: preset.get(name) if value is None and name in own_options else value for name, value in own.items()}
    if args.task == "classification":
        if given := [name for name, value in own.items() if value is not None]:
            raise UsageError(f"--{given[0]} is an option of dense probes; leave it out of a classification.")
        arguments = dataclasses.replace(ProbeArguments(), **{k: v for k, v in changes.items() if v is not None})
        if args.streaming and arguments.augment != "none":
            raise UsageError("--streaming reads every image once, without augmentation; give --augment none with it.")
        load = partial(open_stream, shuffle_buffer=0) if args.streaming else load_split
        splits = (load(images, images.train_split), load(images, images.eval_split))
        start = _load_head(args, IMAGE_CLASSIFICATION.name, splits[0].label_names)
        size, workers = images.image_size, args.num_workers
        return LinearProbe(*splits, arguments, image_size=size, num_workers=workers, start=start)
    if args.streaming:
        raise UsageError(f"--streaming is an option of classification; {args.task} reads its pairs as they are needed.")
    task, defaults = DENSE_TASKS[args.task]
    if images.image_size is not None:  # the longer side follows in the ratio of the task's own size
        height, width = defaults.image_size
        changes["image_size"] = (images.image_size, round(images.image_size * width / height))
    train, evaluation = (
        _load_pairs(args.task, images, split) for split in (images.train_split, str(images.eval_split))
    )
    options, start = scaled(defaults, **changes, **own), _load_head(args, task.name)
    return DenseProbe(task, train, evaluation, options, num_workers=args.num_workers, start=start)


def _load_head(args: ProbeCommandArguments, task: str, label_names: Sequence[str] | None = None) -> nn.Module | None:
    if args.head is None:
        return None
    try:
        return load_head(args.head, task, label_names)
    except (OSError, ValueError) as error:
        raise UsageError(f"--head {args.head}: {str(error).splitlines()[0]}") from error


def _load_pairs(task: str, images: ImageArguments, split: str) -> DenseDataset:
    """Images with a label for every pixel, announced on stderr."""
    if images.on_error not in ("raise", "skip"):
        raise UsageError(f"--on_error {images.on_error} is unknown; use raise or skip.")
    load = load_segmentation if task == "segmentation" else load_depth
    pairs = load(images.dataset, split, revision=images.dataset_revision)
    if images.max_images is not None and images.max_images < len(pairs):
        order = np.random.default_rng(0).permutation(len(pairs))[: images.max_images]
        pairs = pairs.select(sorted(order.tolist()))
    pairs = pairs.without_damaged() if images.on_error == "skip" else pairs
    skipped = f", {pairs.num_skipped} damaged ones left out" if pairs.num_skipped else ""
    note(f"{pairs.name} ({split}): {len(pairs)} images{skipped}")
    return pairs


def _random(reference: tuple[Any, Any]) -> tuple[Any, Any]:
    backbone, processor = reference
    if not isinstance(backbone, Teacher):
        raise UsageError("--random_baseline needs a ViT as --reference, not a Raptor.")
    torch.manual_seed(0)
    model = AutoModel.from_config(backbone.model.config)
    return Teacher(to_accelerator(model)), processor
