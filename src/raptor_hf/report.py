"""The report of a run: one HTML file that opens offline, and its figures, drawn from `results.json` (see `results`)."""

import base64
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from . import flow_plots, plots, study_plots
from .drawing import DPI
from .phases import Phases
from .results import (
    ABSENT,
    CURVES,
    RESULTS_FORMAT,
    TEACHER,
    as_number,
    as_text,
    probe_metric,
    summary_rows,
    to_plain,
    without_folders,
    write_file,
)
from .tokens import TOKEN_GROUPS, schedule_segments

_NUMBER = re.compile(r"[-−]?\d[\d,.]*(e[-+]?\d+)?( %| ± [\d.]+)?")
Block = dict[str, Any]
PROBE_AXES = {"accuracy": "top-1 accuracy (%)", "mean_iou": "mean IoU (%)"}

# Curves of `results["dynamics"]`: axis, caption, whether of states (else of layers), logarithmic scale.
FLOW_CURVES = {
    "convergence": ("cosine with the last state", "Directional convergence; band: 5 to 95 % of images", True, False),
    "norm": ("norm of the states", "Norm of the states; band: 5 to 95 % of images", True, True),
    "angular_speed": ("angular speed (rad / layer)", "Angular speed; band: 5 to 95 % of images", False, False),
    "effective_rank": ("effective rank", "Effective rank of the angular updates of all images", False, True),
    "stable_rank": ("stable rank", "Stable rank of the angular updates of all images", False, True),
    "coherence": ("coherence", "Mean cosine of an angular update with the mean update", False, False),
    "sensitivity": (
        "(1 − cos) / ε at the last state", "Sensitivity of a group's last state to a perturbation of it", True, True
    ),
}  # fmt: skip
FLOW_PATHS = {
    "classes": "class means of the normalised states; open marker: state 0, filled: last state, small: end of a phase",
    "perturbed": "mean direction of perturbed and untouched runs; open marker: where a path starts",
}
SWAP_VALUES = {"accuracy": ("top-1 accuracy (%)", 100), "cosine": ("cosine with the untouched last state", 1)}
SWAPS_HEADER = "Model|Phases|Replaced|Swaps|Cosine|Sigma|Top-1 (%)|Sigma (%)|Retained".split("|")
FLOW_HEADER = "Model|Tokens|Speed (rad)|Fastest|Effective rank|Coherence peak|Median modulus|Spectral radius".split("|")

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


def write_report(output_dir: str | os.PathLike[str], results: Mapping[str, Any]) -> Path:
    """Write `report.html`, which opens offline and holds its figures, and the figures again as `figures/*.png`.

    Folders of absolute paths in the results are not shown: of `/home/me/data/flowers` the report has `flowers`.
    Returns the path of the HTML file. The folder is created if absent.

    Raises:
        ImportError: if there is something to draw and matplotlib is missing.
        ValueError: if `format` is not 1, two models share a name, or a part cannot be drawn (see `plots`).
    """
    folder = Path(output_dir)
    plain = without_folders(to_plain(results), str(folder.absolute()))
    if plain.get("format") != RESULTS_FORMAT:
        raise ValueError(f"results have format {plain.get('format')!r}, not {RESULTS_FORMAT}; run the command again.")
    names = [model["name"] for model in plain.get("models") or []]
    if len(set(names)) < len(names):
        raise ValueError(f"models {names} do not all have their own name; rename one of a pair.")
    built = {title: build(plain) for title, build in _SECTIONS.items()}
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE)
    html = template.render(title=plain.get("title") or "Raptor report", sections={k: v for k, v in built.items() if v})
    for block in (block for blocks in built.values() for block in blocks if block["kind"] == "figure"):
        write_file(folder / "figures" / f"{block['name']}.png", block["png"])
    return write_file(folder / "report.html", html.encode())


def flow_curves(record: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """One measure of `results["dynamics"]["models"][name]` by token group, with a band if it is of images."""
    if key == "sensitivity":
        found = record.get("sensitivity") or {}
        return {group: {"mean": curve} for group, curve in (found.get("per_eps") or {}).items()}
    curves = {}
    for group, entry in record["groups"].items():
        if key in entry:
            value = entry[key]
            quantiles = value["quantiles"] if isinstance(value, Mapping) else {}
            band = {"low": quantiles["0.05"], "high": quantiles["0.95"]} if quantiles else {}
            curves[group] = {"mean": value["mean"] if isinstance(value, Mapping) else value, **band}
    return curves


def flow_rows(models: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """What the curves of `results["dynamics"]["models"]` come down to: rows of text under `FLOW_HEADER`, one per model
    and token group. Speed is the mean over layers, ranks are of the first and the last layer.
    """
    rows = []
    for name, group, entry in ((name, *item) for name, record in models.items() for item in record["groups"].items()):
        speed, ranks = entry["angular_speed"]["mean"], entry.get("effective_rank") or [None]
        coherence, modes = entry["coherence"], entry["dmd"]
        row = [
            name,
            group,
            as_number(sum(speed) / len(speed), form=".3f"),
            str(1 + speed.index(max(speed))),
            "–".join(dict.fromkeys(as_number(rank, form=".1f") for rank in (ranks[0], ranks[-1]))),
            str(1 + coherence.index(max(coherence))),
            as_number(modes["median_modulus"], form=".3f"),
            as_number(modes["spectral_radius"], form=".3f"),
        ]
        rows.append(row)
    return rows


def swap_rows(records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """`results["studies"]["swaps"]` as rows of text under `SWAPS_HEADER`, one per model, scope and number."""
    rows = []
    for name, record in records.items():
        for entry in record["summary"]:
            cosine, accuracy = entry["cosine"]["all"], entry["accuracy"] or {}
            possible = record["num_possible"][entry["scope"]][str(entry["num_swapped"])]
            share = accuracy["mean"] / record["base_accuracy"] if accuracy and record["base_accuracy"] else None
            row = [name, entry["scope"], str(entry["num_swapped"]), f"{entry['num_swaps']} of {possible}"]
            row += [as_number(cosine["mean"], form=".4f"), as_number(cosine["std"], form=".4f")]
            row += [as_number(accuracy.get("mean"), 100), as_number(accuracy.get("std"), 100)]
            rows.append([*row, as_number(share, form=".3f")])
    return rows


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
        rows = [[k, str(partitions[k]), as_text(e.get("score")), as_text(e.get("method"))] for k, e in entries.items()]
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
    for key, label in CURVES.items():
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
    blocks, (heading, scale) = [], probe_metric(probe)
    metric = probe.get("metric") or "accuracy"
    if entries and scale == 100:
        bars = {name: (entry["mean"], entry.get("std")) for name, entry in entries.items()}
        retained = {name: entry.get("retained") for name, entry in entries.items()}
        figure = plots.accuracy_figure(
            bars, PROBE_AXES[metric], reference_name=TEACHER if TEACHER in bars else None, retained=retained
        )
        task = f": {probe['task']}" if probe.get("task") else ""
        blocks.append(_figure("accuracy", figure, f"Probe on the frozen features{task}"))
    runs = {name: entry[metric] for name, entry in entries.items() if entry.get(metric)}
    if runs:
        columns = range(max(map(len, runs.values())))
        form = ".2f" if scale == 100 else ".3f"
        rows = [
            [name, *(as_number(dict(enumerate(run)).get(i), scale, form) for i in columns)]
            for name, run in runs.items()
        ]
        title, _, unit = heading.partition(" (")
        blocks.append(_table(f"{title} of each run ({unit}", rows, ["Model", *(f"Run {i + 1}" for i in columns)]))
    blocks += _details(entries)
    return blocks + _settings("Protocol of the probe", probe.get("protocol"))


def _dynamics_section(results: dict[str, Any]) -> list[Block]:
    """Fig. 8 to 12 of the paper, models side by side, and what they come down to as a table."""
    part = results.get("dynamics") or {}
    models: dict[str, Any] = part.get("models") or {}
    boundaries = {name: flow_plots.phase_boundaries(record["phases"]) for name, record in models.items()}
    blocks = []
    for key, (label, caption, is_state, log) in FLOW_CURVES.items():
        curves = {name: flow_curves(record, key) for name, record in models.items()}
        values = [value for groups in curves.values() for curve in groups.values() for value in curve["mean"]]
        if any(value is not None and (value > 0 or not log) for value in values):
            figure = flow_plots.flow_figure(curves, label, boundaries, of_states=is_state, log=log)
            blocks.append(_figure(f"dynamics_{key}", figure, caption))
    eigenvalues = {
        name: {group: entry["dmd"]["eigenvalues"] for group, entry in record["groups"].items()}
        for name, record in models.items()
    }
    if eigenvalues:
        caption = "Eigenvalues of dynamic mode decomposition, mean token of each group, with the unit circle"
        blocks.append(_figure("dynamics_eigenvalues", flow_plots.eigenvalue_figure(eigenvalues), caption))
        blocks.append(_table("The flow in numbers", flow_rows(models), FLOW_HEADER))
    for name, record in models.items():
        for kind, caption in FLOW_PATHS.items():
            if groups := record["paths"].get(kind):
                paths = {group: entry["paths"] for group, entry in groups.items()}
                shares = {group: entry["explained"] for group, entry in groups.items()}
                figure = flow_plots.path_figure(paths, shares, boundaries[name])
                stem = re.sub(r"[^\w.-]+", "_", name)
                blocks.append(_figure(f"dynamics_{kind}_{stem}", figure, f"{name}: {caption}"))
    if part.get("angles"):
        figure = flow_plots.flow_figure(part["angles"], "angle to the first model (rad)", boundaries, of_states=True)
        blocks.append(_figure("dynamics_angles", figure, "Angle between a model's states and those of the first one"))
    return blocks


def _studies_section(results: dict[str, Any]) -> list[Block]:
    """Fig. 15 of the paper for each model."""
    records: dict[str, Any] = (results.get("studies") or {}).get("swaps") or {}
    blocks = []
    for name, record in records.items():
        stem = re.sub(r"[^\w.-]+", "_", name)
        for key, (label, scale) in SWAP_VALUES.items():
            values: dict[str, dict[int, list[float]]] = {}
            for effect in record["effects"]:
                value = effect["cosine"]["all"] if key == "cosine" else effect[key]
                if value is not None:
                    values.setdefault(effect["scope"], {}).setdefault(len(effect["swap"]), []).append(scale * value)
            if values:
                base = record["base_accuracy"] if key == "accuracy" else 1.0
                figure = study_plots.swaps_figure(values, label, ("untouched model", scale * base))
                caption = f"{name}: every point is one swap; bars are their means"
                blocks.append(_figure(f"swaps_{key}_{stem}", figure, caption))
    if records:
        blocks.append(_table("Layers replaced; means and sigma over swaps", swap_rows(records), SWAPS_HEADER))
    return blocks


def _details(entries: dict[str, Any]) -> list[Block]:
    """Every metric that is one number, of each model's first head."""
    firsts = {name: entry["details"][0] for name, entry in entries.items() if entry.get("details")}
    names = [key for key, value in next(iter(firsts.values()), {}).items() if isinstance(value, (int, float))]
    rows = [[key, *(as_text(first.get(key)) for first in firsts.values())] for key in names]
    return [_table("All metrics of the first head", rows, ["Metric", *firsts])] if rows else []


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
    rows = [[name, *(as_text(entry.get(name)) for entry in settings)] for name in names if name != "history"]
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
    "Layer swaps": _studies_section,
    "Dynamics": _dynamics_section,
    "Environment": _environment_section,
    "Load the model": _usage_section,
    "Data": lambda results: _settings("Images that were used", results.get("dataset")),
}


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
    rows = [[name, as_text(value)] for name, value in (values or {}).items()]
    return [_table(caption, rows)] if rows else []


def _figure(name: str, figure: "plots.Figure", caption: str) -> Block:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    png, width = buffer.getvalue(), round(100 * figure.get_figwidth())
    block = {"kind": "figure", "name": name, "caption": caption, "width": width}
    return {**block, "png": png, "base64": base64.b64encode(png).decode()}
