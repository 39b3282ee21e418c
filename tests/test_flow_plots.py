"""Pictures of the flow: what is drawn is what was given, in the colours of the groups."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from raptor_hf.flow_plots import GROUP_STYLES, eigenvalue_figure, flow_figure, path_figure, phase_boundaries

CURVES = {"cls": [0.1, 0.2, 0.3], "patch": {"mean": [1, 2, 3], "low": [0.5, 1, 2], "high": [1.5, 3, 4]}}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def line_of(axes, group):
    return next(line for line in axes.lines if to_hex(line.get_color()) == to_hex(GROUP_STYLES[group]["color"]))


@pytest.mark.parametrize(("of_states", "first"), [(True, 0), (False, 1)])
def test_curves_stand_at_their_layers(of_states, first):
    figure = flow_figure({"teacher": CURVES}, "speed", {"teacher": [1]}, of_states=of_states)
    (axes,) = figure.axes
    expected = [[first, 0.1], [first + 1, 0.2], [first + 2, 0.3]]
    np.testing.assert_array_equal(line_of(axes, "cls").get_xydata(), expected)
    np.testing.assert_array_equal(line_of(axes, "patch").get_ydata(), [1, 2, 3])
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (0.5, 4)
    assert legend(figure) == ["cls", "patch", "phase boundary"]
    assert any(list(line.get_xdata()) == [1.5, 1.5] for line in axes.lines)
    assert axes.get_xlabel() == ("state" if of_states else "layer")


def test_curves_of_other_names_and_axes():
    figure = flow_figure({"a": {"direction 1": [1, 2], "direction 2": [2, 3]}}, "growth", xlabel="applications")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "applications"
    assert legend(figure) == ["direction 1", "direction 2"]
    assert len({line.get_color() for line in axes.lines}) == 2


@pytest.mark.parametrize(
    ("length", "of_states", "ticks"),
    [
        (4, True, [0, 1, 2, 3]), (33, True, [0, 4, 8, 12, 16, 20, 24, 28, 32]), (25, True, [0, *range(2, 25, 2)]),
        (32, False, [1, 4, 8, 12, 16, 20, 24, 28, 32]),
    ],
)  # fmt: skip
def test_ticks_of_long_axes_do_not_touch(length, of_states, ticks):
    (axes,) = flow_figure({"a": {"cls": [1.0] * length}}, "speed", of_states=of_states).axes
    assert list(axes.get_xticks()) == ticks


def test_models_stand_side_by_side_on_one_scale_and_four_in_two_rows():
    figure = flow_figure({"a": CURVES, "b": {"registers": [5, None, 9]}}, "norm", title="flow")
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert math.isnan(line_of(figure.axes[1], "registers").get_ydata()[1])
    assert figure.get_suptitle() == "flow"
    four = flow_figure({name: CURVES for name in "abcd"}, "norm")
    assert [axes.get_visible() for axes in four.axes] == [True] * 4 + [False] * 2


def test_a_logarithmic_scale_has_plain_numbers_and_gaps_for_zeros():
    figure = flow_figure({"a": {"cls": [0, 3, 40]}}, "rank", log=True)
    (axes,) = figure.axes
    assert math.isnan(line_of(axes, "cls").get_ydata()[0])
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {"5", "10", "20"} <= set(labels)
    with pytest.raises(ValueError, match=r"curves of \['a'\] hold no value to draw"):
        flow_figure({"a": {"cls": [0, 0]}}, "rank", log=True)
    with pytest.raises(ValueError, match=r"hold no value to draw"):
        flow_figure({}, "rank")


def test_eigenvalues_lie_in_the_plane_with_the_unit_circle():
    figure = eigenvalue_figure({"a": {"cls": [[1, 0], [0.5, 0.5]], "patch": [[0.9, -1.5]]}})
    (axes,) = figure.axes
    np.testing.assert_array_equal(axes.collections[0].get_offsets(), [[1, 0], [0.5, 0.5]])
    assert to_hex(axes.collections[0].get_edgecolor()[0]) == to_hex(GROUP_STYLES["cls"]["color"])
    assert axes.patches[0].radius == 1
    assert axes.get_ylim()[0] < -1.5
    assert axes.get_aspect() == 1
    with pytest.raises(ValueError, match=r"hold no eigenvalue"):
        eigenvalue_figure({"a": {"cls": []}})


def test_paths_start_open_end_filled_and_mark_phases():
    base, late = [[0, 0], [1, 0], [1, 1], [2, 2]], [[5, 0], [2, 2]]
    figure = path_figure({"cls": {"base": base, "perturbed": late}}, {"cls": [0.75, 0.2]}, [1])
    (axes,) = figure.axes
    lines = [line.get_xydata().tolist() for line in axes.lines]
    assert lines == [base, [[0, 0]], [[2, 2]], [[1, 0]], late, [[5, 0]], [[2, 2]], []]
    assert [axes.get_xlabel(), axes.get_ylabel()] == ["PC1 (75 %)", "PC2 (20 %)"]
    assert axes.lines[1].get_markerfacecolor() == "white"
    assert legend(figure) == ["base", "perturbed"]
    with pytest.raises(ValueError, match=r"groups hold no path"):
        path_figure({}, {})


def test_boundaries_are_the_last_layers_of_phases():
    assert phase_boundaries((7, 3, 2)) == [7, 10]
    assert phase_boundaries((12,)) == []


def test_pictures_are_not_blank(tmp_path):
    for index, figure in enumerate([
        flow_figure({"a": CURVES}, "speed"),
        eigenvalue_figure({"a": {"cls": [[1, 0]]}}),
        path_figure({"cls": {"base": [[0, 0], [1, 1]]}}, {"cls": [1, 0]}),
    ]):  # fmt: skip
        figure.savefig(tmp_path / f"{index}.png")
        assert (tmp_path / f"{index}.png").stat().st_size > 5000
