"""Pictures of what dense probes predict: masks in the colours of their classes, depths in metres."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import INK, add_legend, matplotlib_package, new_figure, plain_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IGNORED = 255
IGNORED_COLOUR = (0.85, 0.85, 0.85)
MAX_NAMED = 14  # classes in the legend


def class_colours(num_classes: int) -> np.ndarray:
    """Colours `(num_classes, 3)` in 0 .. 1, the same for a class in every picture: hues by the golden ratio, so that
    neighbours in number are far apart, in three saturations and three brightnesses.
    """
    from matplotlib.colors import hsv_to_rgb

    number = np.arange(num_classes)
    hue = np.modf(number * 0.618034)[0]
    saturation, value = np.array([0.9, 0.6, 0.75])[number % 3], np.array([0.9, 0.6, 0.75])[number // 3 % 3]
    return np.asarray(hsv_to_rgb(np.stack([hue, saturation, value], axis=-1)))


def masks_figure(
    images: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    predictions: Mapping[str, Sequence[np.ndarray]],
    *,
    class_names: Sequence[str] | None = None,
) -> "Figure":
    """Image, label and predicted mask of each model, one row per image; the legend names the largest classes.

    Args:
        images: uint8 `(height, width, 3)`.
        labels: classes `(height, width)`, 255 where there is none.
        predictions: by model, as the labels. A prediction is shown everywhere, where there is no label too.
        class_names: by class; `None` numbers them.

    Raises:
        ValueError: if there is no image, or a model has not one prediction per image.
    """
    _check(images, labels, predictions)
    matplotlib_package()
    every = [np.asarray(mask).astype(int) for masks in (labels, *predictions.values()) for mask in masks]
    counts = np.bincount(np.concatenate([mask.ravel() for mask in every]), minlength=IGNORED + 1)
    colours = np.concatenate([class_colours(IGNORED), [IGNORED_COLOUR]])
    columns = {"label": labels, **predictions}
    shown = {name: [colours[np.asarray(mask).astype(int)] for mask in masks] for name, masks in columns.items()}
    figure = _grid(images, shown)[0]
    largest = [int(number) for number in np.argsort(-counts[:IGNORED], kind="stable") if counts[number]]
    from matplotlib.patches import Patch

    names = [_class_name(number, class_names) for number in largest]
    handles = {
        name: Patch(facecolor=tuple(colours[number]))
        for name, number in zip(names[:MAX_NAMED], largest[:MAX_NAMED], strict=True)
    }
    if counts[IGNORED]:
        handles["not labelled"] = Patch(facecolor=IGNORED_COLOUR)
    note = f"the largest {MAX_NAMED} of {len(largest)} classes" if len(largest) > MAX_NAMED else ""
    add_legend(figure, handles, note)
    return figure


def depths_figure(
    images: Sequence[np.ndarray], labels: Sequence[np.ndarray], predictions: Mapping[str, Sequence[np.ndarray]]
) -> "Figure":
    """Image, measured and predicted depth of each model, one row per image, all on one scale of metres.

    Args:
        images: uint8 `(height, width, 3)`.
        labels: metres `(height, width)`, grey where they are not positive and finite. They set the scale.
        predictions: by model, metres as the labels.

    Raises:
        ValueError: as [`masks_figure`], or if no label is valid.
    """
    _check(images, labels, predictions)
    matplotlib = matplotlib_package()
    valid = [np.asarray(label)[np.isfinite(label) & (np.asarray(label) > 0)] for label in labels]
    values = np.concatenate(valid)
    if not len(values):
        raise ValueError("no label has a valid depth; leave this picture out.")
    masked = {
        name: [np.ma.masked_where(~(np.isfinite(depth) & (np.asarray(depth) > 0)), depth) for depth in depths]
        for name, depths in {"label": labels, **predictions}.items()
    }
    colours = matplotlib.colormaps["viridis"].with_extremes(bad=IGNORED_COLOUR)
    look = {"cmap": colours, "vmin": float(values.min()), "vmax": float(values.max())}
    figure, axes, mappable = _grid(images, masked, **look)
    bar = figure.colorbar(mappable, ax=axes, pad=0.01, shrink=0.7, extend="both")
    bar.set_label("depth (m)", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8)
    return figure


def _check(
    images: Sequence[np.ndarray], labels: Sequence[np.ndarray], predictions: Mapping[str, Sequence[np.ndarray]]
) -> None:
    if not len(images):
        raise ValueError("images are empty; leave this picture out.")
    for name, maps in {"label": labels, **predictions}.items():
        if len(maps) != len(images):
            raise ValueError(f"{name}: {len(maps)} maps for {len(images)} images; give one per image.")


def _grid(
    images: Sequence[np.ndarray], columns: Mapping[str, Sequence[Any]], **look: Any
) -> tuple["Figure", list[Any], Any]:
    """Figure with the images at the left and `columns` beside them, its axes, and the last map that was drawn."""
    whole = {"image": images, **columns}
    heights = max(image.shape[0] / image.shape[1] for image in images)
    width = 1.9 if len(whole) < 6 else 1.6
    figure, axes = new_figure(
        width * len(whole) + (0.9 if look else 0.1),
        max(2.2, len(images) * width * heights + 0.4),
        None,
        (len(images), len(whole)),
        False,
    )
    drawn: Any = None
    for place, (name, maps) in enumerate(whole.items()):
        for row, values in enumerate(maps):
            own = axes[row * len(whole) + place]
            drawn = own.imshow(values, interpolation="nearest", **({} if name == "image" and place == 0 else look))
            own.set(xticks=[], yticks=[])
            own.spines[:].set_visible(False)
            if row == 0:
                own.set_title(plain_text(name), fontsize=9, color=INK)
    return figure, axes, drawn


def _class_name(number: int, class_names: Sequence[str] | None) -> str:
    known = class_names is not None and number < len(class_names)
    return class_names[number] if known and class_names is not None else f"class {number}"
