"""What `inference.py` and `training_step.py` share: shapes, interleaved timing, the interval of a median, one table.

Two contenders run in turn, A B A B ..., so that a machine that slows down slows both; each pair gives one ratio. The
interval of the median ratio is the distribution-free one between two order statistics, with its exact coverage: of 9
pairs the 2nd to the 8th, 96.1 %. Run as a script it prints the results of earlier runs as one table:

    python benchmarks/timing.py runs/gpu/*.json
"""

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from raptor_hf import Teacher
from raptor_hf.results import new_results, read_json, without_folders, write_json

MIN_PAIRS = 9
CONFIDENCE = 0.95
AGAINST = ("teacher", "research", "research-fused", "products")
AGAINST_DEFAULT = ("teacher", "research", "products")
OURS = "Raptor k=3"
HEADER = ("shape", "batch", "dtype", "compiled", "what", "ours", "against", "ratio", "interval", "outside products")
MEMORY_HEADER = ("shape", "batch", "dtype", "what", "peak memory")
LOOP_HEADER = ("shape", "batch", "dtype", "whole loop", "in matrix products")

Part = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of a teacher and of the images it is given.

    Attributes:
        hidden_size, num_heads: features of a token and attention heads; the MLP is four times as wide.
        repeats: applications of each block of the Raptor, together the layers.
        image_size: pixels of an image's side.
        native_size: the size the positions were learnt at; DINOv2's are interpolated from 518 pixels.
    """

    hidden_size: int
    num_heads: int
    repeats: tuple[int, ...]
    image_size: int = 224
    native_size: int = 518
    patch_size: int = 14
    num_register_tokens: int = 4

    @property
    def num_layers(self) -> int:
        """Layers of teacher and student."""
        return sum(self.repeats)

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def seq_length(self) -> int:
        """Tokens of an image: cls, registers, patches."""
        return 1 + self.num_register_tokens + self.num_patches

    @property
    def schedule(self) -> list[int]:
        """Block of every layer."""
        return [block for block, repeat in enumerate(self.repeats) for _ in range(repeat)]


SHAPES = {
    "vit-s": Shape(384, 6, (7, 3, 2)),
    "vit-b": Shape(768, 12, (7, 3, 2)),
    "tiny": Shape(32, 2, (1, 1, 1), image_size=28, native_size=56),  # to try a command
}


def make_teacher(shape: Shape) -> Teacher:
    """DINOv2 with registers of that shape, random weights, on the CPU."""
    config = Dinov2WithRegistersConfig(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, num_hidden_layers=shape.num_layers,
        image_size=shape.native_size, patch_size=shape.patch_size, num_register_tokens=shape.num_register_tokens,
    )  # fmt: skip
    return Teacher(Dinov2WithRegistersModel(config).eval())


def synchronize(device: torch.device) -> None:
    """Waits for what a GPU still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample(parts: Sequence[Part], calls: int, device: torch.device) -> list[float]:
    """Seconds per call from its start to the end of each part; `parts` run one after the other, `calls` times."""
    elapsed = [0.0] * len(parts)
    for _ in range(calls):
        synchronize(device)
        start = time.perf_counter()
        for number, part in enumerate(parts):
            part()
            synchronize(device)
            elapsed[number] += time.perf_counter() - start
    return [seconds / calls for seconds in elapsed]


def interleave(
    first: Sequence[Part], second: Sequence[Part], pairs: int, device: torch.device, min_seconds: float = 0.3
) -> list[tuple[list[float], list[float]]]:
    """Times two contenders in turn, `pairs` times.

    Both are run twice before, which compiles them and fills caches. A sample is as many calls as last `min_seconds`.

    Returns:
        for every pair the seconds per call of either contender up to the end of each of its parts.
    """
    calls = []
    for parts in (first, second):
        sample(parts, 1, device)
        calls.append(max(1, math.ceil(min_seconds / sample(parts, 1, device)[-1])))
    return [(sample(first, calls[0], device), sample(second, calls[1], device)) for _ in range(pairs)]


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Distribution-free interval of the median of independent `values`: the narrowest pair of order statistics, equally
    far from both ends, that covers it with at least `confidence`; of too few values the whole range.

    Returns:
        its ends and the probability that it covers the median.
    """
    count, ordered, below, from_end = len(values), sorted(values), 0.5 ** len(values), 1
    while 2 * from_end < count:  # `below`: chance that fewer than `from_end` values lie under the median
        more = below + math.comb(count, from_end) * 0.5**count
        if 1 - 2 * more < confidence:
            break
        below, from_end = more, from_end + 1
    return ordered[from_end - 1], ordered[-from_end], 1 - 2 * below


def comparison(ours: Sequence[float], theirs: Sequence[float], **labels: Any) -> dict[str, Any]:
    """A row of results: medians in seconds, and the median of the ratios ours / theirs with its interval.

    Against the bare matrix products (`against="products"`) it also has the share of our time outside of them.
    """
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    low, high, coverage = median_interval(ratios)
    row = {
        **labels, "ours_s": statistics.median(ours), "against_s": statistics.median(theirs),
        "ratio": statistics.median(ratios), "low": low, "high": high, "coverage": coverage, "pairs": len(ratios),
        "ratios": ratios,
    }  # fmt: skip
    if labels.get("against") == "products":
        row["outside_products"] = 1 - statistics.median(other / own for own, other in zip(ours, theirs, strict=True))
    return row


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of both benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["vit-s", "vit-b"], help="sizes of the teacher")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], help="images of a batch")
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"], help="precisions"
    )
    parser.add_argument("--against", nargs="+", choices=AGAINST, default=list(AGAINST_DEFAULT), help="beside what")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help=f"interleaved pairs, {MIN_PAIRS} or more")
    parser.add_argument("--min-seconds", type=float, default=0.3, help="a sample lasts at least this long")
    parser.add_argument("--quick", action="store_true", help="allow fewer pairs, to try a command")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads, PyTorch's choice by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model")
    parser.add_argument("--output", type=Path, default=None, help="JSON file, written after every configuration")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads and checks the options, sets the threads and the seed; wrong ones end with one line and status 2."""
    args = parser.parse_args(argv)
    if args.pairs < (1 if args.quick else MIN_PAIRS):
        parser.error(f"--pairs {args.pairs}: give at least {MIN_PAIRS}, or --quick to try a command with fewer.")
    if min(args.batch_sizes) < 1:
        parser.error(f"--batch-sizes {min(args.batch_sizes)}: a batch has at least one image.")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device; leave the option out to run on the CPU.")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    return args


def new_report(title: str, args: argparse.Namespace, argv: Sequence[str] | None) -> dict[str, Any]:
    """Results without rows: machine, versions, settings. `title` is the script's name."""
    command = shlex.join(["python", f"benchmarks/{title}.py", *(sys.argv[1:] if argv is None else argv)])
    settings = {**vars(args), "shapes": {name: SHAPES[name] for name in args.shapes}}
    settings["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return {**new_results(title, command, 0), "settings": settings, "rows": [], "memory": [], "loop": []}


def save(report: dict[str, Any], output: Path | None) -> None:
    """Writes the report to `output`, if there is one; paths are left out of it."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in report["settings"].items() if not isinstance(value, Path)}
        write_json(output, without_folders({**report, "settings": settings}))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def comparison_cells(row: dict[str, Any]) -> list[str]:
    """Cells of one comparison under `HEADER`."""
    outside = row.get("outside_products")
    return [
        row["shape"], str(row["batch_size"]), row["dtype"], "yes" if row["compiled"] else "no", row["what"],
        f"{1e3 * row['ours_s']:.2f} ms", f"{row['against']} {1e3 * row['against_s']:.2f} ms", f"{row['ratio']:.3f}",
        f"{row['low']:.3f} .. {row['high']:.3f} ({row['coverage']:.1%})", "" if outside is None else f"{outside:.1%}",
    ]  # fmt: skip


def text_of(reports: Sequence[dict[str, Any]]) -> str:
    """What the reports measured: one table of the comparisons, then memory and whole loop if they were measured."""
    tables = [table(HEADER, [comparison_cells(row) for report in reports for row in report["rows"]])]
    memory = [
        [row["shape"], str(row["batch_size"]), row["dtype"], row["what"], f"{row['bytes'] / 2**20:.0f} MiB"]
        for report in reports
        for row in report["memory"]
    ]
    loop = [
        [row["shape"], str(row["batch_size"]), row["dtype"], f"{row['seconds_per_step']:.3f} s", f"{row['share']:.1%}"]
        for report in reports
        for row in report["loop"]
    ]
    tables += [table(header, rows) for header, rows in ((MEMORY_HEADER, memory), (LOOP_HEADER, loop)) if rows]
    return "\n\n".join(tables)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables of recorded runs and returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON files of inference.py and training_step.py")
    print(text_of([read_json(path) for path in parser.parse_args(argv).files]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
