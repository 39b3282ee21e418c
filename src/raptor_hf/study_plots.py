"""Pictures of the studies, from plain numbers, as those of `plots`."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import COLOURS, INK, MARKERS, add_legend, new_figure, set_labels, to_array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCOPE_LABELS = {
    "intra": "by a layer of the same phase",
    "inter": "by a layer of another phase",
    "given": "by a given layer",
}


def swaps_figure(
    effects: Mapping[str, Mapping[int, Sequence[float]]],
    ylabel: str,
    reference: tuple[str, float] | None = None,
    *,
    title: str | None = None,
) -> "Figure":
    """What replacing layers does: one point per swap, and their means as bars (arXiv 2512.19941, Fig. 15).

    Args:
        effects (mapping of scope to mapping of number of replaced layers to values): accuracies or cosines.
        ylabel (`str`): name and unit of the value.
        reference (name and value, *optional*): of the untouched model, a dashed line.

    Raises:
        ValueError: if there is no value.
    """
    numbers = sorted({number for groups in effects.values() for number, values in groups.items() if len(values)})
    if not numbers:
        raise ValueError("effects hold no swap; leave this picture out.")
    figure, (axes,) = new_figure(6.4, 4.2, "y")
    handles: dict[str, Any] = {}
    width = 0.8 / len(effects)
    for index, (scope, groups) in enumerate(effects.items()):
        for number, values in groups.items():
            if not len(values):
                continue
            place = numbers.index(number) + (index - (len(effects) - 1) / 2) * width
            # Points side by side, in an order that depends on nothing but their number.
            spread = width * 0.8 * (np.modf(np.arange(len(values)) * 0.618034)[0] - 0.5)
            look: dict[str, Any] = {"s": 14, "alpha": 0.45, "linewidths": 0, "marker": MARKERS[index]}
            axes.scatter(place + spread, to_array(values), color=COLOURS[index], **look)
            ends = (place - width * 0.42, place + width * 0.42)
            mean = fmean(values)
            (line,) = axes.plot(ends, (mean, mean), color=COLOURS[index], linewidth=2.4, zorder=3)
            handles[SCOPE_LABELS.get(scope, scope)] = line
    if reference is not None:
        line = axes.axhline(reference[1], color=INK, linestyle=(0, (5, 3)), linewidth=1.2, zorder=1)
        handles[reference[0]] = line
    axes.set(xticks=range(len(numbers)), xlim=(-0.5, len(numbers) - 0.5))
    axes.set_xticklabels([str(number) for number in numbers])
    set_labels(axes, "layers replaced", ylabel, title)
    add_legend(figure, handles)
    return figure
