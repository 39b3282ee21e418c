"""Linear pictures of states over depth: principal components and exact dynamic mode decomposition.

Principal components draw the trajectories of arXiv 2512.19941, Fig. 8; dynamic mode decomposition (DMD) is that of App.
D. Conventions
    time step       one layer, ``dt = 1``: an eigenvalue multiplies the amplitude of its mode from one state to the next
    order           eigenvalues come by modulus, largest first; of a conjugate pair the one above the real axis is first
    logarithm       ``log(eigenvalue)`` is the rate per layer: its real part is the growth (negative: decay), its
                    imaginary part the rotation in radians per layer. Nothing here returns it, only the eigenvalue
    offset          none: the mean is not taken off before DMD, as in the paper
Everything is computed in float64 whatever the input's type, and results lie on the CPU.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .geometry import spectrum_of_gram, to_float64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrincipalComponents:
    """Directions of largest variance of a set of vectors.

    Attributes:
        mean (`torch.Tensor` of shape `(hidden_size,)`): mean of the rows.
        components (`torch.Tensor` of shape `(num_components, hidden_size)`): orthonormal, largest variance first; the
            entry of largest modulus of each (the first of such) is positive, which fixes the sign.
        explained_variance (`torch.Tensor` of shape `(num_components,)`): variance along each, with `num_rows - 1`.
        explained_variance_ratio (`torch.Tensor` of shape `(num_components,)`): the same over the variance of all
            features; 0 if nothing varies.
    """

    mean: torch.Tensor
    components: torch.Tensor
    explained_variance: torch.Tensor
    explained_variance_ratio: torch.Tensor

    def transform(self, states: torch.Tensor) -> torch.Tensor:
        """Coordinates of states of shape `(..., hidden_size)`: `(..., num_components)`, float64, on the CPU.

        Raises:
            ValueError: if `states` is no floating point tensor or has another number of features.
        """
        states = to_float64(states).cpu()
        if states.ndim < 1 or states.shape[-1] != len(self.mean):
            raise ValueError(
                f"states of shape {tuple(states.shape)} for components of {len(self.mean)} features; pass states of "
                "the model that the components were found on."
            )
        return (states - self.mean) @ self.components.T


def principal_components(states: torch.Tensor, num_components: int = 2) -> PrincipalComponents:
    """Principal component analysis of the rows of a matrix (Fig. 8: class means of the normalised states).

    Args:
        states (`torch.Tensor` of shape `(..., hidden_size)`): all but the last dimension are rows.
        num_components (`int`): 1 to the smaller of rows and features.

    Raises:
        ValueError: if `states` is no floating point tensor, has fewer than two rows or holds infinity or NaN, or
            `num_components` is out of range.
    """
    rows = _finite(to_float64(states), "states").reshape(-1, states.shape[-1] if states.ndim else 1)
    if len(rows) < 2:
        raise ValueError(f"states of shape {tuple(states.shape)} are {len(rows)} row(s); pass at least two.")
    if not 1 <= num_components <= min(rows.shape):
        raise ValueError(
            f"num_components={num_components} of {len(rows)} rows with {rows.shape[1]} features; use 1 to "
            f"{min(rows.shape)}."
        )
    mean = rows.mean(dim=0)
    _, values, vectors = torch.linalg.svd(rows - mean, full_matrices=False)
    variance = values.square() / (len(rows) - 1)
    components = vectors[:num_components]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    total = variance.sum()
    return PrincipalComponents(
        mean=mean.cpu(),
        components=(components * largest.sign()).cpu(),
        explained_variance=variance[:num_components].cpu(),
        explained_variance_ratio=(variance[:num_components] / torch.where(total > 0, total, 1.0)).cpu(),
    )


@dataclass(frozen=True)
class DynamicModes:
    """Exact dynamic mode decomposition: ``x_l = sum_i b_i lambda_i^l phi_i``.

    Attributes:
        eigenvalues (`torch.Tensor` of shape `(rank,)`, complex128): per layer, by modulus, largest first.
        modes (`torch.Tensor` of shape `(hidden_size, rank)`, complex128): ``phi_i`` as columns.
        amplitudes (`torch.Tensor` of shape `(..., rank)`, complex128): ``b`` of each trajectory, ``pinv(Phi) x_0``.
        singular_values (`torch.Tensor` of shape `(num_values,)`): of the snapshots ``X1``, all of them.
        numerical_rank (`int`): singular values of ``X1`` that are more than rounding.
        errors (`torch.Tensor` of shape `(L + 1,)`): relative error of the reconstruction of each snapshot, over all
            trajectories: ``|X^_l - X_l|_F / |X_l|_F``; 0 for a zero snapshot reproduced exactly, else relative to the
            largest snapshot.
    """

    eigenvalues: torch.Tensor
    modes: torch.Tensor
    amplitudes: torch.Tensor
    singular_values: torch.Tensor
    numerical_rank: int
    errors: torch.Tensor

    @property
    def rank(self) -> int:
        """Number of modes: what was asked for, at most `numerical_rank`, at least 1."""
        return len(self.eigenvalues)

    @property
    def spectral_radius(self) -> float:
        """Largest modulus of an eigenvalue: above 1 the linear model grows."""
        return float(self.eigenvalues.abs().max())

    @property
    def median_modulus(self) -> float:
        """Median modulus of the eigenvalues, the mean of the middle two for an even number."""
        return float(self.eigenvalues.abs().quantile(0.5))

    def reconstruct(self, num_steps: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Trajectories of the linear model: states `0..num_steps`, real.

        Args:
            num_steps (`int`): layers to go, 0 or more; `L` gives what `errors` compares, more predicts on.
            dtype (`torch.dtype`): of the result, for example that of the snapshots.

        Returns:
            `torch.Tensor` of shape `(..., num_steps + 1, hidden_size)`, on the CPU.

        Raises:
            ValueError: if `num_steps` is negative.
        """
        if num_steps < 0:
            raise ValueError(f"num_steps={num_steps} is negative; use 0 for the first snapshot alone.")
        powers = self.eigenvalues ** torch.arange(num_steps + 1).unsqueeze(1)
        return ((self.amplitudes.unsqueeze(-2) * powers) @ self.modes.T).real.to(dtype)


def dynamic_mode_decomposition(
    trajectories: torch.Tensor | Sequence[torch.Tensor], rank: int | None = 10
) -> DynamicModes:
    """Exact dynamic mode decomposition of snapshots (App. D), without an offset.

    ``X1`` holds states `0..L-1` as columns, ``X2`` states `1..L`; with ``X1 = U S V*`` the operator is
    ``A~ = U_r* X2 V_r S_r^-1 = W Lambda W^-1`` and the modes are ``X2 V_r S_r^-1 W``. Of several trajectories the pairs
    are put side by side, never a pair of two trajectories.

    Directions that are rounding are left out: singular values of at most ``eps`` of the input's type (float64:
    ``max(shape) * eps``) times the largest. If that leaves fewer than `rank`, this is logged as a warning. Zero
    snapshots have one mode, with eigenvalue 0.

    Args:
        trajectories (`torch.Tensor` of shape `(L + 1, hidden_size)` or `(num_trajectories, L + 1, hidden_size)`, or a
            sequence of the former): real, any floating point type.
        rank (`int`, *optional*): modes at most, the paper's 10 by default; `None` for all that are more than rounding.

    Raises:
        ValueError: if the snapshots are no floating point tensor, fewer than two, hold infinity or NaN, or `rank` is
            below 1.
    """
    if not torch.is_tensor(trajectories):
        trajectories = torch.stack(list(trajectories)) if len(trajectories) else torch.zeros(0)
    snapshots = _finite(to_float64(trajectories, "trajectories"), "trajectories")
    if snapshots.ndim not in (2, 3) or snapshots.shape[-2] < 2 or snapshots.numel() == 0:
        raise ValueError(
            f"trajectories of shape {tuple(snapshots.shape)}; pass at least two snapshots, as (L + 1, hidden_size) or "
            "(num_trajectories, L + 1, hidden_size)."
        )
    hidden_size = snapshots.shape[-1]
    before = snapshots[..., :-1, :].reshape(-1, hidden_size).T
    after = snapshots[..., 1:, :].reshape(-1, hidden_size).T
    left, values, right = torch.linalg.svd(before, full_matrices=False)
    noise = max(torch.finfo(trajectories.dtype).eps, max(before.shape) * torch.finfo(torch.float64).eps)
    numerical_rank = int((values > noise * values[0]).sum())
    kept = _kept_rank(rank, numerical_rank)
    scale = _inverse(values[:kept])
    images = after @ right[:kept].T * scale
    return _modes(left[:, :kept], images, values, numerical_rank, snapshots)


def modes_of_moments(
    gram: torch.Tensor, lagged: torch.Tensor, trajectory: torch.Tensor, rank: int | None = 10
) -> DynamicModes:
    """[`dynamic_mode_decomposition`] of any number of trajectories, from sums that add up over them.

    The squares cost half of the digits: singular values of ``X1`` below ``sqrt(hidden_size * eps)`` of the largest,
    4e-7 for 768 features, count as rounding.

    Args:
        gram (`torch.Tensor` of shape `(hidden_size, hidden_size)`): ``X1 X1*``, summed over the trajectories' pairs.
        lagged (`torch.Tensor` of the same shape): ``X2 X1*``, likewise.
        trajectory (`torch.Tensor` of shape `(L + 1, hidden_size)`): the trajectory that `amplitudes` and `errors`
            belong to, such as the mean of all.
        rank (`int`, *optional*): as in [`dynamic_mode_decomposition`].

    Raises:
        ValueError: if a shape or type is wrong, an entry is infinite or NaN, or `rank` is below 1.
    """
    gram, lagged, trajectory = (
        _finite(to_float64(values, name), name)
        for name, values in (("gram", gram), ("lagged", lagged), ("trajectory", trajectory))
    )
    hidden_size = trajectory.shape[-1] if trajectory.ndim == 2 else 0
    if hidden_size == 0 or len(trajectory) < 2 or not gram.shape == lagged.shape == (hidden_size, hidden_size):
        raise ValueError(
            f"gram of shape {tuple(gram.shape)}, lagged of {tuple(lagged.shape)} and trajectory of "
            f"{tuple(trajectory.shape)}; pass (D, D), (D, D) and (L + 1, D) with L of at least 1."
        )
    values = spectrum_of_gram(gram)
    numerical_rank = int((values > 0).sum())
    kept = _kept_rank(rank, numerical_rank)
    left = torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, :kept]
    images = lagged @ left * _inverse(values[:kept]).square()
    return _modes(left, images, values, numerical_rank, trajectory)


def _modes(
    left: torch.Tensor, images: torch.Tensor, values: torch.Tensor, numerical_rank: int, snapshots: torch.Tensor
) -> DynamicModes:
    """Modes from ``U_r``, ``X2 V_r S_r^-1``, the singular values of ``X1``, and the snapshots to reconstruct."""
    left, images, snapshots = left.cpu(), images.cpu(), snapshots.cpu()
    eigenvalues, vectors = torch.linalg.eig(left.T @ images)
    order = sorted(range(len(eigenvalues)), key=lambda i: _sort_key(complex(eigenvalues[i])))
    modes = images.to(vectors.dtype) @ vectors[:, order]
    start = snapshots[..., 0, :].to(modes.dtype)
    result = DynamicModes(
        eigenvalues=eigenvalues[order],
        modes=modes,
        amplitudes=start @ torch.linalg.pinv(modes).T,
        singular_values=values.cpu(),
        numerical_rank=numerical_rank,
        errors=torch.empty(0),
    )
    difference = result.reconstruct(snapshots.shape[-2] - 1) - snapshots
    object.__setattr__(result, "errors", _relative_errors(difference, snapshots))
    return result


def _relative_errors(difference: torch.Tensor, snapshots: torch.Tensor) -> torch.Tensor:
    steps = snapshots.shape[-2]
    error, norm = (
        torch.linalg.vector_norm(values.movedim(-2, 0).reshape(steps, -1), dim=1) for values in (difference, snapshots)
    )
    scale = torch.where(norm > 0, norm, norm.max())
    return torch.where(error > 0, error / torch.where(scale > 0, scale, 1.0), 0.0)


def _sort_key(eigenvalue: complex) -> tuple[float, float, float]:
    """Modulus, to the digits that rounding leaves equal in a conjugate pair; then the upper half plane first."""
    return (-float(f"{abs(eigenvalue):.10e}"), -eigenvalue.imag, -eigenvalue.real)


def _kept_rank(rank: int | None, numerical_rank: int) -> int:
    if rank is not None and rank < 1:
        raise ValueError(f"rank={rank} is below 1; give the number of modes, or None for all.")
    if rank is not None and rank > numerical_rank:
        logger.warning("DMD of rank %d asked of snapshots of rank %d: cut to that.", rank, numerical_rank)
    return max(1, numerical_rank if rank is None else min(rank, numerical_rank))


def _inverse(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values > 0, 1 / torch.where(values > 0, values, 1.0), 0.0)


def _finite(values: torch.Tensor, name: str) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name} hold infinity or NaN; leave such states out, or compute them in float32.")
    return values
