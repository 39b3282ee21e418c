"""The report's section on probes: the paper's Table 1, scores of every run, and Fig. 7."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from . import plots
from .dense_plots import depths_figure, masks_figure
from .predictions import load_predictions
from .probe_tables import probe_records, probe_table, probes_of
from .report_blocks import Block, figure_block, settings_blocks, table_block
from .results import CURVES, TEACHER, as_number, as_text, probe_metric

PROBE_AXES = {"accuracy": "top-1 accuracy (%)", "mean_iou": "mean IoU (%)"}
RETAINED = "retained (%)"


def accuracy_section(results: dict[str, Any]) -> list[Block]:
    """Blocks on all probes of the results, empty if there is none."""
    probes = probes_of(results)
    blocks = _table(results) + _blocks_figure(results)
    for index, probe in enumerate(probes):
        of = f" on {probe['dataset']}" if len(probes) > 1 and probe.get("dataset") else ""
        blocks += _probe_blocks(probe, "accuracy" if index == 0 else f"accuracy_{index + 1}", of)
    return blocks


def predictions_blocks(results: dict[str, Any], folder: Path) -> list[Block]:
    """What dense probes of the results predict for some images, as stored below `folder`, and the IoU of each class."""
    blocks: list[Block] = []
    for index, probe in enumerate(probes_of(results)):
        if "predictions" not in probe:
            continue
        of = f" on {probe['dataset']}" if len(probes_of(results)) > 1 and probe.get("dataset") else ""
        stored = os.path.normpath(folder / probe["predictions"])  # `folder`, which `..` may leave, need not exist yet
        found = load_predictions(stored, probe["results"])
        names = probe.get("label_names")
        if found is not None:
            masks = probe.get("metric") == "mean_iou"
            figure = masks_figure(*found, class_names=names) if masks else depths_figure(*found)
            caption = f"{'Masks' if masks else 'Depths'} that the first head predicts{of}"
            blocks.append(figure_block("predictions" if index == 0 else f"predictions_{index + 1}", figure, caption))
        blocks += _class_table(probe["results"], names, of)
    return blocks


def _class_table(entries: Mapping[str, Any], names: Sequence[str] | None, of: str) -> list[Block]:
    """IoU of every class that the evaluation set or a prediction has, of each model's first head."""
    every = {name: entry["details"][0]["iou"] for name, entry in entries.items() if "iou" in _first(entry)}
    length = max(map(len, every.values()), default=0)
    rows = [
        [names[number] if names else f"class {number}", *(as_number(iou[number], 100, ".1f") for iou in every.values())]
        for number in range(length)
        if any(iou[number] is not None for iou in every.values())
    ]
    return [table_block(f"IoU of each class of the first head{of} (%)", rows, ["Class", *every])] if rows else []


def _first(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    details = entry.get("details")
    return details[0] if details else {}


def _table(results: Mapping[str, Any]) -> list[Block]:
    """Table 1, where it says more than the section of results does."""
    records = probe_records(results)
    if not any(record["flops"] is not None for record in records) and len(probes_of(results)) < 2:
        return []
    header, rows = probe_table(records)
    sigma = "; ± is sigma over the heads" if "±" in str(rows) else ""
    return [table_block(f"Linear probes of frozen features{sigma}", rows, header)]


def _blocks_figure(results: Mapping[str, Any]) -> list[Block]:
    """Fig. 7: share retained and R2 of the Raptors against their number of blocks, if there are several numbers."""
    retained: dict[str, dict[int, float]] = {}
    lines: dict[str, float] = {}
    for record in probe_records(results):
        name = " ".join(filter(None, (record["dataset"], probe_metric(record)[0].partition(" (")[0])))
        if record["retained"] is None or record["model"] == TEACHER:
            continue
        if record["num_blocks"] is None:
            lines[f"{record['model']}: {name}"] = 100 * record["retained"]
        else:
            retained.setdefault(name, {}).setdefault(record["num_blocks"], 100 * record["retained"])
    fidelity: dict[str, dict[int, float]] = {}
    for model in results.get("models") or []:
        curve = (((model.get("fidelity") or {}).get("r2") or {}).get("all")) or [None]
        if None not in curve and model.get("num_blocks") is not None:
            for name, value in (("mean of the layers", fmean(curve)), ("last layer", curve[-1])):
                fidelity.setdefault(f"{CURVES['r2']}, {name}", {}).setdefault(model["num_blocks"], value)
    counts = {count for points in (*retained.values(), *fidelity.values()) for count in points}
    if len(counts) < 2:
        return []
    figure = plots.blocks_figure({RETAINED: retained, f"{CURVES['r2']} with the teacher": fidelity}, {RETAINED: lines})
    return [figure_block("blocks", figure, "What Raptors keep of the teacher, by their number of blocks")]


def _probe_blocks(probe: Mapping[str, Any], figure_name: str, of: str) -> list[Block]:
    entries = {name: entry for name, entry in probe["results"].items() if entry.get("mean") is not None}
    blocks, (heading, scale) = [], probe_metric(probe)
    metric = probe.get("metric") or "accuracy"
    if entries and scale == 100:
        bars = {name: (entry["mean"], entry.get("std")) for name, entry in entries.items()}
        retained = {name: entry.get("retained") for name, entry in entries.items()}
        figure = plots.accuracy_figure(
            bars, PROBE_AXES[metric], reference_name=TEACHER if TEACHER in bars else None, retained=retained
        )
        task = f": {probe['task']}" if probe.get("task") else ""
        blocks.append(figure_block(figure_name, figure, f"Probe on the frozen features{task}{of}"))
    runs = {name: entry[metric] for name, entry in entries.items() if entry.get(metric)}
    if runs:
        columns = range(max(map(len, runs.values())))
        form = ".2f" if scale == 100 else ".3f"
        rows = [
            [name, *(as_number(dict(enumerate(run)).get(i), scale, form) for i in columns)]
            for name, run in runs.items()
        ]
        title, _, unit = heading.partition(" (")
        caption = f"{title} of each run{of} ({unit}"
        blocks.append(table_block(caption, rows, ["Model", *(f"Run {i + 1}" for i in columns)]))
    return blocks + _details(entries, of) + settings_blocks(f"Protocol of the probe{of}", probe.get("protocol"))


def _details(entries: dict[str, Any], of: str) -> list[Block]:
    """Every metric that is one number, of each model's first head."""
    firsts = {name: entry["details"][0] for name, entry in entries.items() if entry.get("details")}
    names = [key for key, value in next(iter(firsts.values()), {}).items() if isinstance(value, (int, float))]
    rows = [[key, *(as_text(first.get(key)) for first in firsts.values())] for key in names]
    return [table_block(f"All metrics of the first head{of}", rows, ["Metric", *firsts])] if rows else []
