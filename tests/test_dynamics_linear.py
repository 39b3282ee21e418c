"""Linear systems with known eigenvalues, degenerate trajectories, PyDMD and scikit-learn as references."""

import itertools
import logging

import numpy as np
import pytest
import torch
from pydmd import DMD
from sklearn.decomposition import PCA

from raptor_hf.dynamics import dynamic_mode_decomposition, modes_of_moments, principal_components

EIGENVALUES = [1.0, 0.9, 0.5 + 0.5j, 0.5 - 0.5j]


def linear_system(num_snapshots=12, hidden_size=10, seed=0):
    """Snapshots `(num_snapshots, hidden_size)` of `x_{l+1} = A x_l` with `EIGENVALUES`, and the map into features."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.block_diag(torch.tensor([[1.0]]), torch.tensor([[0.9]]), torch.tensor([[0.5, -0.5], [0.5, 0.5]]))
    basis = torch.randn(hidden_size, 4, generator=generator, dtype=torch.float64)
    state, states = torch.ones(4, dtype=torch.float64), []
    for _ in range(num_snapshots):
        states.append(basis @ state)
        state = small.double() @ state
    return torch.stack(states)


def assert_eigenvalues(values, expected, tolerance=1e-6):
    expected = torch.tensor(expected, dtype=torch.complex128)
    torch.testing.assert_close(values, expected, atol=tolerance, rtol=0)


def test_a_known_system_has_its_eigenvalues_sorted():
    modes = dynamic_mode_decomposition(linear_system(), rank=4)
    assert_eigenvalues(modes.eigenvalues, EIGENVALUES)
    assert modes.spectral_radius == pytest.approx(1.0)
    assert modes.median_modulus == pytest.approx((0.9 + 0.5**0.5) / 2)
    assert modes.errors.max() < 1e-9
    torch.testing.assert_close(modes.reconstruct(30)[:12], linear_system(), atol=1e-8, rtol=0)
    torch.testing.assert_close(modes.reconstruct(30), linear_system(31), atol=1e-6, rtol=0)


def test_modes_are_eigenvectors_of_the_system():
    snapshots = linear_system()
    modes = dynamic_mode_decomposition(snapshots, rank=4)
    operator = snapshots[1:].T @ torch.linalg.pinv(snapshots[:-1].T, rtol=1e-10)
    images = operator.to(torch.complex128) @ modes.modes
    torch.testing.assert_close(images, modes.modes * modes.eigenvalues, atol=1e-8, rtol=0)


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_noisy_snapshots_have_the_eigenvalues_and_reconstruction_of_pydmd(rank):
    snapshots = torch.randn(14, 30, dtype=torch.float64)
    modes = dynamic_mode_decomposition(snapshots, rank)
    reference = DMD(svd_rank=rank, exact=True, opt=False).fit(snapshots.numpy().T)
    expected = sorted(reference.eigs, key=lambda value: (-round(abs(value), 10), -value.imag))
    np.testing.assert_allclose(modes.eigenvalues, expected, atol=1e-9)
    np.testing.assert_allclose(modes.reconstruct(13), reference.reconstructed_data.real.T, atol=1e-8)


def test_trajectories_are_never_joined():
    first, second = linear_system(seed=0), linear_system(seed=0) * -3
    modes = dynamic_mode_decomposition(torch.stack([first, second]), rank=4)
    assert_eigenvalues(modes.eigenvalues, EIGENVALUES)
    assert modes.amplitudes.shape == (2, 4)
    assert modes.errors.max() < 1e-9
    joined = dynamic_mode_decomposition(torch.cat([first, second]), rank=4)
    assert joined.errors.max() > 1e-2


def test_sums_give_the_modes_of_the_snapshots():
    paths = [linear_system(seed=0), 2 * linear_system(seed=0).roll(1, dims=1)]
    gram, lagged = torch.zeros(10, 10, dtype=torch.float64), torch.zeros(10, 10, dtype=torch.float64)
    for path in paths:
        gram += path[:-1].T @ path[:-1]
        lagged += path[1:].T @ path[:-1]
    whole = dynamic_mode_decomposition(paths, rank=6)
    summed = modes_of_moments(gram, lagged, paths[0], rank=6)
    torch.testing.assert_close(summed.eigenvalues, whole.eigenvalues, atol=1e-7, rtol=0)
    torch.testing.assert_close(summed.reconstruct(11), whole.reconstruct(11)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_constant_trajectory_has_the_eigenvalue_one(dtype, caplog):
    constant = torch.randn(6).repeat(9, 1).to(dtype)
    with caplog.at_level(logging.WARNING, "raptor_hf"):
        modes = dynamic_mode_decomposition(constant)
    assert modes.rank == modes.numerical_rank == 1
    assert_eigenvalues(modes.eigenvalues, [1.0], 1e-6)
    assert modes.errors.max() < 1e-6
    assert "DMD of rank 10 asked of snapshots of rank 1: cut to that." in caplog.text


def test_a_decaying_line_a_zero_trajectory_and_two_snapshots():
    line = torch.randn(5, dtype=torch.float64) * (0.8 ** torch.arange(7, dtype=torch.float64)).unsqueeze(1)
    assert_eigenvalues(dynamic_mode_decomposition(line, 1).eigenvalues, [0.8], 1e-12)
    zero = dynamic_mode_decomposition(torch.zeros(4, 3), 1)
    assert_eigenvalues(zero.eigenvalues, [0.0], 0)
    assert zero.errors.tolist() == [0, 0, 0, 0]
    two = dynamic_mode_decomposition(torch.tensor([[1.0, 0], [0.5, 0]]), 1)
    assert_eigenvalues(two.eigenvalues, [0.5], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_input_has_a_real_reconstruction_and_an_error_for_every_snapshot(dtype):
    snapshots = torch.randn(6, 8).to(dtype)
    modes = dynamic_mode_decomposition(snapshots, None)
    again = modes.reconstruct(5, dtype)
    assert again.shape == snapshots.shape
    assert again.dtype == dtype
    assert modes.errors.shape == (6,)
    assert torch.isfinite(modes.errors).all()
    relative = (modes.reconstruct(5) - snapshots.double()).norm(dim=1) / snapshots.double().norm(dim=1)
    torch.testing.assert_close(modes.errors, relative)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1, 4),), r"pass at least two snapshots"),
        ((torch.zeros(4),), r"pass at least two snapshots"),
        (([],), r"pass at least two snapshots"),
        ((torch.zeros(3, 4), 0), r"rank=0 is below 1"),
        ((torch.tensor([[1.0], [torch.nan]]),), r"hold infinity or NaN"),
        ((torch.zeros(3, 4, dtype=torch.int32),), r"trajectories of torch.int32"),
    ],
)
def test_snapshots_that_cannot_be_decomposed_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        dynamic_mode_decomposition(*arguments)


def test_wrong_sums_and_steps_are_named():
    with pytest.raises(ValueError, match=r"pass \(D, D\), \(D, D\) and \(L \+ 1, D\)"):
        modes_of_moments(torch.zeros(3, 3), torch.zeros(2, 2), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"num_steps=-1 is negative"):
        dynamic_mode_decomposition(torch.ones(3, 2), 1).reconstruct(-1)


def test_principal_components_are_those_of_scikit_learn_but_for_a_fixed_sign():
    rows = torch.randn(40, 6, dtype=torch.float64) * torch.arange(1.0, 7)
    ours, reference = principal_components(rows, 3), PCA(3, svd_solver="full").fit(rows.numpy())
    signs = np.sign((ours.components.numpy() * reference.components_).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(ours.components, reference.components_ * signs, atol=1e-10)
    np.testing.assert_allclose(ours.explained_variance, reference.explained_variance_, rtol=1e-10)
    np.testing.assert_allclose(ours.explained_variance_ratio, reference.explained_variance_ratio_, rtol=1e-10)
    np.testing.assert_allclose(ours.transform(rows), reference.transform(rows.numpy()) * signs.T, atol=1e-9)
    for order in itertools.islice(itertools.permutations(range(4)), 5):
        blocks = rows.reshape(4, 10, 6)[list(order)]
        torch.testing.assert_close(principal_components(blocks, 3).components, ours.components)
    assert ours.components.abs().argmax(dim=1).tolist() == [
        int(row.argmax()) for row in ours.components
    ]  # the largest is positive


def test_components_of_points_that_do_not_vary_and_of_too_few():
    still = principal_components(torch.ones(4, 3), 2)
    assert still.explained_variance_ratio.tolist() == [0, 0]
    assert not still.transform(torch.ones(3)).any()
    with pytest.raises(ValueError, match=r"pass at least two"):
        principal_components(torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"num_components=4 of 5 rows with 3 features"):
        principal_components(torch.ones(5, 3), 4)
    with pytest.raises(ValueError, match=r"for components of 3 features"):
        still.transform(torch.ones(4))
    with pytest.raises(ValueError, match=r"states hold infinity or NaN"):
        principal_components(torch.tensor([[1.0], [torch.inf]]))
