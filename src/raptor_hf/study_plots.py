"""Pictures of the studies, from plain numbers, as those of `plots`."""

from collections.abc import Mapping, Sequence
from statistics import fmean
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
from .plots import phase_squares
from .tokens import TOKEN_GROUPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES_LABELS = {
    "intra": "by a layer of the same phase",
    "inter": "by a layer of another phase",
    "given": "by a given layer",
}


def runs_figure(
    values: Mapping[str, Mapping[int, Sequence[float]]],
    xlabel: str,
    ylabel: str,
    reference: tuple[str, float] | None = None,
    *,
    title: str | None = None,
) -> "Figure":
    """One point per run or swap, and their means as bars, side by side (arXiv 2512.19941, Fig. 3 and Fig. 15).

    Args:
        values (mapping of series to mapping of number to values): for example accuracies by kind of swap and number of
            layers replaced.
        xlabel, ylabel (`str`): names of number and value, with unit.
        reference (name and value, *optional*): a dashed line, such as the untouched model.

    Raises:
        ValueError: if there is no value.
    """
    numbers = sorted({number for groups in values.values() for number, part in groups.items() if len(part)})
    if not numbers:
        raise ValueError("values are empty; leave this picture out.")
    figure, (axes,) = new_figure(6.4, 4.2, "y")
    handles: dict[str, Any] = {}
    width = 0.8 / len(values)
    for index, (series, groups) in enumerate(values.items()):
        for number, part in groups.items():
            if not len(part):
                continue
            place = numbers.index(number) + (index - (len(values) - 1) / 2) * width
            # Points side by side, in an order that depends on nothing but their number.
            spread = width * 0.8 * (np.modf(np.arange(len(part)) * 0.618034)[0] - 0.5)
            look: dict[str, Any] = {"s": 14, "alpha": 0.45, "linewidths": 0, "marker": MARKERS[index]}
            axes.scatter(place + spread, to_array(part), color=COLOURS[index], **look)
            ends = (place - width * 0.42, place + width * 0.42)
            mean = fmean(part)
            (line,) = axes.plot(ends, (mean, mean), color=COLOURS[index], linewidth=2.4, zorder=3)
            handles[SERIES_LABELS.get(series, series)] = line
    if reference is not None:
        line = axes.axhline(reference[1], color=INK, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
        handles[reference[0]] = line
    axes.set(xticks=range(len(numbers)), xlim=(-0.5, len(numbers) - 0.5))
    axes.set_xticklabels([str(number) for number in numbers])
    set_labels(axes, xlabel, ylabel, title)
    add_legend(figure, handles)
    return figure


def similarities_figure(
    similarities: Mapping[str, Mapping[str, Any]],
    partitions: Mapping[str, Sequence[int]] | None = None,
    *,
    title: str | None = None,
) -> "Figure":
    """Heat maps of the layer-layer similarity, a row for each model and a column for each token group, with the phases
    as squares on the diagonal (arXiv 2512.19941, Fig. 1). All share one scale of colours.

    Args:
        similarities (mapping of model to mapping of group to `(num_layers, num_layers)`): from
            [`~raptor_hf.similarity.layer_similarities`]; where a model lacks a group, its place says so.
        partitions (mapping of model to sequence of int, *optional*): layers per phase.

    Raises:
        ValueError: if there is no matrix, one is not square, or phases do not add up to a model's layers.
    """
    matrices = {
        (model, group): to_array(matrix) for model, groups in similarities.items() for group, matrix in groups.items()
    }
    for (model, group), matrix in matrices.items():
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise ValueError(f"similarity {group!r} of {model!r} has shape {matrix.shape}; pass square matrices.")
    columns = [group for group in ("all", *TOKEN_GROUPS) if any(name == group for _, name in matrices)]
    if not columns:
        raise ValueError("similarities are empty; leave this picture out.")
    figure, panels = new_figure(
        0.9 + 2.1 * len(columns), 0.5 + 2.1 * len(similarities), None, (len(similarities), len(columns)), share=False
    )
    colour_map = matplotlib_package().colormaps["viridis"].with_extremes(bad="#bdbdbd")
    images: list[Any] = []
    lowest = min((float(np.nanmin(matrix)) for matrix in matrices.values() if np.isfinite(matrix).any()), default=0.0)
    for place, axes in enumerate(panels):
        model, group = list(similarities)[place // len(columns)], columns[place % len(columns)]
        first_row, first_column = place < len(columns), place % len(columns) == 0
        below = "layer" if place >= len(panels) - len(columns) else ""
        set_labels(axes, below, plain_text(model) + "\nlayer" if first_column else "", group if first_row else None)
        if (model, group) not in matrices:
            axes.set_axis_off()
            axes.text(0.5, 0.5, f"no {group}", ha="center", va="center", fontsize=9, color=GREY)
            continue
        matrix = matrices[model, group]
        edges = (0.5, len(matrix) + 0.5)
        extent = (*edges, *edges[::-1])
        shown = np.ma.masked_invalid(matrix)
        images.append(axes.imshow(shown, cmap=colour_map, vmin=lowest, vmax=1.0, extent=extent))
        ticks = layer_ticks(len(matrix))
        axes.set(xticks=ticks, yticks=ticks)
        if partitions and model in partitions:
            phase_squares(axes, {"phases": partitions[model]}, len(matrix))
        axes.set(xlim=edges, ylim=edges[::-1])
    bar = figure.colorbar(images[0], ax=panels, pad=0.02, aspect=15 * len(similarities))
    bar.set_label("cosine similarity", fontsize=10, color=INK)
    bar.ax.tick_params(labelsize=9, color=GREY, labelcolor=INK)
    bar.outline.set_visible(False)
    if title:
        figure.suptitle(plain_text(title), fontsize=11, color=INK)
    return figure


def scores_figure(
    scores: Mapping[str, float],
    elbow: int | None,
    stability: Mapping[str, Mapping[str, float]],
    num_layers: int,
    *,
    title: str | None = None,
) -> "Figure":
    """Score against the number of blocks, and how often each boundary is found (arXiv 2512.19941, Fig. 2, App. B).

    Args:
        scores (mapping of `k` as text to float), elbow (`int`, *optional*): from `studies.partition_scores`.
        stability (mapping of `k` to mapping of layer to share): from `studies.boundary_stability`; may be empty.
        num_layers (`int`): `L`.

    Raises:
        ValueError: if there is no score.
    """
    if not scores:
        raise ValueError("scores are empty; leave this picture out.")
    figure, grid = new_figure(9.6 if stability else 6.4, 4.0, shape=(1, 2 if stability else 1), share=False)
    counts = [int(count) for count in scores]
    handles: dict[str, Any] = {}
    (handles["best partition"],) = grid[0].plot(counts, to_array(list(scores.values())), **line_style(0))
    if elbow is not None:
        style: dict[str, Any] = {"color": COLOURS[1], "linestyle": ":", "linewidth": 1.6}
        handles[f"elbow, k = {elbow}"] = grid[0].axvline(elbow, **style)
    grid[0].set_xticks(layer_ticks(len(counts)))
    set_labels(grid[0], "blocks", "score of the partition", None)
    if stability:
        table = np.array(
            [[shares.get(str(layer), 0.0) for layer in range(1, num_layers)] for shares in stability.values()]
        )
        image = grid[1].imshow(100 * table, cmap="Blues", vmin=0.0, vmax=100.0, aspect="auto", origin="lower")
        for row, column in zip(*np.nonzero(table >= 0.005), strict=True):
            colour = "white" if table[row, column] > 0.55 else INK
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            grid[1].text(column, row, f"{100 * table[row, column]:.0f}", color=colour, **place)
        bar = figure.colorbar(image, ax=grid[1], pad=0.02)
        bar.set_label("share of resamples (%)", fontsize=9, color=INK)
        ticks = layer_ticks(num_layers - 1)
        grid[1].set(xticks=[tick - 1 for tick in ticks], yticks=range(len(stability)))
        grid[1].set_xticklabels([str(tick) for tick in ticks])
        grid[1].set_yticklabels(list(stability))
        grid[1].grid(False)
        set_labels(grid[1], "phase ends behind layer", "blocks", None)
    if title:
        figure.suptitle(plain_text(title), fontsize=11, color=INK)
    add_legend(figure, handles)
    return figure
