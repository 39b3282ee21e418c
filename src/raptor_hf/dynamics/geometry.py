"""Directions of token states over depth: angles, convergence, ranks and coherence of their updates.

The measures of arXiv 2512.19941, Sec. 4 and App. C, on tensors that fit into memory; [`raptor_hf.dynamics`] takes the
same measures over a stream of images. States are counted as `raptor_hf.tokens` says. Everything is computed in float64
on the device of the input (on the CPU for Apple's GPUs, which have no float64), whatever the input's type.

A zero vector has no direction. Its direction is the zero vector here, so its cosine with anything is 0 and its angle
to a vector that is not zero is pi / 2; the angle of two zero vectors is 0.
"""

from collections.abc import Sequence

import torch

# An update of a direction (at most 2 long) that is shorter than this is rounding and counts as none.
RESOLUTION = 8 * torch.finfo(torch.float64).eps


def to_float64(values: torch.Tensor, name: str = "states") -> torch.Tensor:
    """Any floating point tensor as float64, detached; `values` itself if it is that already.

    Raises:
        ValueError: if `values` is no floating point tensor. `name` is what the message calls it.
    """
    if not torch.is_tensor(values) or not values.is_floating_point():
        kind = values.dtype if torch.is_tensor(values) else type(values).__name__
        raise ValueError(f"{name} of {kind}; pass a floating point torch.Tensor, from an array by torch.as_tensor.")
    values = values.detach()
    return (values.cpu() if values.device.type == "mps" else values).to(torch.float64)


def normalise(states: torch.Tensor) -> torch.Tensor:
    """Directions ``x / |x|`` of vectors of shape `(..., hidden_size)`, float64; zero for zero vectors.

    Raises:
        ValueError: if `states` is no floating point tensor.
    """
    states = to_float64(states)
    norms = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return states / torch.where(norms > 0, norms, 1.0)


def angle(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angle between vectors, in radians, accurate near 0 and near pi.

    ``2 atan2(|u - v|, |u + v|)`` of the directions ``u``, ``v``; the arc cosine loses half of the digits at both ends.

    Args:
        first (`torch.Tensor` of shape `(..., hidden_size)`): any floating point type.
        second (`torch.Tensor`): a shape that broadcasts with it.

    Returns:
        `torch.Tensor` of shape `(...)`, float64, in 0..pi.

    Raises:
        ValueError: if an input is no floating point tensor.
    """
    return angle_of_directions(normalise(first), normalise(second))


def angle_of_directions(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[`angle`] of float64 vectors of length one (or zero), without normalising them again."""
    return _half_angle(torch.linalg.vector_norm(first - second, dim=-1), first, second).mul_(2)


def angle_of_updates(chords: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[`angle_of_directions`] where the lengths `chords` of ``second - first`` are known already."""
    return _half_angle(chords, first, second).mul_(2)


def angular_speed(hidden_states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Angle between the directions of successive states, in radians per layer (Fig. 11).

    Args:
        hidden_states (`torch.Tensor` or sequence): states `0..L`, each of shape `(..., hidden_size)`.

    Returns:
        `torch.Tensor` of shape `(L, ...)`, float64: entry `l` is the angle from state `l` to state `l + 1`.

    Raises:
        ValueError: if there are fewer than two states, or their types or shapes are wrong.
    """
    directions = normalise(stack_states(hidden_states))
    return angle_of_directions(directions[:-1], directions[1:])


def directional_convergence(hidden_states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Cosine of every state with the last one, ``gamma_l = <x^_l, x^_L>`` (Fig. 8).

    Args:
        hidden_states (`torch.Tensor` or sequence): states `0..L`, each of shape `(..., hidden_size)`.

    Returns:
        `torch.Tensor` of shape `(L + 1, ...)`, float64, in -1..1.

    Raises:
        ValueError: as [`angular_speed`].
    """
    directions = normalise(stack_states(hidden_states))
    return (directions * directions[-1]).sum(dim=-1).clamp_(-1.0, 1.0)


def angular_updates(hidden_states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Updates of the directions, ``D_l = x^_{l+1} - x^_l`` (Fig. 12): `(L, ..., hidden_size)`, float64.

    Updates below `RESOLUTION`, which rounding alone makes, are zero.

    Raises:
        ValueError: as [`angular_speed`].
    """
    updates = normalise(stack_states(hidden_states)).diff(dim=0)
    lengths = torch.linalg.vector_norm(updates, dim=-1, keepdim=True)
    return torch.where(lengths > RESOLUTION, updates, 0.0)


def coherence(updates: torch.Tensor) -> torch.Tensor:
    """Mean cosine of each update with the mean update: ``<mean(D / |D|), mean(D) / |mean(D)|>`` (Fig. 12).

    Args:
        updates (`torch.Tensor` of shape `(..., num_rows, hidden_size)`): rows as from [`angular_updates`].

    Returns:
        `torch.Tensor` of shape `(...)`, float64, in -1..1; 1 if all updates point one way. A zero update has cosine 0
        and counts; 0 if there is no mean update or no row.

    Raises:
        ValueError: if `updates` is no floating point tensor or has fewer than two dimensions.
    """
    updates = _rows(updates)
    count = max(1, updates.shape[-2])
    return coherence_of_means(normalise(updates).sum(dim=-2) / count, updates.sum(dim=-2) / count)


def coherence_of_means(mean_direction: torch.Tensor, mean_update: torch.Tensor) -> torch.Tensor:
    """[`coherence`] from the mean of ``D / |D|`` and the mean of ``D``, each of shape `(..., hidden_size)`, float64.

    A mean update below `RESOLUTION` is what rounding leaves of updates that cancel, and counts as none.
    """
    lengths = torch.linalg.vector_norm(mean_update, dim=-1)
    cosine = (mean_direction * normalise(mean_update)).sum(dim=-1)
    return torch.where(lengths > RESOLUTION, cosine, 0.0).clamp_(-1.0, 1.0)


def singular_spectrum(rows: torch.Tensor) -> torch.Tensor:
    """Singular values of `(..., num_rows, hidden_size)`, largest first, float64.

    From the matrix itself if it has no more rows than features, else from its Gram matrix as [`spectrum_of_gram`].

    Raises:
        ValueError: if `rows` is no floating point tensor, has fewer than two dimensions or no entry.
    """
    rows = _rows(rows)
    if rows.numel() == 0:
        raise ValueError(f"rows of shape {tuple(rows.shape)} have no singular values; pass at least one update.")
    if rows.shape[-2] > rows.shape[-1]:
        return spectrum_of_gram(rows.mT @ rows)
    return torch.linalg.svdvals(rows)


def spectrum_of_gram(gram: torch.Tensor) -> torch.Tensor:
    """Singular values of a matrix `U` from `U^T U` of shape `(..., hidden_size, hidden_size)`, largest first, float64.

    Squaring costs half of the digits: singular values below ``sqrt(hidden_size * eps)`` of the largest, 4e-7 for 768
    features, cannot be told from zero and are zero.

    Raises:
        ValueError: if `gram` is no floating point tensor of square matrices.
    """
    gram = _rows(gram)
    if gram.shape[-1] != gram.shape[-2] or gram.numel() == 0:
        raise ValueError(f"a Gram matrix of shape {tuple(gram.shape)} is not square; pass rows.mT @ rows.")
    values = torch.linalg.eigvalsh(gram).flip(-1)
    floor = gram.shape[-1] * torch.finfo(torch.float64).eps * values[..., :1].clamp_min(0.0)
    return torch.where(values > floor, values, 0.0).sqrt()


def stable_rank(singular_values: torch.Tensor) -> torch.Tensor:
    """Stable rank ``|U|_F^2 / |U|_2^2`` (Fig. 12) from singular values of shape `(..., num_values)`; zero for zeros.

    Raises:
        ValueError: if `singular_values` is no floating point tensor or has no value.
    """
    scaled = _scaled(singular_values)
    return scaled.square().sum(dim=-1)


def effective_rank(singular_values: torch.Tensor) -> torch.Tensor:
    """Effective rank ``exp(-sum_i p_i log p_i)``, ``p_i = sigma_i / sum sigma`` (Fig. 12); zero for zeros.

    From singular values of shape `(..., num_values)`, not their squares: 4, 2, 1 give 2.60.

    Raises:
        ValueError: as [`stable_rank`].
    """
    scaled = _scaled(singular_values)
    total = scaled.sum(dim=-1, keepdim=True)
    share = scaled / torch.where(total > 0, total, 1.0)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return torch.where(total.squeeze(-1) > 0, rank, 0.0)


def stack_states(hidden_states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """States `0..L` as one float64 tensor of shape `(L + 1, ..., hidden_size)`.

    Raises:
        ValueError: if there are fewer than two states, or they are not floating point tensors of one shape.
    """
    if not torch.is_tensor(hidden_states):
        shapes = sorted({tuple(state.shape) for state in hidden_states})
        if len(shapes) > 1:
            raise ValueError(f"states of shapes {shapes}; pass the states of one model for the same images.")
        hidden_states = torch.stack([to_float64(state) for state in hidden_states]) if shapes else torch.zeros(0, 1)
    hidden_states = to_float64(hidden_states)
    if hidden_states.ndim < 2 or hidden_states.shape[0] < 2:
        raise ValueError(
            f"states of shape {tuple(hidden_states.shape)} hold no step; pass at least two states of shape "
            "(..., hidden_size), along the first dimension."
        )
    return hidden_states


def _half_angle(chords: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.atan2(chords, torch.linalg.vector_norm(first + second, dim=-1))


def _rows(values: torch.Tensor) -> torch.Tensor:
    values = to_float64(values, "rows")
    if values.ndim < 2:
        raise ValueError(f"rows of shape {tuple(values.shape)}; pass a matrix of shape (..., num_rows, hidden_size).")
    return values


def _scaled(singular_values: torch.Tensor) -> torch.Tensor:
    """Singular values over the largest: no overflow in the squares, and zeros stay zeros."""
    values = to_float64(singular_values, "singular_values")
    if values.ndim < 1 or values.shape[-1] == 0:
        raise ValueError(f"singular_values of shape {tuple(values.shape)} are empty; pass at least one value.")
    largest = values.amax(dim=-1, keepdim=True)
    return values / torch.where(largest > 0, largest, 1.0)
