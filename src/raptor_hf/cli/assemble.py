"""`raptor-hf assemble RUN RUN ...`: blocks that were trained apart, one run each, become one Raptor."""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoImageProcessor

from ..assembly import assemble_blocks, trained_blocks
from ..runs import MODEL_FOLDER
from .console import note, table
from .parsing import parse
from .values import UsageError


@dataclass
class AssembleArguments:
    """What is joined."""

    _argument_group_name = "Assemble"

    runs: list[str] | None = field(
        default=None, metadata={"help": "Folders of finished runs of distill --blocks (required)."}
    )
    output_dir: str = field(default="runs/blocks", metadata={"help": "Folder of the Raptor, in its model/."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    (args,) = parse("assemble", [AssembleArguments], argv, ["runs"], description=__doc__)
    if not args.runs:
        raise UsageError("no runs given; name the folders of runs of distill --blocks: runs/b0 runs/b1 runs/b2.")
    folder = Path(args.output_dir) / MODEL_FOLDER
    if folder.exists():
        raise UsageError(f"{folder} exists; give another --output_dir.")
    parts = [trained_blocks(run) for run in args.runs]
    model = assemble_blocks(parts)
    model.save_pretrained(folder)
    AutoImageProcessor.from_pretrained(parts[0][0]).save_pretrained(folder)
    rows = [(run, " ".join(map(str, blocks))) for run, (_, blocks) in zip(args.runs, parts, strict=True)]
    table(("run", "blocks"), rows, title=f"Raptor of {model.config.num_blocks} blocks")
    note(f"model: {folder}; go on with: raptor-hf distill TEACHER --student {folder}")
    return 0
