"""`raptor-hf phases MODEL [MODEL ...]`: layer similarity of ViTs, by token group, and the phases it suggests.

Any plain ViT of transformers can be measured: DINOv2, DINOv3, ViT, DeiT, CLIP and SigLIP (their vision towers), BEiT,
ViT-MAE, I-JEPA, ... With several, each has a folder of its own in the output folder, for `raptor-hf distill --phases`.
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ..report import write_report
from ..results import RESULTS_FILE, new_results, teacher_record, write_json
from ..runs import PHASES_FILE, discover_phases
from ..study_report import PHASES_HEADER, phases_rows
from ..vision_models import VisionModel
from .backbones import short_names
from .common import (
    EXAMPLE_TEACHER,
    ImageArguments,
    check_finished,
    load_pretrained,
    load_split,
    make_way,
    to_pixels,
)
from .console import note, status, table
from .parsing import parse
from .values import UsageError


@dataclass
class PhasesArguments:
    """What is looked for."""

    _argument_group_name = "Phases"

    teacher: list[str] = field(
        default_factory=list,
        metadata={"help": "ViTs: folders or Hub ids, distillable or not (required)."},
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a ViT on the Hub."})
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa (default) or eager."})
    num_blocks: list[int] = field(default_factory=lambda: [2, 3, 4], metadata={"help": "Numbers of blocks."})
    method: str = field(default="dp", metadata={"help": "dp (exact) or bisection (the research notebook's)."})
    score: str = field(
        default="weighted_mean", metadata={"help": "Score of a segment: weighted_mean, mean or offdiag."}
    )
    min_length: int | None = field(
        default=None, metadata={"help": "Fewest layers of a phase; default 2 where possible."}
    )
    tokens: str = field(
        default="all", metadata={"help": "Tokens compared: all, cls, registers, patch, cls+mean_patch."}
    )
    batch_size: int = field(default=32, metadata={"help": "Images in a forward pass."})
    seed: int = field(default=0, metadata={"help": "Seed of the subset that --max_images draws."})
    output_dir: str = field(default="runs/phases", metadata={"help": "Folder of the results."})
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    args, images = parse("phases", [PhasesArguments, ImageArguments], argv, ["teacher"], description=__doc__)
    names = list(dict.fromkeys(args.teacher))
    if not names:
        raise UsageError(f"no teacher given; name a Hub id or a folder, for example {EXAMPLE_TEACHER}.")
    if args.revision is not None and len(names) > 1:
        raise UsageError(f"--revision {args.revision} is of one model, got {len(names)}; run them one by one.")
    output_dir = Path(args.output_dir)
    check_finished(output_dir, args.overwrite)
    labels = short_names(names)
    models = {label: load_pretrained(VisionModel, name, args) for label, name in zip(labels, names, strict=True)}
    images_of = load_split(images, images.train_split, args.seed)
    pixels = {label: to_pixels(images_of, model.image_processor, images.image_size) for label, model in models.items()}
    make_way(output_dir, args.overwrite)
    records = {}
    for label, model in models.items():
        folder = output_dir if len(models) == 1 else output_dir / label
        with status(f"comparing layers of {label}"):
            records[label] = discover_phases(
                model, pixels[label], tuple(args.num_blocks), folder / PHASES_FILE, tokens=args.tokens,
                batch_size=args.batch_size, method=args.method, score=args.score, min_length=args.min_length,
            )  # fmt: skip
    results = new_results(f"Phases of {', '.join(models)}", shlex.join(["raptor-hf", "phases", *argv]), args.seed)
    about = {label: teacher_record(model) for label, model in models.items()}
    if len(models) == 1:
        results |= {"teacher": about[labels[0]], "phases": records[labels[0]]}
    else:
        results["phases_of"] = {label: {**about[label], **records[label]} for label in models}
    write_report(output_dir, results)
    write_json(output_dir / RESULTS_FILE, results)  # last: a run is finished when its results are there
    rows = phases_rows({label: {**about[label], **records[label]} for label in models})
    table(PHASES_HEADER, rows, title=f"{len(images_of)} images, {args.tokens} tokens")
    note(f"wrote {output_dir}")
    return 0
