"""Growth of displacements: linear maps of known exponents, exact derivatives, layouts, what is refused."""

import numpy as np
import pytest
import torch

from raptor_hf.dynamics import MAX_PERIOD, recurrence, tangent_growth
from raptor_hf.tokens import TokenLayout


def frame(count, *shape, seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(size, seed=0):
    return torch.linalg.qr(frame(size, size, seed=seed))[0]


def test_a_linear_map_has_the_logarithms_of_its_eigenvalues():
    basis = rotation(4)
    matrix = basis @ torch.diag(torch.tensor([2.0, 0.5, 1.0, 0.1], dtype=torch.float64)) @ basis.T
    start = frame(2, 1, 4)
    growth = tangent_growth([lambda state: state @ matrix] * 40, start, frame(4, 2, 1, 4, seed=1))
    assert growth.rates.shape == (2, 40, 4)
    expected = torch.tensor([2.0, 1.0, 0.5, 0.1], dtype=torch.float64).log()
    torch.testing.assert_close(growth.rates[:, -1], expected.expand(2, 4), rtol=0, atol=1e-6)
    volume = growth.rates.sum(dim=2)  # a whole frame grows by the determinant, at once
    torch.testing.assert_close(volume, torch.full((2, 40), np.log(0.1), dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(growth.state_growth[:, -1], expected[:1].expand(2), rtol=0, atol=1e-6)
    assert growth.shares == {}


def test_maps_that_differ_and_are_not_linear_agree_with_their_jacobian():
    weights = [rotation(6, seed) * (1 + seed) for seed in range(3)]
    steps = [lambda state, w=weight: state + torch.tanh(state.flatten(1) @ w).view_as(state) for weight in weights]
    start, tangents = frame(2, 2, 3), frame(2, 2, 2, 3, seed=5)
    growth = tangent_growth(steps, start, tangents)

    def whole(flat):
        state = flat.view(1, 2, 3)
        for step in steps:
            state = step(state)
        return state.flatten()

    for image in range(2):
        jacobian = torch.autograd.functional.jacobian(whole, start[image].flatten())
        moved = jacobian @ torch.linalg.qr(tangents[:, image].flatten(1).T)[0]
        lengths = torch.linalg.qr(moved)[1].diagonal().abs().log()
        torch.testing.assert_close(growth.rates[image].sum(dim=0), lengths, rtol=0, atol=1e-10)


def test_rotations_neither_grow_nor_shrink():
    turn = rotation(5)
    growth = tangent_growth([lambda state: state @ turn] * 5, frame(1, 2, 5), frame(3, 1, 2, 5, seed=1))
    assert growth.rates.abs().max() < 1e-12
    assert growth.state_growth.abs().max() < 1e-12


def test_the_first_direction_is_found_in_its_token_group():
    layout = TokenLayout(num_register_tokens=1)
    gains = torch.tensor([1.0, 3.0, 1.0, 1.0], dtype=torch.float64)[:, None]  # the register grows
    growth = tangent_growth([lambda state: state * gains] * 30, frame(2, 4, 3), frame(1, 2, 4, 3, seed=1), layout)
    assert list(growth.shares) == ["cls", "registers", "patch"]
    torch.testing.assert_close(sum(growth.shares.values()), torch.ones(2, 30).double())
    assert growth.shares["registers"][:, -1].min() > 1 - 1e-12


def test_a_flat_map_has_no_growth_left():
    growth = tangent_growth([lambda state: state * 0], frame(1, 2, 3), frame(1, 1, 2, 3, seed=1))
    assert growth.rates.item() == -float("inf")


def test_wrong_frames_are_refused():
    start = frame(2, 4, 3)
    with pytest.raises(ValueError, match=r"tangents of shape \(2, 4, 3\) for states of shape \(2, 4, 3\); pass"):
        tangent_growth([torch.sin], start, start)
    with pytest.raises(ValueError, match="13 tangents for 12 dimensions; use 1 to that many"):
        tangent_growth([torch.sin], start, frame(13, 2, 4, 3))
    with pytest.raises(ValueError, match="no step was given"):
        tangent_growth([], start, frame(1, 2, 4, 3))


def test_rest_cycles_and_neither():
    def path(turn):
        rows = [[np.cos(turn * step), np.sin(turn * step)] for step in range(20)]
        return torch.tensor(rows, dtype=torch.float64)

    thirds, still, slow = path(2 * np.pi / 3), path(0.0), path(0.3)
    states = list(torch.stack([thirds, still, slow, 2 * still], dim=1))
    found = recurrence(states)
    assert found.period.tolist() == [3, 1, 0, 1]
    assert found.return_angle.shape == (MAX_PERIOD, 4)
    np.testing.assert_allclose(found.return_angle[:, 2], [0.3, 0.6, 0.9, 1.2])
    assert found.shares() == {"fixed": 0.5, "cycle": 0.25, "none": 0.25}
    assert recurrence(states, max_period=2).period.tolist() == [0, 1, 0, 1]
    assert recurrence(states, tolerance=0.31).period.tolist() == [3, 1, 1, 1]
    with pytest.raises(ValueError, match="4 states show no period of 4; apply the map 4 times"):
        recurrence(states[:4])
    with pytest.raises(ValueError, match=r"max_period=0, tolerance=0.01: use 1 or more"):
        recurrence(states, max_period=0)
    with pytest.raises(ValueError, match="different shapes"):
        recurrence([*states[:-1], states[-1][:2]])
