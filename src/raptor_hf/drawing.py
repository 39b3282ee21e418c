"""What all pictures share: the figure and its axes, colours, labels, legends.

Only matplotlib's object-oriented interface is used, neither `pyplot` nor `rcParams`: safe in a library, in threads and
without a display. matplotlib is imported by the first figure; where it is missing, that raises an `ImportError` of one
line that names the extra to install. Colours are those of Okabe and Ito, which stay apart in the common forms of colour
blindness; lines also differ in marker.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150

INK, GREY, GRID, REFERENCE = "#222222", "#8a8a8a", "#e4e4e4", "#6b6b6b"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINE_STYLES = ("-", "--", "-.", ":")


def layer_ticks(num_layers: int, most: int = 16) -> list[int]:
    """Layers to label on an axis: all up to `most`, then every second, fourth, ... of them."""
    step = 2 ** max(0, math.ceil(math.log2(num_layers / most)))
    return ([1] if step > 2 else []) + list(range(step, num_layers + 1, step))


def matplotlib_package() -> Any:
    """The package, imported when first needed."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError('figures need matplotlib; install it with: pip install "raptor_hf[analysis]"') from error
    return matplotlib


def new_figure(
    width: float, height: float, grid: str | None = "both", shape: tuple[int, int] = (1, 1), share: bool = True
) -> tuple["Figure", list["Axes"]]:
    """White figure, sides in inches, and its styled axes, which `share` their scales."""
    figure = matplotlib_package().figure.Figure(
        figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white"
    )
    every = list(figure.subplots(*shape, sharex=share, sharey=share, squeeze=False).flat)
    for axes in every:
        style_axes(axes, grid)
    return figure, every


def style_axes(axes: "Axes", grid: str | None) -> None:
    """Axes without a box, ticks in grey, a light grid along `grid` (`"x"`, `"y"`, `"both"`, or `None` for none)."""
    axes.set_facecolor("white")
    axes.tick_params(labelsize=9, color=GREY, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(True, axis=grid, color=GRID, linewidth=0.7)  # type: ignore[arg-type]


def set_labels(axes: "Axes", xlabel: str, ylabel: str, title: str | None) -> None:
    """Labels and title in the size and ink of all pictures."""
    axes.set_xlabel(plain_text(xlabel), fontsize=10, color=INK)
    axes.set_ylabel(plain_text(ylabel), fontsize=10, color=INK)
    axes.set_title(plain_text(title or ""), fontsize=11, color=INK)


def plain_text(text: str) -> str:
    """A name as it is: dollar signs start no formula."""
    return str(text).replace("$", r"\$")


def add_legend(figure: "Figure", handles: Mapping[str, Any], note: str = "", background: str = "white") -> None:
    """Legend under the picture, in as many columns as the names leave room for, with a note as its heading."""
    if not handles:
        return
    fitting = max(1, int(figure.get_figwidth() / (0.65 + 0.075 * max(map(len, handles)))))
    columns = math.ceil(len(handles) / math.ceil(len(handles) / fitting))
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "title": note or None}
    legend = figure.legend(list(handles.values()), [""] * len(handles), title_fontsize=9, **place)
    for text, name in zip(legend.get_texts(), handles, strict=True):
        text.set(text=plain_text(name), color=INK)  # set afterwards: a name that starts with "_" would be left out
    legend.get_frame().set(linewidth=0, facecolor=background, alpha=1.0)


def to_array(values: Any) -> np.ndarray:
    """float64 array of numbers, of a tensor of any type and device, or of lists with None for NaN."""
    if isinstance(values, torch.Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def is_finite(value: Any) -> bool:
    """Whether `value` is a finite number; a truth value is none."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and math.isfinite(value)


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and line of curve number `index`, different for the first 28."""
    turn, place = divmod(index, len(COLOURS))
    look = {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": LINE_STYLES[turn % len(LINE_STYLES)]}
    return {**look, "linewidth": 1.6, "markersize": 4.5}
