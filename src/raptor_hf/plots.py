"""Pictures of the measurements: one function per measurement, each returns a matplotlib `Figure` at 150 dpi.

The functions take plain numbers (lists, arrays, tensors), never models, so that a picture can be drawn again from a
saved `results.json`; `title` is optional in all of them. Only matplotlib's object-oriented interface is used, neither
`pyplot` nor `rcParams`: safe in a library, in threads and without a display. matplotlib is imported by the first
figure; where it is missing, every function raises an `ImportError` of one line that names the extra to install.

Layers are counted `1..L` on every axis, and a boundary between layers `l` and `l + 1` is drawn at `l + 0.5`. Colours
are those of Okabe and Ito, which stay apart in the common forms of colour blindness; lines also differ in marker.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import (
    COLOURS,
    GREY,
    INK,
    REFERENCE,
    add_legend,
    is_finite,
    layer_ticks,
    line_style,
    matplotlib_package,
    new_figure,
    plain_text,
    set_labels,
    to_array,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

LOWEST_SHOWN, BROKEN_AXIS_ABOVE = -0.5, 0.8
PHASE_BOUNDARY = "phase boundary"

_OUTLINES = ("#E8112D", "#111111", "#FFFFFF", "#FF4FD8")
_NOT_A_MEASUREMENT = ("step", "epoch", "learning_rate", "grad_norm", "total_flos")

Curves = Mapping[str, Sequence[float | None]]
History = Sequence[Mapping[str, Any]]


def similarity_figure(
    similarity: Any, partitions: Mapping[str, Sequence[int]] | None = None, *, title: str | None = None
) -> "Figure":
    """Heat map of the layer-layer similarity with the phases as squares on the diagonal (arXiv 2512.19941, Fig. 1).

    Args:
        similarity (array-like of shape `(num_layers, num_layers)`): cosines between layers `1..L`; NaN or None is grey.
        partitions (mapping of name to sequence of int): layers per phase, for example
            `{"k=2": (7, 5), "k=3": (7, 3, 2)}`. Later ones are thinner and on top: a shared edge shows them all.

    Raises:
        ValueError: if the matrix is not square, or a partition does not add up to the number of layers.
    """
    matrix = to_array(similarity)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"similarity has shape {matrix.shape}; pass one square matrix, layers by layers.")
    figure, (axes,) = new_figure(6.4, 5.4, None)
    edges = (0.5, len(matrix) + 0.5)
    colour_map = matplotlib_package().colormaps["viridis"].with_extremes(bad="#bdbdbd")
    image = axes.imshow(np.ma.masked_invalid(matrix), cmap=colour_map, vmax=1.0, extent=(*edges, *edges[::-1]))
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_label("cosine similarity", fontsize=10, color=INK)
    bar.ax.tick_params(labelsize=9, color=GREY, labelcolor=INK)
    bar.outline.set_visible(False)  # type: ignore[operator]  # the stubs take the outline for a function
    axes.set_xticks(layer_ticks(len(matrix)))
    axes.set_yticks(layer_ticks(len(matrix)))
    set_labels(axes, "layer", "layer", title)
    add_legend(figure, phase_squares(axes, partitions or {}, len(matrix)), background="#b4bac2")
    axes.set(xlim=edges, ylim=edges[::-1])
    return figure


def layer_curves_figure(
    curves: Curves,
    ylabel: str,
    title: str | None = None,
    boundaries: Sequence[int] | None = None,
    reference: tuple[str, float] | None = None,
) -> "Figure":
    """One value per layer and model, for example R2 or cosine (arXiv 2512.19941, Fig. 7 and Fig. 14).

    R2 has no lower bound, and one bad layer would press all others flat. The axis therefore ends at -0.5 at the lowest;
    values below it are marked by triangles on the axis, and a note under the picture says how many and how low.

    Args:
        curves (mapping of name to sequence of float or None): value of each layer `1..L`; None or NaN leaves a gap.
        ylabel (`str`): name of the value.
        boundaries (sequence of int, *optional*): last layer of each phase but the final one, `(7, 10)` for 7|3|2.
        reference (name and value, *optional*): dashed horizontal line, such as a model to compare with.

    Raises:
        ValueError: if none of the curves has a finite value.
    """
    values = _curve_values(curves)
    limits = _limits(np.concatenate([*values.values(), [reference[1]] if reference else []]))
    figure, (axes,) = new_figure(6.4, 4.2)
    handles = _draw_curves(axes, values, limits, boundaries, list(values))
    if reference is not None:
        handles[reference[0]] = axes.axhline(reference[1], color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
    set_labels(axes, "layer", ylabel, title)
    add_legend(figure, handles, _clip_note(list(values.values()), limits[0]))
    return figure


def token_group_figure(
    groups: Mapping[str, Curves], ylabel: str, title: str | None = None, boundaries: Sequence[int] | None = None
) -> "Figure":
    """[`layer_curves_figure`] for several token groups side by side and on one scale (arXiv 2512.19941, Fig. 14).

    Args:
        groups (mapping of group to mapping of model to curve): `{"cls": {"k=3": [...]}, ...}`, drawn in this order,
            two or three to a row. A model has one colour in all groups, also where it is absent from some.
        ylabel, boundaries: as there.

    Raises:
        ValueError: if there is no group, or none of a group's curves has a finite value.
    """
    if not groups:
        raise ValueError("groups is empty; pass at least one token group with one curve.")
    values = {group: _curve_values(curves) for group, curves in groups.items()}
    drawn = [curve for curves in values.values() for curve in curves.values()]
    limits = _limits(np.concatenate(drawn))
    names = list(dict.fromkeys(name for curves in values.values() for name in curves))
    columns = len(groups) if len(groups) <= 3 else 2
    rows = math.ceil(len(groups) / columns)
    figure, grid = new_figure(2.2 + 2.7 * columns, 1.5 + 2.3 * rows, shape=(rows, columns))
    handles: dict[str, Any] = {}
    for index, (group, curves) in enumerate(values.items()):
        handles |= _draw_curves(grid[index], curves, limits, boundaries, names)
        is_lowest = index + columns >= len(groups)
        set_labels(grid[index], "layer" if is_lowest else "", "", group)
        grid[index].tick_params(labelbottom=is_lowest)
    for axes in grid[len(groups) :]:
        axes.set_visible(False)
    figure.supylabel(plain_text(ylabel), fontsize=10, color=INK)
    if title:
        figure.suptitle(plain_text(title), fontsize=11, color=INK)
    handles = {name: handles[name] for name in [*names, PHASE_BOUNDARY] if name in handles}
    add_legend(figure, handles, _clip_note(drawn, limits[0]))
    return figure


def accuracy_figure(
    bars: Mapping[str, tuple[float, float | None]],
    ylabel: str = "top-1 accuracy (%)",
    reference_name: str | None = None,
    retained: Mapping[str, float | None] | None = None,
    title: str | None = None,
) -> "Figure":
    """Accuracies as bars, sigma as whiskers, and the share that is retained (arXiv 2512.19941, Fig. 7 and Table 2).

    The axis starts at 0. Only where every bar, less its sigma, is above 80 % it starts later; then a break mark and the
    axis' label say so.

    Args:
        bars (mapping of name to mean and sigma): both as fractions of 1; sigma None where one run was made.
        ylabel, reference_name (`str`): name of the accuracy; bar that is the whole, usually the teacher.
        retained (mapping of name to float, *optional*): shares as measured; where absent, mean by the reference's mean.

    Raises:
        ValueError: if there is no bar, a mean lies outside 0..1, or `reference_name` is no bar.
    """
    if not bars:
        raise ValueError("bars is empty; pass at least one model with its accuracy.")
    outside = {name: mean for name, (mean, _) in bars.items() if not 0.0 <= mean <= 1.0}
    if outside:
        raise ValueError(f"accuracies {outside} are outside 0..1; pass fractions, not percent.")
    if reference_name is not None and reference_name not in bars:
        raise ValueError(f"reference_name={reference_name!r} is no bar; use one of {', '.join(map(repr, bars))}.")
    means = np.asarray([100 * mean for mean, _ in bars.values()])
    sigmas = np.asarray([100 * std if std is not None and math.isfinite(std) else 0.0 for _, std in bars.values()])
    lowest, top = float((means - sigmas).min()), float((means + sigmas).max())
    start = 5.0 * (math.floor(lowest / 5) - 1) if lowest > 100 * BROKEN_AXIS_ABOVE else 0.0
    end = start + max(top - start, 1.0) / 0.78
    shares = _shares(bars, reference_name, retained or {})
    figure, (axes,) = new_figure(6.4, 1.3 + 0.48 * len(bars), "x")
    for row, (name, mean, sigma) in enumerate(zip(bars, means, sigmas, strict=True)):
        colour = REFERENCE if name == reference_name else COLOURS[0]
        axes.barh(row, mean - start, left=start, height=0.68, color=colour)
        if sigma:
            axes.errorbar(mean, row, xerr=sigma, color=INK, capsize=3, linewidth=1.2)
        inside = (mean - start) > 0.32 * (end - start)
        label = f"{mean:.2f} ± {sigma:.2f}" if sigma else f"{mean:.2f}"
        label += f"  ({shares[name]})" if shares[name] and not inside else ""
        style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(label, (mean + sigma, row), (6, 0), color=INK, **style)
        if shares[name] and inside:
            axes.annotate(shares[name], (start, row), (7, 0), color="white", **style)
    _value_axis(axes, start, top, end)
    axes.set(yticks=range(len(bars)), yticklabels=map(plain_text, bars), ylim=(len(bars) - 0.5, -0.5))
    note = f" – axis starts at {start:g} %, not at 0" if start else ""
    set_labels(axes, ylabel + note, "", title)
    return figure


def blocks_figure(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    references: Mapping[str, Mapping[str, float]] | None = None,
    *,
    title: str | None = None,
) -> "Figure":
    """Values against the number of blocks, other models as dashed lines (arXiv 2512.19941, Fig. 7).

    Args:
        panels (mapping of a value's name to mapping of series to `k` to value): one panel each, for example
            the accuracy retained and R2.
        references (mapping of a value's name to mapping of model to value, *optional*): lines across a panel, such as
            a smaller teacher; one named `"model: series"` has the colour of that series.

    Raises:
        ValueError: if there is no finite value.
    """
    panels = {name: series for name, series in panels.items() if any(series.values())}
    values = [v for series in panels.values() for points in series.values() for v in points.values()]
    if not any(map(is_finite, values)):
        raise ValueError(f"panels {list(panels)} hold no finite value; leave this picture out.")
    figure, grid = new_figure(3.2 + 3.2 * len(panels), 4.0, shape=(1, len(panels)), share=False)
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    lines = list(dict.fromkeys(name for part in (references or {}).values() for name in part))
    handles: dict[str, Any] = {}
    for axes, (label, series) in zip(grid, panels.items(), strict=True):
        for name, points in series.items():
            counts = sorted(points)
            style = line_style(names.index(name))
            (handles[name],) = axes.plot(counts, to_array([points[count] for count in counts]), **style)
        for name, value in ((references or {}).get(label) or {}).items():
            of = [line_style(names.index(series))["color"] for series in names if name.endswith(f": {series}")]
            colour = of[0] if of else INK
            style = {"color": colour, "linestyle": (0, (5, 3 + 3 * lines.index(name))), "linewidth": 1.2}
            handles[name] = axes.axhline(value, **style)
        counts = sorted({count for points in series.values() for count in points})
        axes.set(xticks=counts, xlim=(min(counts) - 0.5, max(counts) + 0.5))
        axes.margins(y=0.1)
        set_labels(axes, "blocks", label, None)
    if title:
        figure.suptitle(plain_text(title), fontsize=11, color=INK)
    add_legend(figure, handles)
    return figure


def schedule_figure(schedules: Mapping[str, Sequence[int]], *, title: str | None = None) -> "Figure":
    """Which block makes which layer: a row per model, a cell per layer, the number of the block inside.

    `schedules` maps names to a `block_schedule`, blocks numbered from 0; the first is drawn on top.

    Raises:
        ValueError: if there is no schedule, or one is empty.
    """
    if not schedules or not all(len(schedule) for schedule in schedules.values()):
        raise ValueError(f"schedules={dict(schedules)!r} has nothing to draw; pass one block number per layer.")
    num_layers = max(map(len, schedules.values()))
    figure, (axes,) = new_figure(min(12.0, max(5.0, 1.6 + 0.42 * num_layers)), 0.95 + 0.46 * len(schedules), None)
    size = 9.5 if num_layers <= 24 else 7.0
    for row, schedule in enumerate(schedules.values()):
        colours = _block_colours(max(schedule) + 1)
        for layer, block in enumerate(schedule, start=1):
            colour = colours[block]
            axes.barh(row, 1.0, left=layer - 0.5, height=0.76, color=colour, edgecolor="white", linewidth=1.2)
            axes.text(layer, row, str(block), ha="center", va="center", fontsize=size, color=_text_on(colour))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set(xlim=(0.5, num_layers + 0.5), xticks=layer_ticks(num_layers), ylim=(len(schedules) - 0.5, -0.5))
    axes.set_yticks(range(len(schedules)), [plain_text(name) for name in schedules])
    set_labels(axes, "layer (the number in a cell is its block)", "", title)
    return figure


def history_figure(
    history: History, keys: Sequence[str] | None = None, *, log_scale: bool | None = None, title: str | None = None
) -> "Figure":
    """Training curves by step, from the Trainer's `log_history`.

    Where `"stage"` changes or the steps start again, a dotted line is drawn and steps are counted on.

    Args:
        history (sequence of mappings): entries with `"step"` and numbers; a key may be missing from some of them.
        keys (sequence of str, *optional*): what to draw; by default [`history_keys`].
        log_scale (`bool`, *optional*): logarithmic value axis; by default where all values are positive and the largest
            is more than ten times the smallest.

    Raises:
        ValueError: if there is nothing to draw under these keys, or `log_scale=True` meets a value of 0 or less.
    """
    steps, restarts = _joined_steps(history)
    series: dict[str, np.ndarray] = {}
    for key in keys if keys is not None else history_keys(history):
        points = [(step, entry[key]) for step, entry in zip(steps, history, strict=True) if is_finite(entry.get(key))]
        if points:
            series[key] = to_array(points)
    if not series:
        raise ValueError(f"history of {len(history)} entries has no number to draw for keys={keys}; check the names.")
    values = np.concatenate([points[:, 1] for points in series.values()])
    if log_scale and values.min() <= 0:
        raise ValueError(f"log_scale=True with the value {values.min():g}; logarithms need > 0, use log_scale=False.")
    figure, (axes,) = new_figure(6.4, 4.0)
    lines: dict[str, Any] = {}
    for index, (key, curve) in enumerate(series.items()):
        style = line_style(index) | ({"marker": ""} if len(curve) > 40 else {})
        (lines[key],) = axes.plot(curve[:, 0], curve[:, 1], **style)
    for restart in restarts:
        axes.axvline(restart, color=GREY, linestyle=":", linewidth=1.0)
    if log_scale or (log_scale is None and 0 < 10 * values.min() < values.max()):
        axes.set_yscale("log")
    xlabel = "optimiser step" + (", stages one after the other" if restarts else "")
    set_labels(axes, xlabel, next(iter(series)) if len(series) == 1 else "value", title)
    add_legend(figure, lines)
    return figure


def history_keys(history: History) -> list[str]:
    """Keys with "loss" in their name, else all numbers but bookkeeping (step, epoch, learning rate, run times)."""
    numbers = dict.fromkeys(key for entry in history for key, value in entry.items() if is_finite(value))
    excluded = [key for key in numbers if key.startswith("train_") or key.endswith(("_runtime", "_per_second"))]
    keys = [key for key in numbers if key not in (*_NOT_A_MEASUREMENT, *excluded)]
    return [key for key in keys if "loss" in key] or keys


def phase_squares(axes: "Axes", partitions: Mapping[str, Sequence[int]], num_layers: int) -> dict[str, "Line2D"]:
    """One line per partition that runs around each of its phases, by the label for the legend."""
    lines: dict[str, Line2D] = {}
    for index, (name, repeats) in enumerate(partitions.items()):
        if sum(repeats) != num_layers or min(repeats) < 1:
            raise ValueError(f"partition {name!r} = {tuple(repeats)}; lengths must add up to the {num_layers} layers.")
        path: list[tuple[float, float]] = []
        for low, high in pairwise(np.cumsum([0, *repeats]) + 0.5):
            path += [(low, low), (high, low), (high, high), (low, high), (low, low), (math.nan, math.nan)]
        width = 1.4 + 1.8 * (len(partitions) - 1 - index)
        (line,) = axes.plot(*zip(*path, strict=True), color=_OUTLINES[index % len(_OUTLINES)], linewidth=width)
        line.set_solid_joinstyle("miter")
        lines[f"{name}: {' | '.join(map(str, repeats))}"] = line
    return lines


def _curve_values(curves: Curves) -> dict[str, np.ndarray]:
    values = {name: to_array(curve) for name, curve in curves.items()}
    if not any(np.isfinite(curve).any() for curve in values.values()):
        raise ValueError(f"curves of {list(values)} hold no finite value; leave such a picture out.")
    return values


def _limits(values: np.ndarray) -> tuple[float, float]:
    """Range of the value axis: ends at 1 where the values nearly do, and never below `LOWEST_SHOWN`."""
    finite = values[np.isfinite(values)]
    low, high = max(float(finite.min()), LOWEST_SHOWN), max(float(finite.max()), LOWEST_SHOWN + 0.5)
    margin = 0.05 * max(high - low, 0.02)
    return (low if low == LOWEST_SHOWN else low - margin), (1.0 if 0.5 < high <= 1.0 else high) + margin


def _clip_note(curves: Sequence[np.ndarray], lower: float) -> str:
    below = [value for value in np.concatenate(curves) if math.isfinite(value) and value < lower]
    note = f"triangles on the axis: {len(below)} below {lower:g}, not to scale; lowest {min(below, default=0):.4g}"
    return note.replace("-", "−") if below else ""


def _draw_curves(
    axes: "Axes",
    curves: Mapping[str, np.ndarray],
    limits: tuple[float, float],
    boundaries: Sequence[int] | None,
    names: Sequence[str],
) -> dict[str, "Line2D"]:
    """Draw on one axes; the place in `names` decides the colour. Returns one line per entry of the legend."""
    lines: dict[str, Line2D] = {}
    for name, curve in curves.items():
        style = line_style(names.index(name))
        (lines[name],) = axes.plot(np.arange(1, len(curve) + 1), curve, **style)
        below = 1 + np.flatnonzero(np.isfinite(curve) & (curve < limits[0]))
        if len(below):
            ends = np.full(len(below), limits[0])
            axes.scatter(below, ends, marker="v", s=34, color=style["color"], clip_on=False, zorder=3)
    for boundary in boundaries or ():
        lines[PHASE_BOUNDARY] = axes.axvline(boundary + 0.5, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    num_layers = max(map(len, curves.values()))
    axes.set(xlim=(0.5, num_layers + 0.5), ylim=limits, xticks=layer_ticks(num_layers))
    return lines


def _shares(bars: Mapping[str, Any], reference: str | None, retained: Mapping[str, float | None]) -> dict[str, str]:
    """Text on retained accuracy for each bar, empty where there is nothing to compare with."""
    whole = bars[reference][0] if reference is not None else 0.0
    shares = {name: mean / whole if whole > 0 else None for name, (mean, _) in bars.items()}
    shares |= {name: share for name, share in retained.items() if share is not None}
    texts = {name: "" if share is None else f"{100 * share:.1f} % retained" for name, share in shares.items()}
    return texts if reference is None else texts | {reference: "reference"}


def _value_axis(axes: "Axes", start: float, top: float, end: float) -> None:
    """Ticks up to 100 %, and a break mark where the axis does not start at 0."""
    axes.set_xlim(start, end)
    axes.set_xticks([tick for tick in axes.get_xticks() if start <= tick <= min(100.0, max(top, start + 1))])
    if start:
        style: dict[str, Any] = {"marker": [(-0.5, -1.0), (0.5, 1.0)], "markersize": 9, "linestyle": "none"}
        axes.plot([0, 0.012], [0, 0], transform=axes.transAxes, color=INK, clip_on=False, gid="axis break", **style)


def _block_colours(num_blocks: int) -> Sequence[Any]:
    """One colour per block: named ones for few, a perceptually uniform scale for many."""
    scale = matplotlib_package().colormaps["viridis"]
    return COLOURS if num_blocks <= len(COLOURS) else scale(np.linspace(0.0, 1.0, num_blocks))


def _text_on(colour: Any) -> str:
    red, green, blue = matplotlib_package().colors.to_rgb(colour)
    return INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "white"


def _joined_steps(history: History) -> tuple[list[float], list[float]]:
    """Step of each entry counted over all stages, and the steps at which a new stage starts."""
    steps, restarts = list[float](), list[float]()
    offset, previous, stage = 0.0, 0.0, None
    for entry in history:
        step, entered = float(entry["step"]), entry.get("stage", stage)
        if steps and (step < previous or entered != stage):
            restarts.append(steps[-1])
            offset += previous if step < previous else 0.0
        previous, stage = step, entered
        steps.append(offset + step)
    return steps, restarts
