"""What a run measured, as one plain mapping: the content of `results.json`, strict JSON, and its summary table.

Reports and model cards are drawn from it alone, so that they can be written again without the models. Nothing is
invented: what `results` lacks is left out; only means and ratios are computed. All parts but `format` are optional;
accuracies are fractions, curves hold one value per layer `1..L`, None where there is none:

```text
format       1
title, command, seed, environment ([`environment`]), timings {name: seconds}
teacher      name, model_type, num_layers, hidden_size, num_parameters
dataset      name, num_train, num_test, num_skipped
phases       tokens, num_images, similarity [[float]], groups {"cls": [[float]]}, partitions {"3": {block_schedule,
             repeats, score, method}}
phases_of    the same by model, where several were compared
models       [{name, path (relative to the report), num_blocks, block_schedule, num_parameters, seeds,
               fidelity {r2 {group: [float]}, cosine {group: [float]}, num_images, definition},
               training {history [{step, ...}], any other setting}}]
probe        task, metric (absent: accuracy), dataset, protocol {},
             results {"teacher" or a model's name: {METRIC [float], mean, std, retained, details [{every metric}]}}
```
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from transformers.trainer_utils import has_length

from .data import PixelDataset
from .phases import Phases
from .vision_models import VisionModel, public_name

RESULTS_FORMAT = 1
RESULTS_FILE = "results.json"
ABSENT, TEACHER = "–", "teacher"
HEADER = "Model|Blocks|Schedule|Parameters|Of teacher|Top-1 (%)|Retained|Mean R²|Last-layer R²|Mean cosine".split("|")
_PROBE_COLUMN = HEADER.index("Top-1 (%)")
# What a probe's values are called, and times what they are shown.
PROBE_METRICS = {"accuracy": ("Top-1 (%)", 100), "mean_iou": ("mIoU (%)", 100), "rmse": ("RMSE (m)", 1)}
# Beside preset, student, steps, batch size and learning rate; what a card says of a training.
RECORDED_ARGUMENTS = (
    "weight_decay",
    "warmup_steps",
    "lr_scheduler_type",
    "max_grad_norm",
    "block_optimizer",
    "blocks_share",
    "objective",
    "error",
    "layer_reduction",
    "loss_scale",
    "direction_weight",
    "teacher_forcing_start",
    "teacher_forcing_share",
    "last_block_weights",
    "end_to_end_weights",
    "bf16",
)
CURVES = {"r2": "R²", "cosine": "Cosine similarity"}
# An absolute path at the start of a word: only its last part says something to a reader elsewhere.
_FOLDERS = re.compile(
    r"""(?:(?<=^)|(?<=[\s'"=,;(\[{<>|]))(?:file://)?(?:~|[A-Za-z]:)?[\\/](?:[^\s'"\\/]+[\\/])+""", re.MULTILINE
)
_QUOTED_FOLDERS = re.compile(r"""(['"])(?:~|[A-Za-z]:)?[\\/](?:[^'"\n\\/]+[\\/])+([^'"\n\\/]*)\1""")  # with spaces
_SECRETS = re.compile(r"(--?\w*[-_]?token(?:=|\s+))(\S+)", re.IGNORECASE)


def new_results(title: str, command: str, seed: int) -> dict[str, Any]:
    """The head of a `results.json`: format, title, command, seed and environment. Tokens in the command are masked."""
    command = _SECRETS.sub(r"\1***", command)
    return {"format": RESULTS_FORMAT, "title": title, "command": command, "seed": seed, "environment": environment()}


def teacher_record(teacher: VisionModel) -> dict[str, Any]:
    """What reports say of a teacher or of a ViT that is measured; a folder is named by its last part."""
    config = teacher.model.config
    return {
        "name": public_name(teacher.name_or_path),
        "model_type": config.model_type,
        "num_layers": teacher.num_layers,
        "hidden_size": teacher.hidden_size,
        "num_parameters": teacher.model.num_parameters(),
    }


def dataset_record(train: Any, evaluation: Any) -> dict[str, Any]:
    """What reports say of the images of two [`~raptor_hf.data.PixelDataset`]s or streams, the second may be `None`:
    name, numbers (of a stream `None`), and how many damaged ones were left out.
    """
    sets = [pixels.images for pixels in (train, evaluation) if pixels is not None]
    return {
        "name": public_name(train.images.name),
        "num_train": _length(train),
        "num_test": 0 if evaluation is None else _length(evaluation),
        "num_skipped": sum(images.num_skipped for images in sets),
    }


def _length(pixels: Any) -> int | None:
    return len(pixels) if has_length(pixels) else None


def model_record(
    model: Any,
    args: Any,
    *,
    name: str,
    path: str,
    steps: int,
    history: list[dict[str, Any]],
    student: Mapping[str, Any] | None = None,
    fidelity: Any = None,
    seconds: float | None = None,
    blocks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What results say of a distilled Raptor.

    Args:
        model: the [`RaptorModel`].
        args: the [`DistillationArguments`] it was trained with.
        name, path: its name, and its folder relative to the results.
        steps, history: optimiser steps of all stages, and the trainer's log.
        student: how it was made from the teacher.
        fidelity: [`Fidelity`] on held-out images, if it was measured.
        seconds: of wall clock.
        blocks: numbers of the blocks that were trained, if not all.
    """
    arguments = {field: getattr(args, field) for field in RECORDED_ARGUMENTS}
    record = {
        "name": name,
        "path": path,
        "num_blocks": model.config.num_blocks,
        "block_schedule": list(model.config.block_schedule or ()),
        "num_parameters": model.num_parameters(),
        "seeds": [args.seed],
        "training": {
            "preset": args.preset,
            "student": dict(student or {}),
            "steps": steps,
            "batch_size": args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps,
            "learning_rate": args.learning_rate,
            "seconds": seconds,
            **arguments,
            "history": history,
        },
    }
    if blocks is not None:
        record["trained_blocks"] = list(blocks)
    if fidelity is not None:
        record["fidelity"] = fidelity.to_dict()
    return record


def trainer_results(trainer: Any, name: str) -> dict[str, Any]:
    """What a [`RaptorDistillationTrainer`] can say of its run, as `results.json` does; `name` is the student's."""
    model = model_record(
        trainer.raptor, trainer.args, name=name, path=".", steps=trainer.state.global_step, history=[],
        fidelity=trainer.fidelity,
    )  # fmt: skip
    teacher = teacher_record(trainer.teacher)
    results = {**new_results(name, "", trainer.args.seed), "teacher": teacher, "models": [model]}
    if isinstance(trainer.train_dataset, PixelDataset):
        evaluation = trainer.eval_dataset if isinstance(trainer.eval_dataset, PixelDataset) else None
        results["dataset"] = dataset_record(trainer.train_dataset, evaluation)
    return without_folders(to_plain(results))


def to_plain(data: Any) -> Any:
    """Values that strict JSON can hold: `dict` with text keys, `list`, `str`, `int`, `float`, `bool`, `None`.

    NaN and infinities become None; numpy and torch numbers and arrays of any type numbers and lists; tuples and ranges
    lists; dataclasses mappings (by their own `to_dict` if they have one); enums their value; paths, dtypes and devices
    text.

    Raises:
        TypeError: if a value has no such form.
        ValueError: if two keys of one mapping are the same as text, such as 1 and "1".
    """
    data = _unwrapped(data)
    if isinstance(data, Mapping):
        keys = [str(to_plain(key)) for key in data]
        if len(set(keys)) < len(keys):
            raise ValueError(f"keys {list(data)} are not unique as text, which JSON keys are; rename one of a pair.")
        return {key: to_plain(value) for key, value in zip(keys, data.values(), strict=True)}
    if isinstance(data, list | tuple | range):
        return [to_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if data is None or isinstance(data, bool | int | str):
        return data
    raise TypeError(f"{type(data).__name__} {data!r} has no JSON form; make it a number, text, list or mapping.")


def write_json(path: str | os.PathLike[str], data: Any) -> Path:
    """Write `data` as strict JSON after [`to_plain`]; a reader sees the old file or the new one, never half of it.

    Raises:
        TypeError, ValueError: as [`to_plain`]; the old file stays as it was.
    """
    return write_file(Path(path), json_text(data).encode())


def json_text(data: Any) -> str:
    """`data` as the text of a strict JSON file. Raises `TypeError` and `ValueError` as [`to_plain`]."""
    return json.dumps(to_plain(data), allow_nan=False, ensure_ascii=False, indent=2) + "\n"


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a strict JSON file: results, phases, or a configuration that a model was saved with.

    Raises:
        ValueError: if the file is missing or is no strict JSON (bare NaN and Infinity are none).
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file; pass one that a finished run or save_pretrained left.")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(data, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path} is no strict JSON ({error}); write or save it again.") from error
    return data


def environment() -> dict[str, Any]:
    """Versions and hardware that a result depends on; no host or user name and no path. None where unknown."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    accelerator = device and (torch.cuda.get_device_name() if device.type == "cuda" else device.type)
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "transformers", "accelerate", "raptor_hf")},
        "raptor_hf_commit": _commit(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "accelerator": accelerator,
    }


def summary_rows(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of a run, for the report and the terminal: teacher, models, then what else was probed.

    Parameters are compared with the teacher's. R2 and cosine are those of all tokens: mean over the layers `1..L`, and
    the last layer; a mean over a layer that has no value is absent. Columns that nobody has a value for are left out.

    Returns the names of the columns, and per row one text per column.
    """
    results = to_plain(results)
    teacher = results.get("teacher") or {}
    probed = dict((results.get("probe") or {}).get("results") or {})
    whole, scale = teacher.get("num_parameters"), probe_metric(results.get("probe") or {})[1]
    rows = []
    if teacher or TEACHER in probed:
        name = f"{teacher['name']} ({TEACHER})" if teacher.get("name") else TEACHER
        entry = {"num_blocks": teacher.get("num_layers"), "num_parameters": whole}
        rows.append([name, *_summary_cells(entry, None, probed.pop(TEACHER, {}), scale)])
    for model in results.get("models") or []:
        rows.append([model["name"], *_summary_cells(model, whole, probed.pop(model["name"], {}), scale)])
    rows += [[name, *_summary_cells({}, None, entry, scale)] for name, entry in probed.items()]
    header = list(HEADER)
    header[_PROBE_COLUMN] = probe_metric(results.get("probe") or {})[0]
    kept = [index for index in range(len(HEADER)) if index == 0 or any(row[index] != ABSENT for row in rows)]
    return [header[index] for index in kept], [[row[index] for index in kept] for row in rows]


def probe_metric(probe: Mapping[str, Any]) -> tuple[str, int]:
    """Heading of a probe's values, and what they are multiplied by."""
    return PROBE_METRICS[probe.get("metric") or "accuracy"]


def without_folders(data: Any, folder: str | None = None) -> Any:
    """Absolute paths in all texts, keys too, made relative to `folder` or cut down to their last part."""
    if isinstance(data, dict):
        return {without_folders(key, folder): without_folders(value, folder) for key, value in data.items()}
    if isinstance(data, list):
        return [without_folders(value, folder) for value in data]
    if not isinstance(data, str):
        return data
    data = data if folder is None else data.replace(folder + os.sep, "")
    return _FOLDERS.sub("", _QUOTED_FOLDERS.sub(r"\1\2\1", data))


def write_file(path: Path, content: bytes) -> Path:
    """Write next to the target and rename, so that a crash leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _summary_cells(
    model: Mapping[str, Any], whole: int | None, probe: Mapping[str, Any], scale: int = 100
) -> list[str]:
    """Cells of one row of [`summary_rows`] behind the name; `whole` is the teacher's number of parameters, `scale` what
    a probe's values are multiplied by.
    """
    form = ".2f" if scale == 100 else ".3f"
    schedule, parameters = model.get("block_schedule"), model.get("num_parameters")
    curves = [((model.get("fidelity") or {}).get(key) or {}).get("all") or [None] for key in CURVES]
    mean_r2, mean_cosine = (None if None in curve else math.fsum(curve) / len(curve) for curve in curves)
    sigma = "" if probe.get("std") is None else f" ± {as_number(probe['std'], scale, form)}"
    return [
        as_text(model.get("num_blocks")),
        str(Phases.from_schedule(schedule)) if schedule else ABSENT,
        as_number(parameters, form=",d"),
        as_number(parameters / whole if parameters is not None and whole else None, 100, ".1f", " %"),
        as_number(probe.get("mean"), scale, form, sigma),
        as_number(probe.get("retained"), 100, ".1f", " %"),
        as_number(mean_r2, form=".3f"),
        as_number(curves[0][-1], form=".3f"),
        as_number(mean_cosine, form=".3f"),
    ]


def as_text(value: Any) -> str:
    """A setting or measurement as a cell."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        value = [f"{key}: {as_text(item)}" for key, item in value.items()]
    if isinstance(value, list):
        return ", ".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_number(value: float | None, scale: int = 1, form: str = ".2f", unit: str = "") -> str:
    """A number times `scale` in the format `form` with its unit, as a cell."""
    return ABSENT if value is None else f"{scale * value:{form}}{unit}"


def _unwrapped(data: Any) -> Any:
    """What a wrapped value holds: Python numbers of an array, fields of a dataclass, text of a path."""
    if isinstance(data, torch.Tensor | np.ndarray | np.generic):
        return data.detach().cpu().tolist() if isinstance(data, torch.Tensor) else data.tolist()
    if isinstance(data, Enum):
        return data.value
    if hasattr(data, "to_dict") and not isinstance(data, type):
        return data.to_dict()
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    return str(data) if isinstance(data, PurePath | torch.dtype | torch.device) else data


def _version(package: str) -> str | None:
    """Version of the package that is imported, else of the one that is installed."""
    try:
        return getattr(sys.modules.get(package), "__version__", None) or importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout the package is imported from, marked where it was changed; None for a release."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str | None:
    """Model of the processor; Linux has it in a file, elsewhere the platform's own answer."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or None
