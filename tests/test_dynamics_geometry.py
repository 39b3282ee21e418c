"""Angles, ranks and coherence against closed forms, high precision and SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from raptor_hf.dynamics import (
    angle,
    angular_speed,
    angular_updates,
    coherence,
    directional_convergence,
    effective_rank,
    normalise,
    singular_spectrum,
    spectrum_of_gram,
    stable_rank,
)


@pytest.mark.parametrize("theta", [0.0, 1e-12, 1e-7, 0.3, math.pi / 2, 2.0, math.pi - 1e-7, math.pi - 1e-12, math.pi])
def test_angles_keep_their_digits_at_both_ends(theta):
    first = torch.tensor([2.0, 0.0], dtype=torch.float64)
    second = 5 * torch.tensor([math.cos(theta), math.sin(theta)], dtype=torch.float64)
    assert float(angle(first, second)) == pytest.approx(theta, rel=1e-9, abs=1e-15)
    assert float(angle(second, first)) == float(angle(first, second))


def test_a_zero_vector_is_at_right_angles_and_the_same_as_itself():
    zero, other = torch.zeros(3), torch.tensor([1.0, 2, 3])
    assert float(angle(zero, other)) == pytest.approx(math.pi / 2)
    assert float(angle(zero, zero)) == 0
    assert not normalise(zero).any()


@pytest.mark.parametrize("speed", [1e-3, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_rotation_has_its_speed(speed, dtype):
    phases = speed * torch.arange(8, dtype=torch.float64)
    states = torch.stack([phases.cos(), phases.sin(), torch.zeros(8)], dim=1).reshape(8, 1, 1, 3).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-7, torch.bfloat16: 8e-3}[dtype]
    speeds = angular_speed(states)
    assert speeds.shape == (7, 1, 1)
    assert speeds.dtype == torch.float64
    torch.testing.assert_close(speeds, torch.full_like(speeds, speed), atol=tolerance, rtol=0)
    expected = torch.cos(phases[-1] - phases).reshape(8, 1, 1)
    torch.testing.assert_close(directional_convergence(states), expected, atol=tolerance, rtol=0)


def test_scaling_a_state_changes_no_direction():
    states = torch.randn(5, 2, 3, 8, dtype=torch.float64)
    scaled = states * torch.rand(5, 2, 3, 1, dtype=torch.float64).add(0.1)
    torch.testing.assert_close(angular_speed(list(states)), angular_speed(scaled), atol=1e-12, rtol=0)
    torch.testing.assert_close(angular_updates(states), angular_updates(scaled), atol=1e-12, rtol=0)
    assert not angular_updates(states[:1] * torch.tensor([1.0, 3, 7]).reshape(3, 1, 1, 1)).any()


def test_ranks_of_known_spectra():
    values = torch.tensor([4.0, 2, 1])
    assert float(effective_rank(values)) == pytest.approx(2.60, abs=5e-3)
    assert float(stable_rank(values)) == pytest.approx(21 / 16)
    assert float(effective_rank(values)) == pytest.approx(math.exp(stats.entropy(values.numpy())))
    both = torch.stack([torch.zeros(3), torch.tensor([1e200, 0, 0], dtype=torch.float64)])
    assert effective_rank(both).tolist() == stable_rank(both).tolist() == [0, 1]
    assert float(effective_rank(torch.ones(7))) == pytest.approx(7)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (2, 40, 6)])
def test_spectra_are_numpys(shape):
    rows = torch.randn(shape, dtype=torch.float64)
    expected = np.linalg.svd(rows.numpy(), compute_uv=False)
    np.testing.assert_allclose(singular_spectrum(rows), expected, rtol=1e-10)
    np.testing.assert_allclose(spectrum_of_gram(rows.mT @ rows)[..., : expected.shape[-1]], expected, rtol=1e-8)


def test_noise_of_the_gram_matrix_is_no_rank():
    row = torch.randn(1, 64, dtype=torch.float64)
    rows = torch.randn(500, 1, dtype=torch.float64) * row
    values = singular_spectrum(rows)
    assert values[1:].max() == 0
    assert float(effective_rank(values)) == float(stable_rank(values)) == 1


def test_coherence_of_equal_opposite_and_known_updates():
    one = torch.tensor([3.0, 4.0])
    assert float(coherence(one.repeat(6, 1))) == pytest.approx(1)
    assert float(coherence(torch.stack([one, -one]))) == 0
    assert float(coherence(torch.zeros(4, 2))) == 0
    spread = torch.tensor([[1.0, 0], [0, 1]])
    assert float(coherence(spread)) == pytest.approx(math.sqrt(0.5))
    rows = torch.randn(50, 7, dtype=torch.float64)
    mean = rows.mean(dim=0, keepdim=True)
    assert float(coherence(rows)) == pytest.approx(float(torch.cosine_similarity(rows, mean).mean()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: angular_speed(torch.randn(1, 4)), r"hold no step; pass at least two"),
        (lambda: angular_speed([torch.randn(2, 4), torch.randn(3, 4)]), r"states of shapes"),
        (lambda: angular_speed([]), r"hold no step"),
        (lambda: angular_speed(torch.zeros(3, 4, dtype=torch.long)), r"states of torch.int64; pass a floating point"),
        (lambda: angular_speed(np.zeros((3, 4))), r"states of ndarray|states of float64"),
        (lambda: normalise([1.0]), r"states of list; pass a floating point torch.Tensor"),
        (lambda: coherence(torch.zeros(3)), r"pass a matrix of shape"),
        (lambda: stable_rank(torch.zeros(0)), r"are empty"),
        (lambda: singular_spectrum(torch.zeros(0, 3)), r"have no singular values"),
        (lambda: spectrum_of_gram(torch.zeros(2, 3)), r"is not square"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
