"""Size and load time of a Raptor's folder beside its teacher's, both of DINOv2-B with registers, with random weights.

python benchmarks/hub.py
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from raptor_hf import RaptorModel, Teacher


def folder_bytes(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def seconds(folders: dict[str, Path], repeats: int) -> dict[str, float]:
    """Median seconds of `AutoModel.from_pretrained`, the folders in turn; a first load of each is not counted."""
    times: dict[str, list[float]] = {name: [] for name in folders}
    for repeat in range(repeats + 1):
        for name, folder in folders.items():
            start = time.perf_counter()
            model: Any = AutoModel.from_pretrained(folder)
            float(sum(parameter.detach().flatten()[0] for parameter in model.parameters()))  # pages are read
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main(argv: list[str] | None = None) -> int:
    """Prints the table and returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="loads of each")
    parser.add_argument("--layers", type=int, default=12, help="layers of the teacher")
    parser.add_argument("--hidden-size", type=int, default=768, help="its features")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    config = Dinov2WithRegistersConfig(
        hidden_size=args.hidden_size, num_attention_heads=args.hidden_size // 64, num_hidden_layers=args.layers,
        image_size=518, patch_size=14, num_register_tokens=4,
    )  # fmt: skip
    teacher = Teacher(Dinov2WithRegistersModel(config).eval())
    thirds = [args.layers // 3 + (number < args.layers % 3) for number in range(3)]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in ("teacher", "Raptor k=3")}
        teacher.model.save_pretrained(folders["teacher"])
        RaptorModel.from_teacher(teacher, thirds).save_pretrained(folders["Raptor k=3"])
        sizes, times = {name: folder_bytes(folder) for name, folder in folders.items()}, seconds(folders, args.repeats)
    for name in folders:
        share = sizes[name] / sizes["teacher"]
        print(f"{name:<12} {sizes[name] / 1e6:8.1f} MB ({share:.1%})  load {times[name] / times['teacher']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
