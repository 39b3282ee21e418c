r"""What each part of the recipe is worth: the paper's Table 2 (arXiv 2512.19941) for your own teacher and images.

    python examples/06_ablations.py runs/quickstart/teacher --image_size 16 --num_blocks 3 --max_steps 2000 \
        --distill_options "--preset research --learning_rate 1e-3 --per_device_train_batch_size 32 --no_bf16
                           --dataloader_num_workers 0" \
        --probe_options "--augment none --learning_rate 1e-2 --num_epochs 60 --batch_size 128"

A head is trained on the teacher (or taken from `--head`) and scores the Raptors of `examples/recipes/ablations` as it
is: teacher forcing alone, + annealing to autoregression, + depth scale, + weight of the cls token, + stage 2. The last
row is the Raptor of the row before with that head trained on. `--max_steps` are the steps of each stage. What is
finished is kept: the same command goes on where it was stopped. `--output_dir` has a report for each row, and the table
as `table.md`, `.csv`, `.json` and `.tex`.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from raptor_hf.cli import main as command
from raptor_hf.probe_tables import markdown, probe_records, probe_table, write_tables
from raptor_hf.results import RESULTS_FILE, read_json

RECIPES = sorted((Path(__file__).parent / "recipes" / "ablations").glob("*.yaml"))
TUNED = "6-probe-tuning"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Whose ablations, on what."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="folder or Hub id of a ViT")
    parser.add_argument("--dataset", default="digits", help="folder of images, Hub dataset id, or digits (default)")
    parser.add_argument("--eval_split", default="test", help="split that is not trained on, default test")
    parser.add_argument("--head", help="classifier of the teacher; default: one is trained")
    parser.add_argument("--image_size", type=int, default=224, help="side of the images in pixels, default 224")
    parser.add_argument("--num_blocks", type=int, help="blocks of found phases; default the paper's 7 3 2")
    parser.add_argument("--max_steps", type=int, default=2000, help="steps of each stage, default 2000")
    parser.add_argument("--distill_options", default="", help="more options of raptor-hf distill, in quotes")
    parser.add_argument("--probe_options", default="", help="more options of raptor-hf probe, in quotes")
    parser.add_argument("--output_dir", default="runs/ablations", help="folder of all runs and of the table")
    return parser.parse_args(argv)


def run(folder: Path, *argv: str) -> dict[str, Any]:
    """Results of `raptor-hf ARGV --output_dir FOLDER`, run now unless they are there."""
    if not (folder / RESULTS_FILE).is_file():
        code = command([*argv, "--output_dir", str(folder)])
        if code:
            sys.exit(code)
    return read_json(folder / RESULTS_FILE)


def ablate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per row, as [`~raptor_hf.probe_tables.probe_records`] has them."""
    folder = Path(args.output_dir)
    images = ["--dataset", args.dataset, "--eval_split", args.eval_split, "--image_size", str(args.image_size)]
    probe = ["probe", "classification", *images, *shlex.split(args.probe_options)]
    head = args.head
    if head is None:
        run(folder / "head", *probe, args.teacher, "--save_heads", "--num_seeds", "1")
        (found,) = (folder / "head" / "heads").iterdir()
        head = str(found)
    models = []
    for recipe in RECIPES:
        options = [*images, "--max_steps", str(args.max_steps), *shlex.split(args.distill_options)]
        if models and "student:" in recipe.read_text(encoding="utf-8"):
            options += ["--student", models[-1]]
        elif args.num_blocks is not None:
            options += ["--repeats", *map(str, phases(folder / "phases", args, images))]
        run(folder / recipe.stem, "distill", str(recipe), "--teacher", args.teacher, *options)
        models.append(str(folder / recipe.stem / "model"))
    reference = ["--reference", args.teacher, "--head", head]
    records = probe_records(run(folder / "kept", *probe, *models, *reference, "--num_epochs", "0", "--num_seeds", "1"))
    tuned = probe_records(run(folder / "tuned", *probe, models[-1], *reference, "--select", "best"))
    return records + [record | {"model": TUNED} for record in tuned if record["num_blocks"] is not None]


def phases(folder: Path, args: argparse.Namespace, images: list[str]) -> list[int]:
    """Layers of each of the `args.num_blocks` phases of the teacher."""
    found = run(folder, "phases", args.teacher, "--num_blocks", str(args.num_blocks), *images)["phases"]
    return [int(count) for count in found["partitions"][str(args.num_blocks)]["repeats"]]


def main() -> None:
    """Runs what is missing, prints the table and writes it."""
    args = parse()
    records = ablate(args)
    write_tables(args.output_dir, records)
    print(markdown(*probe_table(records)))


if __name__ == "__main__":
    main()
