"""The parts that report sections are made of: tables and figures."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .drawing import DPI
from .results import ABSENT, as_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBER = re.compile(r"[-−]?\d[\d,.]*(e[-+]?\d+)?( %| ± [\d.]+)?")
Block = dict[str, Any]


def table_block(caption: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> Block:
    """A table. Columns of numbers are set flush right; those of a table with a header are not wrapped."""
    columns = list(zip(*rows, strict=True))[1:]
    numeric = [all(cell == ABSENT or _NUMBER.fullmatch(cell) for cell in column) for column in columns]
    classes = ["name", *("number" if flag else "nowrap" if header else "text" for flag in numeric)]
    return {"kind": "table", "caption": caption, "header": header, "rows": rows, "classes": classes}


def figure_block(name: str, figure: "Figure", caption: str) -> Block:
    """A figure for the report, drawn: under `"png"` its bytes, under `"name"` that of its file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    png, width = buffer.getvalue(), round(100 * figure.get_figwidth())
    block = {"kind": "figure", "name": name, "caption": caption, "width": width}
    return {**block, "png": png, "base64": base64.b64encode(png).decode()}


def settings_blocks(caption: str, values: Mapping[str, Any] | None) -> list[Block]:
    """Table of names and values, or nothing."""
    rows = [[name, as_text(value)] for name, value in (values or {}).items()]
    return [table_block(caption, rows)] if rows else []
