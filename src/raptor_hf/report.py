"""The report of a run: one HTML file that opens offline, and its figures, drawn from `results.json` (see `results`)."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from . import plots
from .phases import Phases
from .probe_report import accuracy_section, predictions_blocks
from .report_blocks import Block, figure_block, settings_blocks, table_block
from .results import (
    CURVES,
    RESULTS_FORMAT,
    as_text,
    summary_rows,
    to_plain,
    without_folders,
    write_file,
)
from .study_report import (
    complexity_section,
    dynamics_section,
    paradigms_section,
    partitions_section,
    recurrence_section,
    similarities_blocks,
    studies_section,
)
from .tokens import TOKEN_GROUPS, schedule_segments

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
    built["Accuracy"] += predictions_blocks(plain, folder)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_TEMPLATE)
    html = template.render(title=plain.get("title") or "Raptor report", sections={k: v for k, v in built.items() if v})
    for block in (block for blocks in built.values() for block in blocks if block["kind"] == "figure"):
        write_file(folder / "figures" / f"{block['name']}.png", block["png"])
    return write_file(folder / "report.html", html.encode())


def _results_section(results: dict[str, Any]) -> list[Block]:
    header, rows = summary_rows(results)
    blocks = []
    if rows:
        caption = "Teacher and models" + ("; ± is sigma over the runs" if "±" in str(rows) else "")
        blocks.append(table_block(caption, rows, header))
    schedules = {model["name"]: model["block_schedule"] for model in _models(results, "block_schedule")}
    if schedules:
        blocks.append(figure_block("schedule", plots.schedule_figure(schedules), "Block that makes each layer"))
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
        blocks.append(figure_block("similarity", plots.similarity_figure(phases["similarity"], squares), caption))
    blocks += similarities_blocks(results)
    if partitions:
        rows = [[k, str(partitions[k]), as_text(e.get("score")), as_text(e.get("method"))] for k, e in entries.items()]
        blocks.append(table_block("Phases that were found", rows, ["Blocks", "Layers", "Score", "Method"]))
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
            blocks.append(figure_block(key, figure, f"{name} with the teacher by layer, all tokens{on}"))
        if groups.keys() - {"all"}:
            figure = plots.token_group_figure(groups, label, boundaries=boundaries)
            blocks.append(
                figure_block(f"{key}_groups", figure, f"{name} with the teacher by layer and token group{on}")
            )
    return blocks


def _training_section(results: dict[str, Any]) -> list[Block]:
    models = _models(results, "training")
    blocks = []
    for index, model in enumerate(models, start=1):
        history = [entry for entry in model["training"].get("history") or [] if "step" in entry]
        if plots.history_keys(history):
            figure = plots.history_figure(history)
            blocks.append(figure_block(f"training_{index}", figure, f"Training of {model['name']}"))
    settings = [{**model["training"], "seeds": model.get("seeds")} for model in models]
    names = dict.fromkeys(name for entry in settings for name, value in entry.items() if value is not None)
    rows = [[name, *(as_text(entry.get(name)) for entry in settings)] for name in names if name != "history"]
    if rows:
        blocks.append(table_block("Settings", rows, ["Setting", *(model["name"] for model in models)]))
    return blocks


def _environment_section(results: dict[str, Any]) -> list[Block]:
    command = {"kind": "code", "caption": "Command:", "text": results.get("command")}
    blocks = [command] if command["text"] else []
    seed = {"seed": results["seed"]} if results.get("seed") is not None else {}
    blocks += settings_blocks("Software and hardware", {**seed, **(results.get("environment") or {})})
    return blocks + settings_blocks("Duration (seconds)", results.get("timings"))


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
    "Accuracy": accuracy_section,
    "Training": _training_section,
    "Partitions": partitions_section,
    "Training paradigms": paradigms_section,
    "Layer swaps": studies_section,
    "Recurrence": recurrence_section,
    "Description length": complexity_section,
    "Dynamics": dynamics_section,
    "Environment": _environment_section,
    "Load the model": _usage_section,
    "Data": lambda results: settings_blocks("Images that were used", results.get("dataset")),
}


def _models(results: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    return [model for model in results.get("models") or [] if model.get(part)]


def _curves(models: Iterable[Mapping[str, Any]], key: str, group: str) -> dict[str, list[float | None]]:
    """Curves of one token group that have a value, by model."""
    found = {model["name"]: (model["fidelity"].get(key) or {}).get(group) or [] for model in models}
    return {name: curve for name, curve in found.items() if any(value is not None for value in curve)}
