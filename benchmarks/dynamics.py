"""Time the measures of the flow over depth beside the forward passes that give the states.

A contender takes a batch of random images through the teacher; ours also feeds the states to a [`DynamicsEstimator`],
without and with ranks, and asks for its result, whose time does not depend on the number of images. From both follow
the seconds for `--images` of them, which share one result.

    python benchmarks/dynamics.py --shapes vit-b --batch-sizes 8 --dtypes float32 --output runs/dynamics.json
"""

import statistics
import sys
from typing import Any

import torch
from timing import SHAPES, Part, comparison, interleave, make_parser, make_teacher, new_report, parse, save, text_of

from raptor_hf import Teacher
from raptor_hf.dynamics import DynamicsEstimator
from raptor_hf.interventions import base_states


def passes(teacher: Teacher, pixel_values: torch.Tensor, ranks: bool | None) -> list[Part]:
    """A batch through the teacher; and, unless `ranks` is None, into an estimator, whose result is the second part."""
    if ranks is None:
        return [lambda: base_states(teacher, pixel_values)]
    estimator = DynamicsEstimator(teacher.layout, ranks=ranks)
    return [lambda: estimator.update(base_states(teacher, pixel_values)), estimator.result]


def measure(name: str, batch_size: int, dtype_name: str, args: Any) -> list[dict[str, Any]]:
    """Rows without and with ranks: seconds for all images."""
    shape, device, dtype = SHAPES[name], torch.device(args.device), getattr(torch, dtype_name)
    teacher = make_teacher(shape)
    teacher.model.to(device, dtype)
    if args.compile:
        teacher.model.compile()
    pixel_values = torch.randn(batch_size, 3, shape.image_size, shape.image_size).to(device, dtype)
    num_batches = args.images / batch_size
    rows = []
    for what, ranks in (("flow", False), ("flow and ranks", True)):
        ours, alone = passes(teacher, pixel_values, ranks), passes(teacher, pixel_values, None)
        pairs = interleave(ours, alone, args.pairs, device, args.min_seconds)
        results = [both - batch for (batch, both), _ in pairs]
        first = [num_batches * pair[0][0] + result for pair, result in zip(pairs, results, strict=True)]
        second = [num_batches * pair[1][0] for pair in pairs]
        labels = {"shape": name, "batch_size": batch_size, "dtype": dtype_name, "compiled": args.compile}
        row = comparison(first, second, **labels, what=what, against="forward passes")
        rows.append({**row, "images": args.images, "result_s": statistics.median(results)})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the table, writes the file, and returns 0."""
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=200, help="images that share one result")
    args = parse(parser, argv)
    if args.images < 1:
        parser.error(f"--images {args.images}: give at least one.")
    report = new_report("dynamics", args, argv)
    for name in args.shapes:
        for batch_size in args.batch_sizes:
            for dtype_name in args.dtypes:
                report["rows"] += measure(name, batch_size, dtype_name, args)
                save(report, args.output)
    print(text_of([report]))
    print(f"\nSeconds for {args.images} images.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
