"""Pictures of dense predictions: every map in its place, classes keep their colours, invalid depths are grey."""

import numpy as np
import pytest

from raptor_hf.dense_plots import IGNORED_COLOUR, MAX_NAMED, class_colours, depths_figure, masks_figure

IMAGES = [np.full((4, 6, 3), shade, np.uint8) for shade in (0, 200)]


def shown(figure):
    """Drawn arrays, row by row."""
    return [np.ma.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_colours_of_classes_differ_and_do_not_depend_on_their_number():
    colours = class_colours(150)
    assert colours.shape == (150, 3)
    assert colours.min() >= 0
    assert colours.max() <= 1
    assert len(np.unique(colours.round(3), axis=0)) == 150
    assert np.array_equal(class_colours(7), colours[:7])
    assert np.abs(np.diff(colours, axis=0)).max(axis=1).min() > 0.15  # neighbours are told apart


def test_masks_stand_beside_their_image_in_the_colours_of_their_classes():
    labels = [np.zeros((4, 6), np.uint8), np.full((4, 6), 255, np.uint8)]
    predictions = {"a": [np.full((4, 6), 3), np.full((4, 6), 0)], "b": [np.full((4, 6), 0), np.full((4, 6), 3)]}
    figure = masks_figure(IMAGES, labels, predictions, class_names=["wall", "x", "y", "tree"])
    assert [axes.get_title() for axes in figure.axes[:4]] == ["image", "label", "a", "b"]
    maps, colours = shown(figure), class_colours(4)
    assert np.array_equal(maps[0], IMAGES[0])
    assert np.array_equal(maps[4], IMAGES[1])
    expected = [colours[0], colours[3], colours[0]], [IGNORED_COLOUR, colours[0], colours[3]]
    for row, wanted in enumerate(expected):
        for place, colour in enumerate(wanted):
            assert np.allclose(maps[4 * row + 1 + place], colour)
    assert legend(figure) == ["wall", "tree", "not labelled"]


def test_the_legend_names_the_largest_classes_only():
    mask = np.repeat(np.arange(20), np.arange(1, 21))[None]
    figure = masks_figure([np.zeros((*mask.shape, 3), np.uint8)], [mask], {})
    assert legend(figure) == [f"class {number}" for number in range(19, 19 - MAX_NAMED, -1)]


def test_depths_share_the_scale_of_the_labels():
    labels = [np.linspace(1, 4, 24).reshape(4, 6), np.linspace(2, 9, 24).reshape(4, 6)]
    labels[0][0, 0] = np.nan
    labels[1][0, 0] = 0
    figure = depths_figure(IMAGES, labels, {"a": [np.full((4, 6), 20.0), np.full((4, 6), 3.0)]})
    drawn = [axes.images[0] for axes in figure.axes if axes.images][:6]
    ranges = {image.get_clim() for place, image in enumerate(drawn) if place % 3}
    assert ranges == {(labels[0][0, 1], 9.0)}
    maps = [image.get_array() for image in drawn]
    assert maps[1].mask.sum() == maps[4].mask.sum() == 1
    assert not np.ma.getmaskarray(maps[2]).any()
    assert any(axes.get_ylabel() == "depth (m)" for axes in figure.axes)


@pytest.mark.parametrize("draw", [masks_figure, depths_figure])
def test_maps_must_be_complete(draw):
    label = np.ones((4, 6))
    with pytest.raises(ValueError, match="images are empty; leave this picture out"):
        draw([], [], {})
    with pytest.raises(ValueError, match="a: 1 maps for 2 images; give one per image"):
        draw(IMAGES, [label, label], {"a": [label]})


def test_a_picture_needs_a_valid_depth():
    with pytest.raises(ValueError, match="no label has a valid depth"):
        depths_figure(IMAGES[:1], [np.zeros((4, 6))], {})
