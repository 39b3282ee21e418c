"""The main job from end to end, offline, on real images that ship with scikit-learn.

A 12-layer ViT with registers and stochastic depth learns handwritten digits; its phases are found, it is distilled
into Raptors of two and three blocks, teacher and Raptors are probed, and everything is saved, reloaded in a fresh
process and reported. Each finished part is kept, so that an interrupted run goes on where it stopped. It runs on the
CPU, also where there is a GPU: the models are tiny, and the reloaded one can be compared bit for bit.
"""

import dataclasses
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .arguments import DistillationArguments
from .cards import own_results, write_card
from .data import ImageDataset, PixelDataset, collate_pixels, load_images
from .modeling_raptor import RaptorModel
from .phases import Phases
from .probes import LinearProbe, ProbeArguments, ProbeResult
from .report import write_report
from .results import RESULTS_FILE, dataset_record, new_results, read_json, teacher_record, write_json
from .runs import MODEL_FOLDER, PHASES_FILE, discover_phases, distill
from .teachers import Teacher
from .vit_training import KeptPixels, ViTTrainingArguments, digits_config, digits_processor, jitter, train_vit

TEACHER_FOLDER = "teacher"
RECORD_FILE = "record.json"
_RELOAD = """
import sys, torch
from safetensors.torch import load_file
from raptor_hf import RaptorModel
expected = load_file(sys.argv[2])
with torch.no_grad():
    outputs = RaptorModel.from_pretrained(sys.argv[1])(expected.pop("pixel_values"))
sys.exit(0 if torch.equal(outputs.last_hidden_state, expected["last_hidden_state"]) else 3)
"""


@dataclass
class QuickstartArguments:
    """Sizes of the quickstart. The defaults take a few minutes on two cores."""

    _argument_group_name = "Quickstart"

    output_dir: str = field(default="runs/quickstart", metadata={"help": "Folder of the run."})
    num_blocks: list[int] = field(default_factory=lambda: [2, 3], metadata={"help": "Raptors to distil, by blocks."})
    num_seeds: int = field(default=1, metadata={"help": "Raptors distilled for each number of blocks."})
    seed: int = field(default=0, metadata={"help": "Seed of the teacher and of the first Raptors."})
    teacher_epochs: int = field(default=10, metadata={"help": "Passes of the teacher over the digits."})
    distill_steps: int = field(default=300, metadata={"help": "Steps of a distillation, both stages together."})
    batch_size: int = field(default=64, metadata={"help": "Images per step."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate of a distillation."})
    probe_epochs: int = field(default=60, metadata={"help": "Passes of the probe's head."})
    max_images: int | None = field(
        default=None, metadata={"help": "Random subset of the digits, for trying things out."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})


def run_quickstart(
    args: QuickstartArguments,
    command: str = "raptor-hf quickstart",
    status: Callable[[str], AbstractContextManager] = lambda message: nullcontext(),
) -> dict[str, Any]:
    """Runs what is left to do in `args.output_dir` and writes `results.json` and `report.html`.

    Args:
        args: sizes and folder.
        command: how the run was started, for the report.
        status: makes a context that shows a message while a step works.

    Returns:
        the results, as they stand in `results.json`.

    Raises:
        ValueError: if a size is out of range.
        RuntimeError: if a saved Raptor gives other outputs when a fresh process loads it.
    """
    if args.num_seeds < 1 or not args.num_blocks:
        raise ValueError(f"num_seeds={args.num_seeds}, num_blocks={args.num_blocks}: give at least one of each.")
    output_dir = Path(args.output_dir)
    splits = {name: load_images("digits", split=name, max_images=args.max_images) for name in ("train", "test")}
    with status("teacher: training a 12-layer ViT on handwritten digits"):
        teacher = _teacher(args, output_dir / TEACHER_FOLDER, splits["train"])
    train, test = (KeptPixels(splits[name], teacher.image_processor) for name in ("train", "test"))
    with status("phases: comparing the teacher's layers"):
        phases = discover_phases(teacher, train, tuple(args.num_blocks), output_dir / PHASES_FILE, batch_size=128)
    probe = LinearProbe(splits["train"], splits["test"], _probe_arguments(args))
    outcomes: dict[str, list[ProbeResult]] = {"teacher": [probe(teacher, teacher.image_processor, "teacher")]}
    entries = []
    for count in args.num_blocks:
        name = f"raptor-k{count}"
        partition = Phases.from_schedule(phases["partitions"][str(count)]["block_schedule"])
        outcomes[name], runs = [], []
        for seed in range(args.seed, args.seed + args.num_seeds):
            folder = output_dir / f"k{count}" / f"seed{seed}"
            with status(f"{name}, seed {seed}: distilling phases {partition}"):
                model, record = _raptor(args, teacher, partition, folder, train, test, name, seed)
            with status(f"{name}, seed {seed}: probing, and reloading in a fresh process"):
                outcomes[name].append(probe(model, teacher.image_processor, name))
                check_reload(folder / MODEL_FOLDER, model, test)
            runs.append(record)
        entries.append({**runs[0], "path": f"k{count}/seed{args.seed}/{MODEL_FOLDER}", "seeds": _seeds(runs)})
    results = new_results("Quickstart: handwritten digits", command, args.seed)
    results |= {
        "teacher": {**teacher_record(teacher), "name": "digits teacher"},
        "dataset": dataset_record(train, test),
        "phases": phases,
        "models": entries,
        "probe": _probe_record(probe, outcomes),
    }
    write_json(output_dir / RESULTS_FILE, results)
    write_report(output_dir, results)
    for entry in entries:
        write_card(output_dir / entry["path"], own_results(results, entry))
    return read_json(output_dir / RESULTS_FILE)


def _teacher(args: QuickstartArguments, folder: Path, images: ImageDataset) -> Teacher:
    """The trained teacher: loaded if an earlier run finished it, else trained and saved."""
    options = ViTTrainingArguments(
        num_epochs=args.teacher_epochs, batch_size=args.batch_size, seed=args.seed, use_cpu=True
    )
    processor = digits_processor()
    pixels = KeptPixels(images, processor)
    train_vit(digits_config(), processor, pixels, folder, options, transform=jitter, resumable=False)
    return Teacher.from_pretrained(folder)


def _raptor(
    args: QuickstartArguments,
    teacher: Teacher,
    phases: Phases,
    folder: Path,
    train: PixelDataset,
    test: PixelDataset,
    name: str,
    seed: int,
) -> tuple[RaptorModel, dict[str, Any]]:
    """A distilled Raptor and its record: loaded if an earlier run finished it, else distilled."""
    if (folder / RECORD_FILE).is_file():
        return RaptorModel.from_pretrained(folder / MODEL_FOLDER).eval(), read_json(folder / RECORD_FILE)
    options = DistillationArguments(
        output_dir=str(folder), max_steps=args.distill_steps, per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate, seed=seed, report_to="none", per_device_eval_batch_size=128, use_cpu=True,
        bf16=False,  # the same numbers on every machine
    )  # fmt: skip
    model, record = distill(teacher, phases, options, train, test, name=name)
    write_json(folder / RECORD_FILE, record)
    return model.eval(), record


def check_reload(folder: Path, model: RaptorModel, pixels: PixelDataset) -> None:
    """Loads a saved Raptor in a fresh process and compares its outputs on a few images with the model's, bit for bit.

    Raises:
        RuntimeError: if they differ, or the process fails.
    """
    batch = collate_pixels([pixels[index] for index in range(min(8, len(pixels)))])["pixel_values"]
    with torch.no_grad():
        expected = model(batch.to(model.device)).last_hidden_state
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "expected.safetensors"
        save_file({"pixel_values": batch.contiguous(), "last_hidden_state": expected.cpu().contiguous()}, path)
        process = subprocess.run(
            [sys.executable, "-c", _RELOAD, str(folder), str(path)], capture_output=True, text=True, check=False
        )
    if process.returncode != 0:
        reason = "its outputs differ" if process.returncode == 3 else process.stderr.strip()[-500:]
        raise RuntimeError(f"{folder} was saved, but a fresh process could not reproduce it: {reason}")


def _probe_arguments(args: QuickstartArguments) -> ProbeArguments:
    return ProbeArguments(learning_rate=1e-2, num_epochs=args.probe_epochs, batch_size=128, augment="none")


def _probe_record(probe: LinearProbe, outcomes: dict[str, list[ProbeResult]]) -> dict[str, Any]:
    pooled = {}
    for name, runs in outcomes.items():
        values = [value for run in runs for value in run.values]
        pooled[name] = dataclasses.replace(runs[0], values=values, head=None)
    teacher = pooled["teacher"]
    return {
        "task": probe.task.name,
        "dataset": "digits",
        "protocol": probe.get_config_dict(),
        "results": {name: result.to_dict(teacher) for name, result in pooled.items()},
    }


def _seeds(records: Sequence[dict[str, Any]]) -> list[int]:
    return [seed for record in records for seed in record["seeds"]]


def clear(output_dir: str | Path) -> None:
    """Removes a run's folder."""
    shutil.rmtree(output_dir, ignore_errors=True)
