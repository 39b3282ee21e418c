"""`raptor-hf report DIR`: results.json of one or several runs as one page with figures."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..probe_tables import probes_of
from ..report import write_report
from ..results import RESULTS_FILE, read_json, summary_rows
from .common import print_probe_table
from .console import note, table, warn
from .parsing import parse
from .values import UsageError


@dataclass
class ReportArguments:
    """Which results."""

    _argument_group_name = "Report"

    folders: list[str] = field(
        default_factory=list, metadata={"help": "Run folders, searched for results.json (required)."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "Folder of the page; default the first folder."})
    table: bool = field(
        default=False, metadata={"help": "Print the probes as the paper's Table 1; write table.md, .csv, .json, .tex."}
    )


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    (args,) = parse("report", [ReportArguments], argv, ["folders"], description=__doc__)
    if not args.folders:
        raise UsageError("no run folder given; name one that holds a results.json.")
    found = {path for folder in args.folders for path in Path(folder).rglob(RESULTS_FILE)}
    paths = sorted(path for path in found if not (path.parent / "config.json").is_file())  # a model's own excerpt
    if not paths:
        raise UsageError(f"no {RESULTS_FILE} in {', '.join(args.folders)}; a run writes it when it has finished.")
    output_dir = Path(args.output_dir or args.folders[0])
    results = merge_results([_located(path, output_dir) for path in paths])
    page = write_report(output_dir, results)
    if args.table:
        print_probe_table(output_dir, results)
    else:
        header, rows = summary_rows(results)
        if rows:
            table(header, rows, title=results.get("title"))
    note(f"{len(paths)} results in {page}")
    return 0


def _located(path: Path, output_dir: Path) -> dict[str, Any]:
    """Results whose models and predictions are named relative to the page, not to their own run."""
    results = read_json(path)
    for model in results.get("models", []):
        if "path" in model:
            model["path"] = os.path.relpath(path.parent / model["path"], output_dir)
    for probe in probes_of(results):
        if "predictions" in probe:
            probe["predictions"] = os.path.relpath(path.parent / probe["predictions"], output_dir)
    return results


def merge_results(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins results of several runs: models and probes are collected, of everything else the first is kept.

    A model that has the name of an earlier one is left out with a warning, and so are a probe's results for a name and
    set of images that an earlier probe had. `probe` is the first probe, `probes` are all where there are several.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        models = merged.get("models", [])
        known = {model["name"] for model in models}
        for model in part.get("models", []):
            if model["name"] in known:
                warn(f"two models are called {model['name']}; the first is shown (distill --name tells them apart)")
            else:
                models = [*models, model]
        merged = {**part, **merged}
        if models:
            merged["models"] = models
    probes = _merge_probes(probe for part in parts for probe in probes_of(part))
    if probes:
        merged["probe"] = probes[0]
    if len(probes) > 1:
        merged["probes"] = probes
    return merged


def _merge_probes(probes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One probe per task and set of images, with the results of all."""
    merged: dict[tuple[Any, Any], dict[str, Any]] = {}
    for probe in probes:
        known = merged.setdefault((probe.get("task"), probe.get("dataset")), {**probe, "results": {}})
        on = f" on {known['dataset']}" if known.get("dataset") else ""
        if known.get("protocol") != probe.get("protocol"):
            warn(f"probes{on} differ in their protocol; the first's is shown")
        for name, entry in probe["results"].items():
            if name not in known["results"]:
                known["results"][name] = entry
            elif known["results"][name] != entry:
                warn(f"{name} was probed twice{on}; the first result is shown")
    return list(merged.values())
