"""Pictures of the studies."""

import numpy as np
import pytest

from raptor_hf.study_plots import SERIES_LABELS, runs_figure, scores_figure, similarities_figure

EFFECTS = {"intra": {1: [0.9, 0.7], 2: [0.8]}, "inter": {1: [0.2, 0.4], 2: []}}


def test_swaps_are_points_with_their_means(tmp_path):
    figure = runs_figure(EFFECTS, "layers replaced", "accuracy", ("untouched", 0.95), title="swaps")
    (axes,) = figure.axes
    points = [collection.get_offsets()[:, 1].tolist() for collection in axes.collections]
    assert points == [[0.9, 0.7], [0.8], [0.2, 0.4]]
    means = [line.get_ydata()[0] for line in axes.lines]
    np.testing.assert_allclose(means, [0.8, 0.8, 0.3, 0.95])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [SERIES_LABELS["intra"], SERIES_LABELS["inter"], "untouched"]
    left, right = (collection.get_offsets()[:, 0] for collection in axes.collections[::2])
    assert left.max() < right.min()
    figure.savefig(tmp_path / "swaps.png")
    assert (tmp_path / "swaps.png").stat().st_size > 5000


def test_no_value_is_named():
    with pytest.raises(ValueError, match=r"values are empty"):
        runs_figure({"intra": {1: []}}, "layers replaced", "accuracy")


def test_scores_and_boundaries(tmp_path):
    stability = {"2": {"3": 1.0}, "3": {"2": 0.25, "3": 0.75}}
    figure = scores_figure({"1": 0.1, "2": 0.8, "3": 0.9, "4": 1.0}, 2, stability, 4, title="teacher")
    left, right = figure.axes[:2]
    np.testing.assert_array_equal(left.lines[0].get_xydata(), [[1, 0.1], [2, 0.8], [3, 0.9], [4, 1.0]])
    np.testing.assert_array_equal(right.images[0].get_array(), [[0, 0, 100], [0, 25, 75]])
    assert sorted(text.get_text() for text in right.texts) == ["100", "25", "75"]
    assert [label.get_text() for label in right.get_yticklabels()] == ["2", "3"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["best partition", "elbow, k = 2"]
    figure.savefig(tmp_path / "scores.png")
    assert (tmp_path / "scores.png").stat().st_size > 5000
    assert len(scores_figure({"1": 0.1, "2": 0.1}, None, {}, 2).axes) == 1
    with pytest.raises(ValueError, match=r"scores are empty"):
        scores_figure({}, None, {}, 4)


def test_similarities_of_models_and_groups_are_one_grid(tmp_path):
    small, large = np.full((2, 2), 0.5) + np.eye(2) / 2, np.full((3, 3), 0.25) + 0.75 * np.eye(3)
    large[0, 1] = np.nan
    models = {"vit": {"all": small, "cls": small, "patch": small}, "ijepa": {"all": large, "patch": large}}
    figure = similarities_figure(models, {"ijepa": [1, 2]}, title="two ViTs")
    panels = figure.axes[:6]
    assert [axes.get_title() for axes in panels] == ["all", "cls", "patch", "", "", ""]
    assert [axes.get_ylabel() for axes in panels] == ["vit\nlayer", "", "", "ijepa\nlayer", "", ""]
    assert [len(axes.images) for axes in panels] == [1, 1, 1, 1, 0, 1]
    assert [text.get_text() for text in panels[4].texts] == ["no cls"]
    np.testing.assert_array_equal(panels[0].images[0].get_array(), small)
    assert panels[3].images[0].get_array().mask.sum() == 1
    assert {axes.images[0].get_clim() for axes in panels if axes.images} == {(0.25, 1.0)}  # one scale of colours
    assert [bool(axes.lines) for axes in panels] == [False, False, False, True, False, True]
    assert figure.axes[6].get_ylabel() == "cosine similarity"
    figure.savefig(tmp_path / "grid.png")
    assert (tmp_path / "grid.png").stat().st_size > 5000
    with pytest.raises(ValueError, match=r"similarity 'cls' of 'a' has shape \(2, 3\); pass square matrices"):
        similarities_figure({"a": {"cls": np.zeros((2, 3))}})
    with pytest.raises(ValueError, match=r"similarities are empty"):
        similarities_figure({"a": {}})
