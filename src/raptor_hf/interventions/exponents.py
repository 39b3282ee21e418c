"""How fast neighbouring states part along a model's depth: finite-time Lyapunov exponents (beyond the paper)."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..dynamics import tangent_growth
from .perturbations import random_directions
from .runs import Batch, Model, base_states, layout_of, num_layers_of, plain, unpacked


@dataclass(frozen=True)
class LyapunovExponents:
    """Growth of displacements over depth, means over images; nats per layer, see
    [`~raptor_hf.dynamics.tangent_growth`].

    Attributes:
        exponents (`list[float]`): finite-time exponents, the mean of `rates` over layers; the first direction is
            the one that grows most, once the layers have turned the frame towards it.
        std (`list[float]`): their standard deviation over images; zeros for one image.
        relative (`list[float]`): exponents less the mean of `state_growth`: what displacements grow relative to the
            state.
        rates (`list[list[float]]`): `rates[i][l]`, the rate of direction `i` through layer `l + 1`.
        state_growth (`list[float]`): growth of the state's norm through each layer.
        shares (`dict[str, list[float]]`): where the first direction lies behind each layer, by token group.
        num_images (`int`), seed (`int`): images measured, and the seed of the first displacements.
    """

    exponents: list[float]
    std: list[float]
    relative: list[float]
    rates: list[list[float]]
    state_growth: list[float]
    shares: dict[str, list[float]]
    num_images: int
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values for strict JSON; numbers that are not finite become `None`."""
        return plain(asdict(self))


def lyapunov_exponents(
    model: Model, batches: Iterable[Batch], num_exponents: int = 3, *, seed: int = 0
) -> LyapunovExponents:
    """Exponents of a model from state 0 to the last, before the final LayerNorm; the whole image is one state.

    Cost: per batch one run of the model, and about `2 * num_exponents` more.

    Args:
        model (`Teacher` or `RaptorModel`): put in evaluation mode; float32 or float64.
        batches (`Iterable`): as for [`measure_swaps`]; labels are not looked at.
        num_exponents (`int`): directions to follow, 1 or more.
        seed (`int`): of the first displacements, which depend on it and on the image's number, not on the batch.

    Raises:
        ValueError: if a number is out of range, or there is no image.
    """
    if num_exponents < 1 or seed < 0:
        raise ValueError(f"num_exponents={num_exponents}, seed={seed}: use 1 or more, and a seed from 0 on.")
    layout = layout_of(model)
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = [
        partial(model.apply_layer, layer=layer) for layer in range(1, num_layers_of(model) + 1)
    ]
    found, num_images = [], 0
    for pixel_values, _ in unpacked(batches, needs_labels=False):
        start = base_states(model, pixel_values)[0]
        tokens, width = start.shape[1:]
        frame = random_directions(torch.Size((len(start), num_exponents * tokens, width)), seed, num_images)
        frame = frame.unflatten(1, (num_exponents, tokens)).movedim(1, 0)
        found.append(tangent_growth(steps, start, frame.to(start.device), layout))
        num_images += len(start)
    rates = torch.cat([growth.rates for growth in found])
    state_growth = torch.cat([growth.state_growth for growth in found])
    exponents = rates.mean(dim=1)
    return LyapunovExponents(
        exponents=exponents.mean(dim=0).tolist(),
        std=exponents.std(dim=0, correction=min(1, num_images - 1)).tolist(),
        relative=(exponents.mean(dim=0) - state_growth.mean()).tolist(),
        rates=rates.mean(dim=0).T.tolist(),
        state_growth=state_growth.mean(dim=0).tolist(),
        shares={
            name: torch.cat([growth.shares[name] for growth in found]).mean(dim=0).tolist() for name in layout.groups
        },
        num_images=num_images,
        seed=seed,
    )
