"""Figures are checked through their artists (positions, labels, colours) and as PNG files."""

import json
import math
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image

from raptor_hf import plots

BLOCKS = {"k=2": (7, 5), "k=3": (7, 3, 2)}
CURVES = {"raptor-k2": np.linspace(0.99, 0.7, 12).tolist(), "raptor-k3": np.linspace(0.99, 0.8, 12).tolist()}
CLIPPED = {**CURVES, "untrained": [0.9, 0.4, -0.2, -0.5, -0.51, -14.25, None, -3.0, -0.1, 0.0, 0.1, 0.2]}
BARS = {"teacher": (0.84, None), "raptor-k3": (0.83, 0.001), "broken": (0.03, 0.01)}
HISTORY = [{"step": step, "loss": 2.0 / step, "learning_rate": 1e-4, "epoch": step / 10} for step in range(1, 9)]

FIGURES = {
    "blocks": lambda: plots.blocks_figure(PANELS, {"retained (%)": {"ViT-S": 95.0}}, title="Fig. 7"),
    "similarity": lambda: plots.similarity_figure(similarity(12), BLOCKS, title="phases"),
    "layer_curves": lambda: plots.layer_curves_figure(CLIPPED, "R²", "all tokens", (7, 10), ("ViT-S", 0.6)),
    "token_group": lambda: plots.token_group_figure({"all": CURVES, "cls": CURVES}, "cosine", "groups", (7, 10)),
    "accuracy": lambda: plots.accuracy_figure(BARS, reference_name="teacher", title="top-1"),
    "schedule": lambda: plots.schedule_figure({"k=2": [0] * 7 + [1] * 5}, title="blocks"),
    "history": lambda: plots.history_figure(HISTORY, title="training"),
}


def similarity(num_layers):
    """Random walk of directions: neighbouring layers are alike."""
    states = np.random.default_rng(0).normal(size=(num_layers, 16)).cumsum(axis=0)
    states /= np.linalg.norm(states, axis=1, keepdims=True)
    return states @ states.T


def legend_names(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def legend_note(figure):
    return figure.legends[0].get_title().get_text()


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", FIGURES)
def test_png_has_the_size_that_was_asked_for_and_is_not_blank(name, tmp_path):
    figure = FIGURES[name]()
    figure.savefig(tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.size == tuple(int(inches * 150) for inches in figure.get_size_inches())
        assert len(image.convert("RGB").getcolors(maxcolors=10**6)) > 20
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert (tmp_path / "figure.png").stat().st_size > 5_000
    assert figure.get_layout_engine() is not None


@pytest.mark.parametrize("name", FIGURES)
def test_title_is_shown(name):
    figure = FIGURES[name]()
    title = figure.get_suptitle() or figure.axes[0].get_title()
    assert title == {
        "similarity": "phases", "layer_curves": "all tokens", "token_group": "groups", "accuracy": "top-1",
        "schedule": "blocks", "history": "training", "blocks": "Fig. 7",
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_global_settings_stay_as_they_are(name):
    before = dict(matplotlib.rcParams)
    FIGURES[name]()
    assert dict(matplotlib.rcParams) == before


def test_import_needs_no_matplotlib_and_drawing_needs_no_pyplot():
    code = (
        "import sys\n"
        "from raptor_hf import plots\n"
        "loaded = 'matplotlib' in sys.modules\n"
        "plots.similarity_figure([[1.0, 0.5], [0.5, 1.0]], {'k=2': (1, 1)})\n"
        "print(loaded, 'matplotlib.figure' in sys.modules, 'matplotlib.pyplot' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "True", "False"]


@pytest.mark.parametrize("name", FIGURES)
def test_missing_matplotlib_is_one_line_with_the_remedy(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'^figures need matplotlib; .*pip install "raptor_hf\[analysis\]"$'):
        FIGURES[name]()


def test_similarity_shows_the_matrix_with_layer_one_in_the_corner():
    matrix = similarity(12)
    figure = plots.similarity_figure(matrix)
    (image,) = figure.axes[0].images
    np.testing.assert_array_equal(image.get_array(), matrix)
    assert image.get_extent() == [0.5, 12.5, 12.5, 0.5]
    assert figure.axes[0].get_ylim() == (12.5, 0.5)
    assert list(figure.axes[0].get_xticks()) == list(figure.axes[0].get_yticks()) == list(range(1, 13))
    assert image.get_cmap().name == "viridis"
    assert image.get_clim() == (matrix.min(), 1.0)
    assert figure.axes[1].get_ylabel() == "cosine similarity"
    assert not figure.legends


def test_phase_squares_run_between_layers():
    figure = plots.similarity_figure(similarity(12), BLOCKS)
    two, three = figure.axes[0].lines
    finite = np.isfinite(two.get_xdata())
    corners = list(zip(two.get_xdata()[finite], two.get_ydata()[finite], strict=True))
    assert set(corners) == {(a, b) for low, high in ((0.5, 7.5), (7.5, 12.5)) for a in (low, high) for b in (low, high)}
    assert set(three.get_xdata()[np.isfinite(three.get_xdata())]) == {0.5, 7.5, 10.5, 12.5}
    assert two.get_linewidth() > three.get_linewidth() > 0
    assert two.get_zorder() == three.get_zorder()
    assert two.get_color() != three.get_color()
    assert legend_names(figure) == ["k=2: 7 | 5", "k=3: 7 | 3 | 2"]


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (1, [1]),
        (12, list(range(1, 13))),
        (16, list(range(1, 17))),
        (24, list(range(2, 25, 2))),
        (48, [1, *range(4, 49, 4)]),
    ],
)
def test_layer_ticks_stay_readable(num_layers, expected):
    assert plots.layer_ticks(num_layers) == expected


def test_similarity_takes_tensors_of_low_precision_and_missing_values():
    matrix = torch.tensor(similarity(4)).to(torch.bfloat16)
    shown = plots.similarity_figure(matrix).axes[0].images[0].get_array()
    np.testing.assert_array_equal(shown, matrix.double().numpy())
    rows = matrix.double().tolist()
    rows[0][1] = None
    assert plots.similarity_figure(rows).axes[0].images[0].get_array().mask.sum() == 1


@pytest.mark.parametrize(
    ("matrix", "partitions", "message"),
    [
        ([[1.0, 0.5]], {}, r"similarity has shape \(1, 2\); pass one square matrix"),
        ([1.0], {}, r"similarity has shape \(1,\)"),
        (np.eye(3), {"k=2": (1, 1)}, r"partition 'k=2' = \(1, 1\); lengths must add up to the 3 layers"),
        (np.eye(3), {"k=2": (3, 0)}, r"partition 'k=2' = \(3, 0\)"),
    ],
)
def test_similarity_refuses_what_it_cannot_draw(matrix, partitions, message):
    with pytest.raises(ValueError, match=message):
        plots.similarity_figure(matrix, partitions)


def test_curves_have_one_line_each_over_the_layers():
    figure = plots.layer_curves_figure(CURVES, "R²")
    (axes,) = figure.axes
    assert len(axes.lines) == 2
    for line, curve in zip(axes.lines, CURVES.values(), strict=True):
        assert line.get_xdata().tolist() == list(range(1, 13))
        assert line.get_ydata().tolist() == curve
    assert list(axes.get_xticks()) == list(range(1, 13))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer", "R²")
    assert legend_names(figure) == list(CURVES)
    low, high = axes.get_ylim()
    assert 0.6 < low < 0.7
    assert 1.0 < high < 1.1
    assert legend_note(figure) == ""
    assert not axes.collections


def test_every_curve_looks_different():
    lines = plots.layer_curves_figure({f"model {i}": [0.1 * i] * 3 for i in range(9)}, "R²").axes[0].lines
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == 9
    assert len({line.get_color() for line in lines[:7]}) == len({line.get_marker() for line in lines[:7]}) == 7


def test_values_far_below_zero_are_marked_and_told_not_drawn_to_scale():
    figure = plots.layer_curves_figure(CLIPPED, "R²")
    (axes,) = figure.axes
    assert axes.get_ylim()[0] == -0.5
    (marks,) = axes.collections
    assert marks.get_offsets().tolist() == [[5, -0.5], [6, -0.5], [8, -0.5]]
    assert to_hex(marks.get_facecolor()[0]) == to_hex(axes.lines[2].get_color())
    assert legend_note(figure) == "triangles on the axis: 3 below −0.5, not to scale; lowest −14.25"
    assert np.isnan(axes.lines[2].get_ydata()[6])
    np.testing.assert_array_equal(axes.lines[2].get_ydata()[[5, 7]], [-14.25, -3.0])


@pytest.mark.parametrize("curve", [[-5.0, -7.0], [0.3, 0.3], [-0.5, 0.2], [3.0, 12.0]])
def test_any_curve_leaves_a_proper_axis(curve):
    low, high = plots.layer_curves_figure({"model": curve}, "value").axes[0].get_ylim()
    assert -0.5 <= low < high
    assert high > max(curve)


def test_phase_boundaries_and_reference_are_lines_with_a_name():
    figure = plots.layer_curves_figure(CURVES, "R²", boundaries=(7, 10), reference=("ViT-S", 0.2))
    lines = figure.axes[0].lines
    vertical = [line.get_xdata()[0] for line in lines if list(line.get_ydata()) == [0, 1]]
    horizontal = [line.get_ydata()[0] for line in lines if list(line.get_xdata()) == [0, 1]]
    assert vertical == [7.5, 10.5]
    assert horizontal == [0.2]
    assert figure.axes[0].get_ylim()[0] < 0.2
    assert legend_names(figure) == [*CURVES, "phase boundary", "ViT-S"]


def test_names_are_shown_as_they_are():
    figure = plots.layer_curves_figure({"_private": [0.1, 0.2], "a$x^2$b": [0.3, 0.4]}, "R²")
    assert legend_names(figure) == ["_private", r"a\$x^2\$b"]
    figure.draw_without_rendering()


@pytest.mark.parametrize("curves", [{}, {"model": []}, {"model": [None, float("nan")]}])
def test_curves_without_a_value_are_refused(curves):
    with pytest.raises(ValueError, match=r"curves of \[.*\] hold no finite value; leave such a picture out"):
        plots.layer_curves_figure(curves, "R²")


def test_token_groups_share_scale_and_colours():
    groups = {"all": CLIPPED, "cls": CURVES, "registers": {"raptor-k3": CURVES["raptor-k3"]}, "patch": CURVES}
    figure = plots.token_group_figure(groups, "R²", boundaries=(7,))
    assert [axes.get_title() for axes in figure.axes] == list(groups)
    assert len({axes.get_ylim() for axes in figure.axes}) == len({axes.get_xlim() for axes in figure.axes}) == 1
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == (2, 2)
    assert [len(axes.lines) for axes in figure.axes] == [4, 3, 2, 3]
    assert figure.axes[2].lines[0].get_color() == figure.axes[0].lines[1].get_color()
    assert legend_names(figure) == [*CLIPPED, "phase boundary"]
    assert legend_note(figure).startswith("triangles on the axis: 3 below −0.5")
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "layer", "layer"]
    assert figure.get_supylabel() == "R²"


def test_three_token_groups_stand_in_one_row_and_five_leave_no_empty_axes():
    three = plots.token_group_figure(dict.fromkeys("abc", CURVES), "R²")
    assert three.axes[0].get_subplotspec().get_gridspec().get_geometry() == (1, 3)
    assert [axes.get_xlabel() for axes in three.axes] == ["layer"] * 3
    five = plots.token_group_figure(dict.fromkeys("abcde", CURVES), "R²")
    assert [axes.get_visible() for axes in five.axes] == [True] * 5 + [False]


def test_token_groups_refuse_nothing_to_draw():
    with pytest.raises(ValueError, match="groups is empty; pass at least one token group"):
        plots.token_group_figure({}, "R²")


def test_accuracy_starts_at_zero_with_values_whiskers_and_retained_shares():
    figure = plots.accuracy_figure(BARS, reference_name="teacher")
    (axes,) = figure.axes
    assert [bar.get_x() for bar in axes.patches] == [0, 0, 0]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([84, 83, 3])
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlabel() == "top-1 accuracy (%)"
    assert "axis break" not in [line.get_gid() for line in axes.lines]
    assert texts(axes) == [
        "84.00", "reference", "83.00 ± 0.10", "98.8 % retained", "3.00 ± 1.00  (3.6 % retained)",
    ]  # fmt: skip
    whiskers = [container for container in axes.containers if hasattr(container, "has_xerr")]
    ends = [whisker.lines[2][0].get_segments()[0][:, 0].tolist() for whisker in whiskers]
    assert np.allclose(ends, [[82.9, 83.1], [2.0, 4.0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(BARS)
    assert axes.get_ylim() == (2.5, -0.5)
    assert all(0 <= tick <= 84.1 for tick in axes.get_xticks())
    colours = [to_hex(bar.get_facecolor()) for bar in axes.patches]
    assert colours[0] != colours[1] == colours[2]


def test_accuracy_starts_later_only_where_all_are_high_and_says_so():
    high = {"teacher": (0.846, None), "raptor-k3": (0.83, 0.001)}
    (axes,) = plots.accuracy_figure(high, "mIoU (%)", "teacher").axes
    assert axes.get_xlim()[0] == 75.0
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx([84.6, 83.0])
    assert axes.get_xlabel() == "mIoU (%) – axis starts at 75 %, not at 0"
    assert [line.get_gid() for line in axes.lines].count("axis break") == 1
    (axes,) = plots.accuracy_figure({**high, "raptor-k2": (0.81, 0.02)}).axes
    assert axes.get_xlim()[0] == 0.0


def test_measured_retained_shares_come_first():
    (axes,) = plots.accuracy_figure(BARS, retained={"raptor-k3": 0.9, "broken": None}).axes
    assert texts(axes) == ["84.00", "83.00 ± 0.10", "90.0 % retained", "3.00 ± 1.00"]
    (axes,) = plots.accuracy_figure({"teacher": (0.0, float("nan")), "other": (0.5, 0.0)}, "", "teacher").axes
    assert texts(axes) == ["0.00  (reference)", "50.00"]


@pytest.mark.parametrize(
    ("bars", "reference", "message"),
    [
        ({}, None, "bars is empty; pass at least one model"),
        ({"k=3": (83.0, 0.1)}, None, r"accuracies \{'k=3': 83.0\} are outside 0..1; pass fractions, not percent"),
        ({"k=3": (float("nan"), None)}, None, "outside 0..1"),
        ({"k=3": (0.8, None)}, "teacher", r"reference_name='teacher' is no bar; use one of 'k=3'"),
    ],
)
def test_accuracy_refuses_what_it_cannot_draw(bars, reference, message):
    with pytest.raises(ValueError, match=message):
        plots.accuracy_figure(bars, reference_name=reference)


PANELS = {"retained (%)": {"Top-1": {3: 98.0, 2: 96.0}, "mIoU": {3: 90.0}}, "R²": {"last layer": {2: 0.6, 4: 0.9}}}


def test_values_against_the_number_of_blocks():
    figure = plots.blocks_figure(PANELS, {"retained (%)": {"ViT-S": 95.0}})
    left, right = figure.axes
    assert [line.get_xydata().tolist() for line in left.lines[:2]] == [[[2, 96], [3, 98]], [[3, 90]]]
    assert left.lines[2].get_ydata() == [95.0, 95.0]
    assert right.lines[0].get_xydata().tolist() == [[2, 0.6], [4, 0.9]]
    assert (left.get_xticks().tolist(), right.get_xticks().tolist()) == ([2, 3], [2, 4])
    assert (left.get_ylabel(), right.get_ylabel()) == ("retained (%)", "R²")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Top-1", "mIoU", "ViT-S", "last layer"]
    assert left.lines[2].get_color() == plots.INK
    (named,) = plots.blocks_figure({"r": PANELS["R²"]}, {"r": {"random: last layer": 0.1}}).axes
    assert named.lines[1].get_color() == named.lines[0].get_color()
    assert len(plots.blocks_figure({**PANELS, "empty": {}}).axes) == 2
    with pytest.raises(ValueError, match=r"no finite value"):
        plots.blocks_figure({"R²": {"a": {2: math.nan}}})


def test_schedule_writes_the_block_into_a_cell_per_layer():
    schedules = {"k=3": [0] * 7 + [1] * 3 + [2] * 2, "shuffled": [0, 1, 0, 1, 2, 2, 0, 0, 1, 0, 2, 1]}
    (axes,) = plots.schedule_figure(schedules).axes
    assert texts(axes) == [str(block) for schedule in schedules.values() for block in schedule]
    assert [text.get_position() for text in axes.texts] == [(layer, row) for row in (0, 1) for layer in range(1, 13)]
    assert [bar.get_x() for bar in axes.patches] == [layer - 0.5 for layer in range(1, 13)] * 2
    colours = {(text, to_hex(bar.get_facecolor())) for text, bar in zip(texts(axes), axes.patches, strict=True)}
    assert len(colours) == len({colour for _, colour in colours}) == 3
    assert [label.get_text() for label in axes.get_yticklabels()] == list(schedules)
    assert axes.get_ylim() == (1.5, -0.5)


def test_schedule_of_many_blocks_has_a_colour_for_each():
    (axes,) = plots.schedule_figure({"teacher": range(48), "k=2": [0] * 30 + [1] * 18}).axes
    assert len({to_hex(bar.get_facecolor()) for bar in axes.patches[:48]}) == 48
    assert list(axes.get_xticks()) == [1, *range(4, 49, 4)]


@pytest.mark.parametrize("schedules", [{}, {"k=1": []}])
def test_schedule_refuses_nothing_to_draw(schedules):
    with pytest.raises(ValueError, match="has nothing to draw; pass one block number per layer"):
        plots.schedule_figure(schedules)


def test_history_draws_the_losses_by_step():
    history = [*HISTORY, {"step": 8, "eval_loss": 0.3}, {"step": 8, "train_loss": 1.0, "train_runtime": 2.0}]
    (axes,) = plots.history_figure(history).axes
    loss, evaluation = axes.lines
    assert loss.get_xdata().tolist() == list(range(1, 9))
    assert loss.get_ydata().tolist() == [2.0 / step for step in range(1, 9)]
    assert evaluation.get_xdata().tolist() == [8]
    assert axes.get_yscale() == "linear"
    assert plots.history_keys(history) == ["loss", "eval_loss"]
    assert plots.history_keys([{"step": 1, "r2": 0.5, "eval_runtime": 1.0, "note": "x", "flag": True}]) == ["r2"]
    assert plots.history_keys([]) == []


def test_history_of_chosen_keys_and_scale():
    figure = plots.history_figure(HISTORY, ["learning_rate", "absent"], log_scale=True)
    assert legend_names(figure) == ["learning_rate"]
    assert figure.axes[0].get_ylabel() == "learning_rate"
    assert figure.axes[0].get_yscale() == "log"
    steep = [{"step": step, "loss": 10.0**-step} for step in range(4)]
    assert plots.history_figure(steep).axes[0].get_yscale() == "log"
    assert plots.history_figure(steep, log_scale=False).axes[0].get_yscale() == "linear"


@pytest.mark.parametrize(
    ("second", "steps"),
    [([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.9}], [9, 10]), ([{"step": 9, "loss": 1.0, "stage": "b"}], [9])],
    ids=["steps start again", "steps are counted through"],
)
def test_stages_follow_each_other_behind_a_dotted_line(second, steps):
    first = [{**entry, "stage": "a"} for entry in HISTORY] if "stage" in second[0] else HISTORY
    (axes,) = plots.history_figure([*first, *second]).axes
    line, boundary = axes.lines
    assert line.get_xdata().tolist() == [*range(1, 9), *steps]
    assert boundary.get_xdata()[0] == 8
    assert axes.get_xlabel() == "optimiser step, stages one after the other"


def test_long_histories_have_no_markers():
    history = [{"step": step, "loss": 1.0 + step} for step in range(50)]
    assert plots.history_figure(history).axes[0].lines[0].get_marker() == ""
    assert plots.history_figure(history[:10]).axes[0].lines[0].get_marker() == "o"


def test_history_read_back_from_json_skips_missing_values():
    history = json.loads('[{"step": 1, "loss": null}, {"step": 2, "loss": 0.5}]')
    assert plots.history_figure(history).axes[0].lines[0].get_xdata().tolist() == [2]


def test_history_refuses_what_it_cannot_draw():
    with pytest.raises(ValueError, match=r"history of 8 entries has no number to draw for keys=\['nothing'\]"):
        plots.history_figure(HISTORY, ["nothing"])
    with pytest.raises(ValueError, match="log_scale=True with the value -1; logarithms need > 0, use log_scale=False"):
        plots.history_figure([{"step": 1, "loss": -1.0}], log_scale=True)
