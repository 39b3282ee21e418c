"""Results as strict JSON, one summary table, and a report of one HTML file with its figures.

All is drawn from one plain mapping, the content of `results.json`, so that a report can be written again without the
models. Nothing is invented: what `results` lacks is left out; only means and ratios are computed here. All parts but
`format` are optional; accuracies are fractions, curves hold one value per layer `1..L`, None where there is none:

```text
format       1
title, command, seed, environment ([`environment`]), timings {name: seconds}
teacher      name, model_type, num_layers, hidden_size, num_parameters
dataset      name, num_train, num_test, num_skipped
phases       tokens, num_images, similarity [[float]], partitions {"3": {block_schedule, repeats, score, method}}
models       [{name, path (relative to the report), num_blocks, block_schedule, num_parameters, seeds,
               fidelity {r2 {group: [float]}, cosine {group: [float]}, num_images, definition},
               training {history [{step, ...}], any other setting}}]
probe        task, protocol {}, results {"teacher" or a model's name: {accuracy [float], mean, std, retained}}
```
"""

import base64
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import jinja2
import numpy as np
import torch

from . import plots
from .phases import Phases
from .tokens import TOKEN_GROUPS, schedule_segments

RESULTS_FORMAT = 1
ABSENT, _TEACHER = "–", "teacher"
_HEADER = "Model|Blocks|Schedule|Parameters|Of teacher|Top-1 (%)|Retained|Mean R²|Last-layer R²|Mean cosine".split("|")
_CURVES = {"r2": "R²", "cosine": "Cosine similarity"}
# An absolute path at the start of a word: only its last part says something to a reader elsewhere.
_FOLDERS = re.compile(r"""(?:(?<=^)|(?<=[\s'"=]))(?:~|[A-Za-z]:)?[\\/](?:[^\s'"\\/]+[\\/])+""", re.MULTILINE)
_NUMBER = re.compile(r"[-−]?\d[\d,.]*(e[-+]?\d+)?( %| ± [\d.]+)?")
Block = dict[str, Any]

_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1c1c1c; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .7rem; padding-bottom: .25rem; border-bottom: 1px solid #d5d5d5; }
a { color: #00588c; } nav a { display: inline-block; margin-right: .9rem; }
.scroll { overflow-x: auto; margin: 0 0 1.2rem; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e6e6e6; text-align: left; vertical-align: top; }
thead th { border-bottom: 1.5px solid #555; vertical-align: bottom; } td.nowrap, td.number { white-space: nowrap; }
tbody th { min-width: 6rem; } td { overflow-wrap: anywhere; } .number { text-align: right; }
figure { margin: 0 0 1.4rem; } img { display: block; max-width: 100%; height: auto; }
caption, figcaption, footer { text-align: left; color: #555; font-size: .92rem; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: .88rem; }
</style></head>
<body><main>
<h1>{{ title }}</h1>
<nav aria-label="Sections">
{%- for name in sections %} <a href="#{{ name|lower|replace(" ", "-") }}">{{ name }}</a>{% endfor %}</nav>
{%- for name, blocks in sections.items() %}
<section id="{{ name|lower|replace(" ", "-") }}">
<h2>{{ name }}</h2>
{%- for block in blocks %}
{%- if block.kind == "table" %}
<div class="scroll" tabindex="0"><table><caption>{{ block.caption }}</caption>
{%- if block.header %}
<thead><tr>{% for cell in block.header %}<th scope="col" class="{{ block.classes[loop.index0] }}">{{ cell }}</th>
{%- endfor %}</tr></thead>
{%- endif %}
<tbody>{% for row in block.rows %}
<tr><th scope="row">{{ row[0] }}</th>
{%- for cell in row[1:] %}<td class="{{ block.classes[loop.index] }}">{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}</tbody></table></div>
{%- elif block.kind == "figure" %}
<figure><img src="data:image/png;base64,{{ block.base64 }}" width="{{ block.width }}" alt="{{ block.caption }}">
<figcaption>{{ block.caption }}</figcaption></figure>
{%- else %}
<p>{{ block.caption }}</p>
<pre><code>{{ block.text }}</code></pre>
{%- endif %}{% endfor %}
</section>{% endfor %}
<footer><p>Written by raptor_hf from results.json. Layers count from 1, blocks from 0. Definitions:
<a href="https://arxiv.org/abs/2512.19941">Block-Recurrent Dynamics in Vision Transformers</a>.</p></footer>
</main></body></html>
"""


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


def write_json(path: str | os.PathLike[str], data: Any) -> Path:
    """Write `data` as strict JSON after [`to_plain`]; a reader sees the old file or the new one, never half of it.

    Raises:
        TypeError, ValueError: as [`to_plain`]; the old file stays as it was.
    """
    text = json.dumps(to_plain(data), allow_nan=False, ensure_ascii=False, indent=2)
    return _write_file(Path(path), f"{text}\n".encode())


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a strict JSON file.

    Raises:
        ValueError: if the file is missing or is no strict JSON (bare NaN and Infinity are none).
    """
    if not Path(path).is_file():
        raise ValueError(f"{path} is no file; pass the results.json of a finished run.")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        json.dumps(data, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path} is no strict JSON ({error}); write it again with write_json.") from error
    return data


def environment() -> dict[str, Any]:
    """Versions and hardware that a result depends on; no host or user name and no path. None where unknown."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    accelerator = device and (torch.cuda.get_device_name() if device.type == "cuda" else device.type)
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "transformers", "accelerate", "raptor_hf")},
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
    whole = teacher.get("num_parameters")
    rows = []
    if teacher or _TEACHER in probed:
        name = f"{teacher['name']} ({_TEACHER})" if teacher.get("name") else _TEACHER
        entry = {"num_blocks": teacher.get("num_layers"), "num_parameters": whole}
        rows.append([name, *_summary_cells(entry, None, probed.pop(_TEACHER, {}))])
    for model in results.get("models") or []:
        rows.append([model["name"], *_summary_cells(model, whole, probed.pop(model["name"], {}))])
    rows += [[name, *_summary_cells({}, None, entry)] for name, entry in probed.items()]
    kept = [index for index in range(len(_HEADER)) if index == 0 or any(row[index] != ABSENT for row in rows)]
    return [_HEADER[index] for index in kept], [[row[index] for index in kept] for row in rows]


def write_report(output_dir: str | os.PathLike[str], results: Mapping[str, Any]) -> Path:
    """Write `report.html`, which opens offline and holds its figures, and the figures again as `figures/*.png`.

    Folders of absolute paths in the results are not shown: of `/home/me/data/flowers` the report has `flowers`.
    Returns the path of the HTML file. The folder is created if absent.

    Raises:
        ImportError: if there is something to draw and matplotlib is missing.
        ValueError: if `format` is not 1, two models share a name, or a part cannot be drawn (see `plots`).
    """
    folder = Path(output_dir)
    plain = _without_folders(to_plain(results), str(folder.absolute()))
    if plain.get("format") != RESULTS_FORMAT:
        raise ValueError(f"results have format {plain.get('format')!r}, not {RESULTS_FORMAT}; run the command again.")
    names = [model["name"] for model in plain.get("models") or []]
    if len(set(names)) < len(names):
        raise ValueError(f"models {names} do not all have their own name; rename one of a pair.")
    built = {title: build(plain) for title, build in _SECTIONS.items()}
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE)
    html = template.render(title=plain.get("title") or "Raptor report", sections={k: v for k, v in built.items() if v})
    for block in (block for blocks in built.values() for block in blocks if block["kind"] == "figure"):
        _write_file(folder / "figures" / f"{block['name']}.png", block["png"])
    return _write_file(folder / "report.html", html.encode())


def _results_section(results: dict[str, Any]) -> list[Block]:
    header, rows = summary_rows(results)
    blocks = []
    if rows:
        caption = "Teacher and models" + ("; ± is sigma over the runs" if "±" in str(rows) else "")
        blocks.append(_table(caption, rows, header))
    schedules = {model["name"]: model["block_schedule"] for model in _models(results, "block_schedule")}
    if schedules:
        blocks.append(_figure("schedule", plots.schedule_figure(schedules), "Block that makes each layer"))
    return blocks


def _phases_section(results: dict[str, Any]) -> list[Block]:
    phases = results.get("phases") or {}
    entries = phases.get("partitions") or {}
    partitions = {k: Phases.from_schedule(entry["block_schedule"]) for k, entry in entries.items()}
    blocks = []
    if phases.get("similarity"):
        squares = {f"k={k}": part.repeats for k, part in partitions.items() if part.is_contiguous}
        images = f", mean over {phases['num_images']:,} images" if phases.get("num_images") else ""
        caption = f"Similarity of the teacher's layers, tokens: {phases.get('tokens', 'all')}{images}"
        blocks.append(_figure("similarity", plots.similarity_figure(phases["similarity"], squares), caption))
    if partitions:
        rows = [[k, str(partitions[k]), _text(e.get("score")), _text(e.get("method"))] for k, e in entries.items()]
        blocks.append(_table("Phases that were found", rows, ["Blocks", "Layers", "Score", "Method"]))
    return blocks


def _fidelity_section(results: dict[str, Any]) -> list[Block]:
    models = _models(results, "fidelity")
    schedules = {tuple(model.get("block_schedule") or ()) for model in models}
    shared = schedules.pop() if len(schedules) == 1 else ()
    boundaries = [segment.end_layer for segment in schedule_segments(shared)[:-1]]
    images = {model["fidelity"].get("num_images") for model in models} - {None}
    on = f", measured on {' and '.join(f'{count:,}' for count in sorted(images))} images" if images else ""
    blocks = []
    for key, label in _CURVES.items():
        groups = {group: _curves(models, key, group) for group in ("all", *TOKEN_GROUPS)}
        groups = {group: curves for group, curves in groups.items() if curves}
        definitions = sorted({str(model["fidelity"].get("definition")) for model in models} - {"None"})
        name = label + (f" ({', '.join(definitions)})" if key == "r2" and definitions else "")
        if "all" in groups:
            figure = plots.layer_curves_figure(groups["all"], label, boundaries=boundaries)
            blocks.append(_figure(key, figure, f"{name} with the teacher by layer, all tokens{on}"))
        if groups.keys() - {"all"}:
            figure = plots.token_group_figure(groups, label, boundaries=boundaries)
            blocks.append(_figure(f"{key}_groups", figure, f"{name} with the teacher by layer and token group{on}"))
    return blocks


def _accuracy_section(results: dict[str, Any]) -> list[Block]:
    probe = results.get("probe") or {}
    entries = {name: entry for name, entry in (probe.get("results") or {}).items() if entry.get("mean") is not None}
    blocks = []
    if entries:
        bars = {name: (entry["mean"], entry.get("std")) for name, entry in entries.items()}
        retained = {name: entry.get("retained") for name, entry in entries.items()}
        figure = plots.accuracy_figure(bars, reference_name=_TEACHER if _TEACHER in bars else None, retained=retained)
        task = f": {probe['task']}" if probe.get("task") else ""
        blocks.append(_figure("accuracy", figure, f"Probe on the frozen features{task}"))
    runs = {name: entry["accuracy"] for name, entry in entries.items() if entry.get("accuracy")}
    if runs:
        columns = range(max(map(len, runs.values())))
        rows = [[name, *(_number(dict(enumerate(run)).get(i), 100) for i in columns)] for name, run in runs.items()]
        blocks.append(_table("Top-1 of each run (%)", rows, ["Model", *(f"Run {i + 1}" for i in columns)]))
    return blocks + _settings("Protocol of the probe", probe.get("protocol"))


def _training_section(results: dict[str, Any]) -> list[Block]:
    models = _models(results, "training")
    blocks = []
    for index, model in enumerate(models, start=1):
        history = [entry for entry in model["training"].get("history") or [] if "step" in entry]
        if plots.history_keys(history):
            figure = plots.history_figure(history)
            blocks.append(_figure(f"training_{index}", figure, f"Training of {model['name']}"))
    settings = [{**model["training"], "seeds": model.get("seeds")} for model in models]
    names = dict.fromkeys(name for entry in settings for name, value in entry.items() if value is not None)
    rows = [[name, *(_text(entry.get(name)) for entry in settings)] for name in names if name != "history"]
    if rows:
        blocks.append(_table("Settings", rows, ["Setting", *(model["name"] for model in models)]))
    return blocks


def _environment_section(results: dict[str, Any]) -> list[Block]:
    command = {"kind": "code", "caption": "Command:", "text": results.get("command")}
    blocks = [command] if command["text"] else []
    seed = {"seed": results["seed"]} if results.get("seed") is not None else {}
    blocks += _settings("Software and hardware", {**seed, **(results.get("environment") or {})})
    return blocks + _settings("Duration (seconds)", results.get("timings"))


def _usage_section(results: dict[str, Any]) -> list[Block]:
    lines = [
        f"model = RaptorModel.from_pretrained({json.dumps(model['path'])})  # {model['name']}"
        for model in _models(results, "path")
    ]
    text = ["from raptor_hf import RaptorModel", "", *lines, "output = model(pixel_values, output_hidden_states=True)"]
    return [{"kind": "code", "caption": "From the folder of this report:", "text": "\n".join(text)}] if lines else []


_SECTIONS = {
    "Results": _results_section,
    "Phases": _phases_section,
    "Fidelity": _fidelity_section,
    "Accuracy": _accuracy_section,
    "Training": _training_section,
    "Environment": _environment_section,
    "Load the model": _usage_section,
    "Data": lambda results: _settings("Images that were used", results.get("dataset")),
}


def _summary_cells(model: Mapping[str, Any], whole: int | None, probe: Mapping[str, Any]) -> list[str]:
    """Cells of one row of [`summary_rows`] behind the name; `whole` is the teacher's number of parameters."""
    schedule, parameters = model.get("block_schedule"), model.get("num_parameters")
    curves = [((model.get("fidelity") or {}).get(key) or {}).get("all") or [None] for key in _CURVES]
    mean_r2, mean_cosine = (None if None in curve else math.fsum(curve) / len(curve) for curve in curves)
    sigma = "" if probe.get("std") is None else f" ± {_number(probe['std'], 100)}"
    return [
        _text(model.get("num_blocks")),
        str(Phases.from_schedule(schedule)) if schedule else ABSENT,
        _number(parameters, form=",d"),
        _number(parameters / whole if parameters is not None and whole else None, 100, ".1f", " %"),
        _number(probe.get("mean"), 100, unit=sigma),
        _number(probe.get("retained"), 100, ".1f", " %"),
        _number(mean_r2, form=".3f"),
        _number(curves[0][-1], form=".3f"),
        _number(mean_cosine, form=".3f"),
    ]


def _models(results: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    return [model for model in results.get("models") or [] if model.get(part)]


def _curves(models: Iterable[Mapping[str, Any]], key: str, group: str) -> dict[str, list[float | None]]:
    """Curves of one token group that have a value, by model."""
    found = {model["name"]: (model["fidelity"].get(key) or {}).get(group) or [] for model in models}
    return {name: curve for name, curve in found.items() if any(value is not None for value in curve)}


def _table(caption: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> Block:
    """Columns of numbers are set flush right; those of a table with a header are not wrapped."""
    columns = list(zip(*rows, strict=True))[1:]
    numeric = [all(cell == ABSENT or _NUMBER.fullmatch(cell) for cell in column) for column in columns]
    classes = ["name", *("number" if flag else "nowrap" if header else "text" for flag in numeric)]
    return {"kind": "table", "caption": caption, "header": header, "rows": rows, "classes": classes}


def _settings(caption: str, values: Mapping[str, Any] | None) -> list[Block]:
    """Table of names and values, or nothing."""
    rows = [[name, _text(value)] for name, value in (values or {}).items()]
    return [_table(caption, rows)] if rows else []


def _figure(name: str, figure: "plots.Figure", caption: str) -> Block:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=plots.DPI)
    png, width = buffer.getvalue(), round(100 * figure.get_figwidth())
    block = {"kind": "figure", "name": name, "caption": caption, "width": width}
    return {**block, "png": png, "base64": base64.b64encode(png).decode()}


def _text(value: Any) -> str:
    """A setting or measurement as a cell."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        value = [f"{key}: {_text(item)}" for key, item in value.items()]
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(value: float | None, scale: int = 1, form: str = ".2f", unit: str = "") -> str:
    return ABSENT if value is None else f"{scale * value:{form}}{unit}"


def _without_folders(data: Any, folder: str) -> Any:
    """Absolute paths in all texts, keys too, made relative to `folder` or cut down to their last part."""
    if isinstance(data, dict):
        return {_without_folders(key, folder): _without_folders(value, folder) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_folders(value, folder) for value in data]
    return _FOLDERS.sub("", data.replace(folder + os.sep, "")) if isinstance(data, str) else data


def _write_file(path: Path, content: bytes) -> Path:
    """Write next to the target and rename, so that a crash leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _version(package: str) -> str | None:
    """Version of the package that is imported, else of the one that is installed."""
    try:
        return getattr(sys.modules.get(package), "__version__", None) or importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    """Model of the processor; Linux has it in a file, elsewhere the platform's own answer."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or None
