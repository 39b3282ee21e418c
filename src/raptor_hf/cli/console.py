"""What a command shows: a final table on stdout; notes, warnings and progress on stderr.

Only the main process of a run writes, so that a run of eight processes prints one table. Colours, spinners and bars
appear on a terminal only and follow `NO_COLOR`; a pipe or a log file gets plain lines of full width.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm.auto import tqdm

T = TypeVar("T")

_UNLIMITED = 10_000  # columns: wider than any table, so that piped output is never cut


def is_main_process() -> bool:
    """Whether this is world rank 0, by the variables that torchrun and accelerate set; torch is not imported."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    return rank == "0"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """Print the result of a command on stdout.

    On a terminal the table fits the window, long cells being folded; elsewhere it is a Markdown table of the width
    that its content needs. Nothing is ever cut.

    Args:
        header (`Sequence[str]`): names of the columns.
        rows (`Iterable[Sequence[Any]]`): one sequence per row, as long as `header`. Numbers stand at the right,
            floats with four significant digits, `None` is a dash, everything else is shown by `str`.
        title (`str`, *optional*): a line above the table.

    Raises:
        ValueError: if a row and the header differ in length.
    """
    cells = [list(row) for row in rows]
    if wrong := [row for row in cells if len(row) != len(header)]:
        raise ValueError(f"a row of the table has {len(wrong[0])} cells, the header has {len(header)}: {wrong[0]}")
    if not is_main_process():
        return
    terminal = sys.stdout.isatty()
    grid = Table(box=SIMPLE_HEAD if terminal else MARKDOWN)
    for index, name in enumerate(header):
        numeric = all(isinstance(row[index], int | float) or row[index] is None for row in cells)
        grid.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(_cell, row))
    console = _console(sys.stdout, None if terminal else _UNLIMITED)
    if title:
        console.print(title, style="bold")
    console.print(grid)


def note(message: str) -> None:
    """Write a line about what happens on stderr."""
    _line(Text(message))


def warn(message: str) -> None:
    """Write a line about something that deserves attention on stderr, marked `warning:`."""
    _line(Text.assemble(("warning: ", "yellow"), message))


@contextmanager
def status(message: str) -> Iterator[None]:
    """Show that a step of unknown length is at work: a spinner on a terminal, else a line when it starts.

    A line with the seconds that it took follows when it ends, unless it fails.
    """
    start = time.perf_counter()
    if is_main_process() and sys.stderr.isatty():
        with _console(sys.stderr).status(Text(message)):
            yield
    else:
        note(f"{message} ...")
        yield
    note(f"{message}: {time.perf_counter() - start:.1f} s")


def progress(iterable: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Go through `iterable` with a bar like the Trainer's on a terminal, else with a line when it starts and ends.

    Args:
        iterable (`Iterable`): what to go through.
        description (`str`): what is done, shown before the bar.
        total (`int`, *optional*): number of items, where `len(iterable)` is unknown.

    Yields:
        The items of `iterable`.
    """
    with status(description) if not sys.stderr.isatty() else nullcontext():
        yield from tqdm(iterable, desc=description, total=total, disable=None if is_main_process() else True)


def _line(text: Text) -> None:
    """Write one unwrapped line on stderr, above a progress bar if one is shown."""
    if is_main_process():
        with tqdm.external_write_mode(file=sys.stderr):
            _console(sys.stderr).print(text, soft_wrap=True)


def _console(file: Any, width: int | None = None) -> Console:
    """A console that prints text as it is: `[bold]` in a path or a name stays what it is."""
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False)


def _cell(value: Any) -> str:
    """Text of a table's cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return str(value)
