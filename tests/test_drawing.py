"""What all pictures share."""

import math

import numpy as np
import pytest
import torch

from raptor_hf.drawing import COLOURS, is_finite, line_style, new_figure, plain_text, to_array


def test_axes_share_their_scales_unless_told_otherwise():
    for share in (True, False):
        _, (first, second) = new_figure(4, 3, shape=(1, 2), share=share)
        first.plot([0, 5], [0, 7])
        assert (second.get_ylim() == first.get_ylim()) is share


def test_many_lines_have_their_own_looks():
    looks = [(style["color"], style["linestyle"]) for style in map(line_style, range(28))]
    assert len(set(looks)) == 28
    assert looks[0][0] == COLOURS[0]


@pytest.mark.parametrize("values", [[1, None, 2.5], torch.tensor([1, math.nan, 2.5]), np.array([1, np.nan, 2.5])])
def test_arrays_of_anything(values):
    np.testing.assert_array_equal(to_array(values), [1.0, np.nan, 2.5])


def test_small_questions():
    assert all(map(is_finite, (1, 0.5, np.float32(2))))
    assert not any(map(is_finite, (True, math.nan, "1", None)))
    assert plain_text("cost $5") == r"cost \$5"
