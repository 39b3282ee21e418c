"""Pictures of the studies."""

import numpy as np
import pytest

from raptor_hf.study_plots import SCOPE_LABELS, swaps_figure

EFFECTS = {"intra": {1: [0.9, 0.7], 2: [0.8]}, "inter": {1: [0.2, 0.4], 2: []}}


def test_swaps_are_points_with_their_means(tmp_path):
    figure = swaps_figure(EFFECTS, "accuracy", ("untouched", 0.95), title="swaps")
    (axes,) = figure.axes
    points = [collection.get_offsets()[:, 1].tolist() for collection in axes.collections]
    assert points == [[0.9, 0.7], [0.8], [0.2, 0.4]]
    means = [line.get_ydata()[0] for line in axes.lines]
    np.testing.assert_allclose(means, [0.8, 0.8, 0.3, 0.95])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [SCOPE_LABELS["intra"], SCOPE_LABELS["inter"], "untouched"]
    left, right = (collection.get_offsets()[:, 0] for collection in axes.collections[::2])
    assert left.max() < right.min()
    figure.savefig(tmp_path / "swaps.png")
    assert (tmp_path / "swaps.png").stat().st_size > 5000


def test_no_swap_is_named():
    with pytest.raises(ValueError, match=r"effects hold no swap"):
        swaps_figure({"intra": {1: []}}, "accuracy")
