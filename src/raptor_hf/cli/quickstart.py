"""`raptor-hf quickstart`: teacher, phases, Raptors, probe and report on bundled digits, offline."""

import shlex
from pathlib import Path

from ..quickstart import QuickstartArguments, clear, run_quickstart
from ..results import summary_rows
from .common import check_finished
from .console import note, status, table
from .parsing import parse


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    (args,) = parse("quickstart", [QuickstartArguments], argv, description=__doc__)
    check_finished(Path(args.output_dir), args.overwrite)
    if args.overwrite:
        clear(args.output_dir)
    results = run_quickstart(args, shlex.join(["raptor-hf", "quickstart", *argv]), status)
    header, rows = summary_rows(results)
    table(header, rows, title=results["title"])
    note(f"report: {Path(args.output_dir) / 'report.html'}")
    return 0
