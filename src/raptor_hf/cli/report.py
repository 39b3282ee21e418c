"""`raptor-hf report DIR`: results.json of one or several runs as one page with figures."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..report import write_report
from ..results import RESULTS_FILE, read_json, summary_rows
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
    header, rows = summary_rows(results)
    if rows:
        table(header, rows, title=results.get("title"))
    note(f"{len(paths)} results in {page}")
    return 0


def _located(path: Path, output_dir: Path) -> dict[str, Any]:
    """Results whose models are named relative to the page, not to their own run."""
    results = read_json(path)
    for model in results.get("models", []):
        if "path" in model:
            model["path"] = os.path.relpath(path.parent / model["path"], output_dir)
    return results


def merge_results(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins results of several runs: models and probe results are collected, of everything else the first is kept.

    A model or probe result that has the name of an earlier one is left out with a warning.
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
        probe = dict(part.get("probe", {}))
        if probe and "probe" in merged:
            probe["results"] = {**probe["results"], **merged["probe"]["results"]}
        merged = {**part, **merged}
        if models:
            merged["models"] = models
        if probe:
            merged["probe"] = probe
    return merged
