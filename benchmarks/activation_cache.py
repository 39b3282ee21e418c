"""Time a training step that reads the teacher's states beside one that computes them.

Both are whole steps of [`RaptorDistillationTrainer`] with the preset `recommended`: the one takes a batch from an
[`ActivationCache`], the other takes images, processes them and runs the teacher. The files of the cache were just
written and lie in memory, as those of a set do that fits there: a disk adds its own time, which the bytes that a second
of steps reads let you judge. Images are random, 256 x 256 pixels.

    python benchmarks/activation_cache.py --shapes vit-b --batch-sizes 8 --output runs/activation_cache.json
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import SHAPES, Part, comparison, interleave, make_parser, make_teacher, new_report, parse, save, text_of

from raptor_hf import DistillationArguments, RaptorDistillationTrainer, RaptorModel
from raptor_hf.activations import activation_bytes, cache_activations
from raptor_hf.data import ImageDataset, PixelDataset, dinov2_processor
from raptor_hf.distillation import STAGES


def step_of(trainer: RaptorDistillationTrainer) -> Part:
    """A training step: the next batch, the loss, its gradients, the optimiser."""
    model = trainer.accelerator.prepare_model(trainer.model).train()
    optimizer = trainer.create_optimizer()
    batches = itertools.chain.from_iterable(trainer.get_train_dataloader() for _ in itertools.count())
    trainer.state.logging_steps = trainer.state.max_steps = trainer.state.global_step = 10**9  # no teacher forcing

    def step() -> None:
        """One step."""
        trainer.accelerator.backward(trainer.compute_loss(model, next(batches)))
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(name: str, batch_size: int, dtype_name: str, args: Any) -> list[dict[str, Any]]:
    """Rows of both stages."""
    shape, device = SHAPES[name], torch.device(args.device)
    teacher = make_teacher(shape)
    teacher.model.to(device)
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)) for _ in range(4 * batch_size)]
    pixels = PixelDataset(ImageDataset(pictures), dinov2_processor(shape.image_size))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = cache_activations(teacher, pixels, Path(folder) / "cache", batch_size=batch_size)
        for stage in STAGES:
            steps = []
            for number, dataset in enumerate((cache, pixels)):
                options = DistillationArguments(
                    output_dir=f"{folder}/{stage}{number}", stage=stage, per_device_train_batch_size=batch_size,
                    max_steps=1, bf16=dtype_name == "bfloat16", loss_scale="none", use_cpu=args.device == "cpu",
                    report_to="none", disable_tqdm=True, dataloader_pin_memory=args.device != "cpu",
                    torch_compile=args.compile,
                )  # fmt: skip
                student = RaptorModel.from_teacher(teacher, shape.repeats)
                trainer = RaptorDistillationTrainer(
                    student, teacher, options, dataset, processing_class=pixels.processor
                )
                steps.append(step_of(trainer))
            pairs = interleave([steps[0]], [steps[1]], args.pairs, device, args.min_seconds)
            (ours, theirs) = ([pair[which][0] for pair in pairs] for which in (0, 1))
            row = comparison(
                ours, theirs, shape=name, batch_size=batch_size, dtype=dtype_name, compiled=args.compile, what=stage,
                against="computed",
            )  # fmt: skip
            read = activation_bytes(teacher, pixels) / len(pixels) * batch_size
            rows.append({**row, "bytes_per_image": read / batch_size, "bytes_per_second": read / row["ours_s"]})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the tables, writes the file, and returns 0."""
    args = parse(make_parser(__doc__), argv)
    report = new_report("activation_cache", args, argv)
    for name in args.shapes:
        for batch_size in args.batch_sizes:
            for dtype_name in args.dtypes:
                report["rows"] += measure(name, batch_size, dtype_name, args)
                save(report, args.output)
    print(text_of([report]))
    print()
    for row in report["rows"]:
        print(
            f"{row['shape']}, batch {row['batch_size']}, {row['dtype']}, {row['what']}: "
            f"{row['bytes_per_image'] / 1e6:.2f} MB per image, {row['bytes_per_second'] / 1e6:.0f} MB/s read"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
