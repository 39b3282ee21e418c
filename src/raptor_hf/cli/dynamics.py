"""`raptor-hf dynamics MODEL [MODEL ...]`: the flow of token states over depth, of ViTs and Raptors side by side."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ..data import collate_pixels
from ..interventions import EPS_SCALES
from ..report import write_report
from ..results import RESULTS_FILE, new_results, to_plain, write_json
from ..studies import compare_flows, study_dynamics
from ..study_report import FLOW_HEADER, flow_rows
from ..vision_models import public_name
from .backbones import load_backbone, short_names
from .common import ImageArguments, check_finished, check_ranges, load_split, make_way, to_pixels
from .console import note, status, table
from .parsing import parse
from .values import UsageError


@dataclass
class DynamicsArguments:
    """What is measured."""

    _argument_group_name = "Dynamics"

    model: list[str] = field(
        default_factory=list,
        metadata={"help": "ViTs and Raptors: folders or Hub ids (required); the others are compared with the first."},
    )
    num_blocks: int = field(default=3, metadata={"help": "Phases of a ViT that figures show; a Raptor has its own."})
    ranks: bool = field(default=True, metadata={"help": "Whether to measure ranks of updates, the larger cost."})
    rank: int = field(default=10, metadata={"help": "Modes of the dynamic mode decomposition."})
    num_classes: int = field(default=5, metadata={"help": "Classes whose paths are drawn."})
    epsilon: float = field(default=0.1, metadata={"help": "Size of the perturbations of the sensitivity curve."})
    epsilon_scale: str = field(
        default="relative", metadata={"help": "relative to the token's norm, or absolute (the paper's)."}
    )
    path_epsilon: float = field(default=1.0, metadata={"help": "Size of the perturbation that is drawn, relative."})
    num_perturbed: int = field(default=16, metadata={"help": "Images that are perturbed; 0 for none."})
    batch_size: int = field(default=32, metadata={"help": "Images in a forward pass."})
    num_workers: int = field(default=0, metadata={"help": "Processes that read images."})
    seed: int = field(default=0, metadata={"help": "Seed of the perturbations and of the subset of --max_images."})
    output_dir: str = field(default="runs/dynamics", metadata={"help": "Folder of the results."})
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    args, images = parse("dynamics", [DynamicsArguments, ImageArguments], argv, ["model"], description=__doc__)
    names = list(dict.fromkeys(args.model))
    _check(args, names)
    output_dir = Path(args.output_dir)
    check_finished(output_dir, args.overwrite)
    backbones = {label: load_backbone(name) for label, name in zip(short_names(names), names, strict=True)}
    dataset = load_split(images, images.eval_split, args.seed)
    make_way(output_dir, args.overwrite)
    records, angles, loaders = {}, {}, {}
    for label, (model, processor) in backbones.items():
        pixels = to_pixels(dataset, processor, images.image_size)
        loaders[label] = DataLoader(pixels, args.batch_size, num_workers=args.num_workers, collate_fn=collate_pixels)
        with status(f"measuring {label}"):
            records[label] = study_dynamics(
                model, loaders[label], num_blocks=args.num_blocks, ranks=args.ranks, rank=args.rank,
                num_classes=args.num_classes, epsilon=args.epsilon, epsilon_scale=args.epsilon_scale,
                path_epsilon=args.path_epsilon, num_perturbed=args.num_perturbed, seed=args.seed,
            )  # fmt: skip
    first, *others = backbones
    for label in others:
        if _alike(backbones[first], backbones[label], records[first], records[label]):
            with status(f"comparing {label} with {first}"):
                angles[label] = compare_flows(backbones[first][0], backbones[label][0], loaders[first])
    results = new_results(
        f"Dynamics of {', '.join(backbones)}", shlex.join(["raptor-hf", "dynamics", *argv]), args.seed
    )
    results["dynamics"] = {
        "dataset": public_name(images.dataset), "num_images": len(dataset), "models": records, "angles": angles
    }  # fmt: skip
    write_report(output_dir, results)
    write_json(output_dir / RESULTS_FILE, results)  # last: a run is finished when its results are there
    table(FLOW_HEADER, flow_rows(records), title=f"{len(dataset)} images of {public_name(images.dataset)}")
    note(f"wrote {output_dir}")
    return 0


def _check(args: DynamicsArguments, names: list[str]) -> None:
    """What would only fail after the measuring.

    Raises:
        UsageError: if a value is out of range, or no model is named.
    """
    if not names:
        raise UsageError("no model given; name folders or Hub ids of ViTs or Raptors.")
    check_ranges(args, {
        0: ("num_classes", "num_perturbed", "seed", "num_workers"), 1: ("num_blocks", "rank", "batch_size")
    }, above_zero=("epsilon", "path_epsilon"))  # fmt: skip
    if args.epsilon_scale not in EPS_SCALES:
        raise UsageError(f"--epsilon_scale {args.epsilon_scale} is unknown; use one of {', '.join(EPS_SCALES)}.")


def _alike(first: tuple[Any, Any], second: tuple[Any, Any], ours: Any, theirs: Any) -> bool:
    """Whether states of both can be compared: the same pixels, layers, features and token groups."""
    sizes = [getattr(model, "model", model).config.hidden_size for model, _ in (first, second)]
    same_flow = ours["num_layers"] == theirs["num_layers"] and set(ours["groups"]) == set(theirs["groups"])
    same_pixels = to_plain(first[1].to_dict()) == to_plain(second[1].to_dict())
    return same_flow and same_pixels and sizes[0] == sizes[1]
