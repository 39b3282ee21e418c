"""Pictures of the flow over depth (arXiv 2512.19941, Fig. 8 to 12), from plain numbers, as those of `plots`.

A token group has the same colour and marker in all of them. States are drawn at their number `0..L`; the step from
state `l` to `l + 1` at `l + 1`, the layer that makes it. A phase boundary behind layer `l` is drawn at `l + 0.5`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import (
    COLOURS,
    GREY,
    INK,
    MARKERS,
    add_legend,
    layer_ticks,
    line_style,
    matplotlib_package,
    new_figure,
    plain_text,
    set_labels,
    to_array,
)
from .plots import PHASE_BOUNDARY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUP_STYLES = {
    "all": {"color": INK, "marker": "D"},
    "cls": {"color": COLOURS[0], "marker": MARKERS[0]},
    "registers": {"color": COLOURS[2], "marker": MARKERS[2]},
    "patch": {"color": COLOURS[1], "marker": MARKERS[1]},
}
GroupCurves = Mapping[str, Mapping[str, Any] | Sequence[float | None]]


def flow_figure(
    models: Mapping[str, GroupCurves],
    ylabel: str,
    boundaries: Mapping[str, Sequence[int]] | None = None,
    *,
    title: str | None = None,
    of_states: bool = False,
    log: bool = False,
    xlabel: str | None = None,
) -> "Figure":
    """One value per layer and token group, models side by side on one scale (arXiv 2512.19941, Fig. 8 to 12).

    Args:
        models (mapping of name to mapping of group to curve): a curve is a sequence of numbers (None leaves a gap), or
            a mapping with `"mean"` and, drawn as a band, `"low"` and `"high"`. Curves of other names than those of
            token groups are told apart by their order.
        ylabel (`str`): name and unit of the value.
        boundaries (mapping of name to sequence of int, *optional*): last layer of each phase but the final one.
        of_states (`bool`): curves start at state 0; else at layer 1.
        log (`bool`): logarithmic scale; values that are not above 0 leave gaps.
        xlabel (`str`, *optional*): what is counted, if neither states nor layers.

    Raises:
        ValueError: if there is no model, or none of the curves has a value that can be drawn.
    """
    drawn = {name: {group: _curve(curve, log) for group, curve in curves.items()} for name, curves in models.items()}
    if not any(np.isfinite(mean).any() for curves in drawn.values() for mean, _ in curves.values()):
        raise ValueError(f"curves of {list(models)} hold no value to draw; leave such a picture out.")
    figure, grid = _panels(len(drawn), 3.1)
    handles: dict[str, Any] = {}
    for axes, (name, curves) in zip(grid, drawn.items(), strict=False):
        length = max(len(mean) for mean, _ in curves.values())
        places = np.arange(length) + (0 if of_states else 1)
        looks = _curve_styles(curves)
        for group, (mean, band) in curves.items():
            look: dict[str, Any] = {**looks[group], "linewidth": 1.6, "markersize": 4}
            (handles[group],) = axes.plot(places, mean, **look)
            if band is not None:
                axes.fill_between(places, *band, color=look["color"], alpha=0.16, linewidth=0)
        for boundary in (boundaries or {}).get(name, ()):
            handles[PHASE_BOUNDARY] = axes.axvline(boundary + 0.5, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
        ticks = layer_ticks(int(places[-1]), most=12)
        if of_states:
            ticks = [0, *(tick for tick in ticks if tick > 1 or 2 in ticks)]  # 0 and 1 would touch on a long axis
        axes.set(xlim=(places[0] - 0.5, places[-1] + 0.5), xticks=ticks)
        if log:
            _log_scale(axes)
        label = xlabel or ("state" if of_states else "layer")
        set_labels(axes, label, "", name if len(drawn) > 1 else None)
    figure.supylabel(plain_text(ylabel), fontsize=10, color=INK)
    _finish(figure, handles, title)
    return figure


def eigenvalue_figure(
    models: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], *, title: str | None = None
) -> "Figure":
    """Eigenvalues of the dynamic mode decomposition in the complex plane, with the unit circle (Fig. 12, App. D).

    Args:
        models (mapping of name to mapping of group to pairs): real and imaginary part of each eigenvalue.

    Raises:
        ValueError: if there is no eigenvalue.
    """
    points = [point for groups in models.values() for pairs in groups.values() for point in pairs]
    if not points:
        raise ValueError("models hold no eigenvalue; leave this picture out.")
    figure, grid = _panels(len(models), 3.3)
    handles: dict[str, Any] = {}
    reach = max(1.0, float(np.abs(to_array(points)).max())) * 1.12
    for axes, (name, groups) in zip(grid, models.items(), strict=False):
        circle = matplotlib_package().patches.Circle((0, 0), 1.0, fill=False, edgecolor=GREY, linewidth=1.0)
        axes.add_patch(circle)
        for group, pairs in groups.items():
            values = to_array(pairs).reshape(-1, 2)
            look: dict[str, Any] = {"s": 34, "linewidths": 1.2, "zorder": 3, **_group_style(group)}
            look["facecolors"] = "none"
            look["edgecolors"] = look.pop("color")
            handles[group] = axes.scatter(values[:, 0], values[:, 1], **look)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axes.set(xticks=[-1, -0.5, 0, 0.5, 1], yticks=[-1, -0.5, 0, 0.5, 1])
        set_labels(axes, "real part", "", name if len(models) > 1 else None)
    figure.supylabel("imaginary part", fontsize=10, color=INK)
    _finish(figure, handles, title)
    return figure


def path_figure(
    groups: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    explained: Mapping[str, Sequence[float]],
    boundaries: Sequence[int] = (),
    *,
    title: str | None = None,
) -> "Figure":
    """Paths of mean directions in the plane of two principal components, a panel per token group (Fig. 8, Fig. 10).

    An open marker is the first point of a path, a filled one its last, a small one the last state of a phase.

    Args:
        groups (mapping of group to mapping of name to path): a path is a list of `(x, y)`, one per state; names keep
            their colour in all panels. Paths of the last states only may be shorter.
        explained (mapping of group to two numbers): share of the variance along both axes, 0..1.
        boundaries (sequence of int): last layer of each phase but the final one.

    Raises:
        ValueError: if there is no path.
    """
    names = list(dict.fromkeys(name for paths in groups.values() for name in paths))
    if not names:
        raise ValueError("groups hold no path; leave this picture out.")
    figure, grid = _panels(len(groups), 3.3, share=False)
    handles: dict[str, Any] = {}
    for axes, (group, paths) in zip(grid, groups.items(), strict=False):
        longest = max(map(len, paths.values()))
        for name, path in paths.items():
            points = to_array(path)
            look = {key: value for key, value in line_style(names.index(name)).items() if key != "marker"}
            (handles[name],) = axes.plot(points[:, 0], points[:, 1], **{**look, "linewidth": 1.4})
            skipped = longest - len(points)  # a path may start late
            marked = [layer - skipped for layer in boundaries if 0 < layer - skipped < len(points) - 1]
            ends: dict[str, Any] = {"color": look["color"], "linestyle": "none", "markersize": 6}
            axes.plot(*points[0], marker="o", markerfacecolor="white", **ends)
            axes.plot(*points[-1], marker="o", **ends)
            axes.plot(points[marked, 0], points[marked, 1], marker="o", **{**ends, "markersize": 3.5})
        shares = [f"PC{place} ({100 * share:.0f} %)" for place, share in enumerate(explained[group], start=1)]
        set_labels(axes, shares[0], shares[1], group)
        axes.margins(0.08)
    _finish(figure, handles, title)
    return figure


def phase_boundaries(repeats: Sequence[int]) -> list[int]:
    """Last layer of each phase but the final one: `(7, 3, 2)` gives `[7, 10]`."""
    return [int(end) for end in np.cumsum(repeats)[:-1]]


def _panels(count: int, height: float, share: bool = True) -> tuple["Figure", list["Axes"]]:
    columns = min(3, count)
    rows = math.ceil(count / columns)
    width = 6.4 if columns == 1 else 3.2 * columns
    figure, grid = new_figure(width, 0.9 + height * rows, shape=(rows, columns), share=share)
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, grid


def _curve(curve: Any, log: bool) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    """Mean and band; what a logarithmic scale cannot show is NaN."""
    is_mapping = isinstance(curve, Mapping)
    values = [to_array(curve[key]) for key in ("mean", "low", "high") if key in curve] if is_mapping else []
    mean, *band = values or [to_array(curve)]
    if log:
        mean, *band = (np.where(part > 0, part, math.nan) for part in (mean, *band))
    return mean, (band[0], band[1]) if len(band) == 2 else None


def _log_scale(axes: "Axes") -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5 of each decade, or at decades alone where there are many."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticker: Any = matplotlib_package().ticker
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _curve_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Those of token groups, and for other names one by their order."""
    others = [name for name in names if name not in GROUP_STYLES]
    return {**GROUP_STYLES, **{name: line_style(index) for index, name in enumerate(others)}}


def _group_style(group: str) -> dict[str, Any]:
    return GROUP_STYLES.get(group) or {"color": GREY, "marker": "P"}


def _finish(figure: "Figure", handles: dict[str, Any], title: str | None) -> None:
    if title:
        figure.suptitle(plain_text(title), fontsize=11, color=INK)
    if PHASE_BOUNDARY in handles:
        handles[PHASE_BOUNDARY] = handles.pop(PHASE_BOUNDARY)  # last
    add_legend(figure, handles)
