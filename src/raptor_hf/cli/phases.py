"""`raptor-hf phases TEACHER`: layer similarity of a teacher, and the phases it suggests."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ..phases import Phases
from ..report import write_report
from ..results import RESULTS_FILE, new_results, teacher_record, write_json
from ..runs import PHASES_FILE, discover_phases
from ..vision_models import public_name
from .common import ImageArguments, TeacherArguments, check_finished, load_split, load_teacher, make_way, to_pixels
from .console import note, status, table
from .parsing import parse


@dataclass
class PhasesArguments:
    """What is looked for."""

    _argument_group_name = "Phases"

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
    args, source, images = parse(
        "phases", [PhasesArguments, TeacherArguments, ImageArguments], argv, ["teacher"], description=__doc__
    )
    output_dir = Path(args.output_dir)
    check_finished(output_dir, args.overwrite)
    teacher = load_teacher(source)
    pixels = to_pixels(load_split(images, images.train_split, args.seed), teacher.image_processor, images.image_size)
    make_way(output_dir, args.overwrite)
    with status("comparing layers"):
        record = discover_phases(
            teacher, pixels, tuple(args.num_blocks), output_dir / PHASES_FILE, tokens=args.tokens,
            batch_size=args.batch_size, method=args.method, score=args.score, min_length=args.min_length,
        )  # fmt: skip
    results = new_results(
        f"Phases of {public_name(source.teacher)}", shlex.join(["raptor-hf", "phases", *argv]), args.seed
    )
    results |= {"teacher": teacher_record(teacher), "phases": record}
    write_json(output_dir / RESULTS_FILE, results)
    write_report(output_dir, results)
    rows = [
        [count, str(Phases.from_schedule(partition["block_schedule"])), partition["score"]]
        for count, partition in record["partitions"].items()
    ]
    table(["blocks", "phases", "score"], rows, title=f"{len(pixels)} images, {args.tokens} tokens")
    note(f"wrote {output_dir}")
    return 0
