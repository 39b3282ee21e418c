"""Table 1 of arXiv 2512.19941 from probes that ran: one row per model, one pair of columns per set of images."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import ABSENT, TEACHER, as_number, json_text, probe_metric, to_plain, write_file

NAMES = ("model", "num_blocks", "num_layers", "num_parameters", "image_height", "image_width", "flops", "task",
         "dataset", "metric", "mean", "std", "num_seeds", "num_scored", "retained")  # fmt: skip


def probes_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The probes that results hold, those without an outcome left out: `probes`, or else the one `probe`."""
    probes = results.get("probes") or [results.get("probe") or {}]
    return [probe for probe in probes if probe.get("results")]


def probe_records(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat record per model and set of images, with the keys [`NAMES`]; numbers are not rounded.

    Accuracies and mean IoU are fractions, RMSE is in metres, `flops` are of one image of `image_height x image_width`
    pixels. `retained` is the share of the teacher's mean, worked out where a run had no reference. A ViT has no
    `num_blocks`. What is not known is None. Blocks and parameters that the probe does not tell are taken from the
    results' `models` and `teacher`.
    """
    plain = to_plain(results)
    known = {model["name"]: model for model in plain.get("models") or []}
    teacher = plain.get("teacher") or {}
    known[TEACHER] = {**teacher, **known.get(TEACHER, {})}
    records = []
    for probe in probes_of(plain):
        metric = probe.get("metric") or "accuracy"
        whole = (probe["results"].get(TEACHER) or {}).get("mean")
        for name, entry in probe["results"].items():
            size, mean = {**known.get(name, {}), **(entry.get("size") or {})}, entry.get("mean")
            retained = entry.get("retained")
            if retained is None and mean and whole:
                retained = whole / mean if metric == "rmse" else mean / whole
            height, width = size.get("image_size") or (None, None)
            values = (
                name, size.get("num_blocks"), size.get("num_layers"), size.get("num_parameters"), height, width,
                size.get("flops"), probe.get("task"), probe.get("dataset"), metric, mean, entry.get("std"),
                len(entry.get(metric) or ()) or None, entry.get("num_scored"), retained,
            )  # fmt: skip
            records.append(dict(zip(NAMES, values, strict=True)))
    return records


def probe_table(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The table of the paper: model, blocks (of a ViT its layers), parameters, GFLOPs, then per set of images mean and
    sigma, and the share retained. Models stand in the order in which they came; columns without a value are left out.

    GFLOPs are those at the image size of the first probe that a model had, which the heading names if all agree.

    Returns the names of the columns, and per row one text per column.
    """
    models = dict.fromkeys(record["model"] for record in records)
    columns = dict.fromkeys((record["task"], record["dataset"], record["metric"]) for record in records)
    names = [probe_metric({"metric": metric})[0] for _, _, metric in columns]
    header = ["Model", "Blocks", "Parameters", _flops_heading(records)]
    for (_, dataset, _), name in zip(columns, names, strict=True):
        header += [f"{dataset} {name}" if dataset else name, "Retained"]
    rows = []
    for model in models:
        own = [record for record in records if record["model"] == model]
        size = {key: next((r[key] for r in own if r[key] is not None), None) for key in NAMES[1:7]}
        blocks = f"{size['num_layers']} layers" if size["num_layers"] is not None else ABSENT
        row = [model, blocks if size["num_blocks"] is None else str(size["num_blocks"])]
        row.append(as_number(size["num_parameters"], form=",d"))
        flops = None if size["flops"] is None else size["flops"] / 1e9
        row.append(as_number(flops, form=".2f" if (flops or 0.0) >= 1.0 else ".2g"))
        for column in columns:
            record = next((r for r in own if (r["task"], r["dataset"], r["metric"]) == column), {})
            row += _cells(record, column[-1])
        rows.append(row)
    kept = [index for index in range(len(header)) if index == 0 or any(row[index] != ABSENT for row in rows)]
    return [header[index] for index in kept], [[row[index] for index in kept] for row in rows]


def write_tables(folder: str | os.PathLike[str], records: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Writes `table.md` and `table.tex` as [`probe_table`] has them, and every record in `table.csv` and `table.json`.

    Returns the paths.

    Raises:
        ValueError: if there is no record.
    """
    if not records:
        raise ValueError("there is no probe to make a table of; run raptor-hf probe first.")
    header, rows = probe_table(records)
    text = io.StringIO()
    writer = csv.DictWriter(text, NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    contents = {
        "md": markdown(header, rows),
        "csv": text.getvalue(),
        "json": json_text(list(records)),
        "tex": _latex(header, rows),
    }
    return [write_file(Path(folder) / f"table.{kind}", content.encode()) for kind, content in contents.items()]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown; all columns but the first stand at the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    import pandas as pd

    frame = pd.DataFrame(rows)
    frame.columns = pd.Index(header)  # two of them may have the same name
    text = frame.to_latex(index=False, escape=True, column_format="l" + "r" * (len(header) - 1))
    return text.replace("±", r"$\pm$").replace(ABSENT, "--")


def _cells(record: Mapping[str, Any], metric: str) -> list[str]:
    scale = probe_metric({"metric": metric})[1]
    form = ".2f" if scale == 100 else ".3f"
    sigma = "" if record.get("std") is None else f" ± {as_number(record['std'], scale, form)}"
    return [as_number(record.get("mean"), scale, form, sigma), as_number(record.get("retained"), 100, ".1f", " %")]


def _flops_heading(records: Sequence[Mapping[str, Any]]) -> str:
    firsts: dict[str, tuple[int, int]] = {}
    for record in records:
        if record["flops"] is not None:
            firsts.setdefault(record["model"], (record["image_height"], record["image_width"]))
    sizes = set(firsts.values())
    return f"GFLOPs ({' × '.join(map(str, sizes.pop()))})" if len(sizes) == 1 else "GFLOPs"
