"""Time the measures of the flow over depth beside the forward passes that give the states.

A contender takes `--images` random images through the teacher in batches; ours also feeds the states to a
[`DynamicsEstimator`], without and with ranks, and asks for its result at the end, which more images would share.

    python benchmarks/dynamics.py --shapes vit-b --batch-sizes 8 --dtypes float32 --output runs/dynamics.json
"""

import sys
from typing import Any

import torch
from timing import SHAPES, Part, comparison, interleave, make_parser, make_teacher, new_report, parse, save, text_of

from raptor_hf import Teacher
from raptor_hf.dynamics import DynamicsEstimator
from raptor_hf.interventions import base_states


def passes(teacher: Teacher, batches: list[torch.Tensor], ranks: bool | None) -> Part:
    """All images through the teacher; measured, unless `ranks` is None."""

    def run() -> Any:
        """Once; the measures, if there are any."""
        estimator = None if ranks is None else DynamicsEstimator(teacher.layout, ranks=ranks)
        for pixel_values in batches:
            states = base_states(teacher, pixel_values)
            if estimator is not None:
                estimator.update(states)
        return None if estimator is None else estimator.result()

    return run


def measure(name: str, batch_size: int, dtype_name: str, args: Any) -> list[dict[str, Any]]:
    """Rows without and with ranks."""
    shape, device = SHAPES[name], torch.device(args.device)
    teacher = make_teacher(shape)
    teacher.model.to(device, getattr(torch, dtype_name))
    if args.compile:
        teacher.model.compile()
    images = torch.randn(args.images, 3, shape.image_size, shape.image_size, dtype=getattr(torch, dtype_name))
    batches = list(images.to(device).split(batch_size))
    rows = []
    for what, ranks in (("flow", False), ("flow and ranks", True)):
        ours, alone = passes(teacher, batches, ranks), passes(teacher, batches, None)
        pairs = interleave([ours], [alone], args.pairs, device, args.min_seconds)
        (first, second) = ([pair[which][0] for pair in pairs] for which in (0, 1))
        labels = {"shape": name, "batch_size": batch_size, "dtype": dtype_name, "compiled": args.compile}
        row = comparison(first, second, **labels, what=what, against="forward passes")
        rows.append({**row, "images": args.images})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the table, writes the file, and returns 0."""
    parser = make_parser(__doc__)
    parser.add_argument("--images", type=int, default=64, help="images of a contender, 2 or more")
    args = parse(parser, argv)
    if args.images < 2:
        parser.error(f"--images {args.images}: ranks need updates of at least two images; give 2 or more.")
    report = new_report("dynamics", args, argv)
    for name in args.shapes:
        for batch_size in args.batch_sizes:
            for dtype_name in args.dtypes:
                report["rows"] += measure(name, batch_size, dtype_name, args)
                save(report, args.output)
    print(text_of([report]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
