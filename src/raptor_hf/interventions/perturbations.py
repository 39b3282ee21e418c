"""Token groups pushed off their path, and how far that turns the final state (Fig. 10)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..fidelity import cosine_from_sums
from .runs import (
    Batch,
    Model,
    base_states,
    checked_layer,
    group_sums,
    layout_of,
    num_layers_of,
    plain,
    run_layers,
    unpacked,
)

EPS_SCALES = ("relative", "absolute")


def perturb(
    model: Model,
    hidden_states: torch.Tensor,
    layer: int,
    group: str,
    eps: float,
    *,
    scale: str = "relative",
    seed: int = 0,
    first_image: int = 0,
) -> list[torch.Tensor]:
    """Pushes the tokens of one group at one state in random directions and runs the rest of the model (arXiv
    2512.19941, Fig. 10).

    With `u ~ N(0, I)` independent per token, a token `x` becomes `x + eps * |x| * u / |u|` (`"relative"`, so that `eps`
    means the same at every layer while norms grow) or `x + eps * u` (`"absolute"`, the paper's). The direction depends
    on the seed, the image's number and the token's place in its group, not on the layer, the batch or the device.

    Args:
        model (`Teacher` or `RaptorModel`): the model; put in evaluation mode.
        hidden_states (`torch.Tensor` of shape `(batch_size, seq_length, hidden_size)`): its state `layer`; stays as it
            is.
        layer (`int`): `0..L`, where the perturbation is added.
        group (`str`): `"cls"`, `"registers"`, `"patch"` or `"all"`.
        eps (`float`): size, above 0; a share of the token's norm, or in units of the state.
        scale (`str`): `"relative"` or `"absolute"`.
        seed (`int`): of the directions, 0 or more.
        first_image (`int`): number of the batch's first image, for runs over several batches.

    Returns:
        `list[torch.Tensor]`: states `layer..L`, the first one perturbed; before the final LayerNorm, in the dtype of
        `hidden_states`.

    Raises:
        ValueError: if an argument is out of range or unknown, the shape is wrong, or `eps` is so small that the dtype
            rounds the perturbation away.
    """
    checked_layer(model, layer, low=0)
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps={eps} is not a size; give a finite number above 0, such as 0.1.")
    if scale not in EPS_SCALES:
        raise ValueError(f"scale={scale!r} is not known; use one of {', '.join(map(repr, EPS_SCALES))}.")
    for name, number in (("seed", seed), ("first_image", first_image)):
        if number < 0:
            raise ValueError(f"{name}={number} is negative; count from 0.")
    layout = layout_of(model)
    tokens = layout.select(hidden_states, group)
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    directions = random_directions(tokens.shape, seed, first_image).to(wide)
    if scale == "relative":
        norms = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
        directions = directions / norms * torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    start = hidden_states.clone()
    layout.select(start, group).copy_(wide + eps * directions)
    if torch.equal(start, hidden_states):
        raise ValueError(f"eps={eps} vanishes in {hidden_states.dtype}; use a larger one or a float32 model.")
    return run_layers(model, start, range(layer + 1, num_layers_of(model) + 1))


@dataclass(frozen=True)
class Sensitivity:
    """How far a perturbation of each token group at each layer turns the final state (arXiv 2512.19941, Fig. 10).

    Attributes:
        distance (`dict[str, dict[str, list[float]]]`): `distance[perturbed][measured][i]` is the mean over images and
            tokens of the group `measured` of `1 - cos` between state `L` with and without a perturbation of the group
            `perturbed` at state `layers[i]`. The paper draws `measured == perturbed`.
        layers (`list[int]`): states at which it was added.
        eps (`float`), scale (`str`), seed (`int`): as for [`perturb`].
        num_images (`int`): images measured.
    """

    distance: dict[str, dict[str, list[float]]]
    layers: list[int]
    eps: float
    scale: str
    seed: int
    num_images: int

    def curve(self, group: str, power: int = 1) -> list[float]:
        """`(1 - cos) / eps**power` of a group under its own perturbation, one value per entry of `layers`.

        The paper divides by `eps`; `1 - cos` is quadratic for small `eps`, so that `power=2` is what does not depend
        on it.

        Raises:
            ValueError: if the group was not perturbed.
        """
        if group not in self.distance:
            raise ValueError(f"group={group!r} was not perturbed; use one of {', '.join(map(repr, self.distance))}.")
        return [value / self.eps**power for value in self.distance[group][group]]

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values for strict JSON, with both curves of every group; NaN becomes `None`."""
        curves = {f"per_eps{p if p > 1 else ''}": {g: self.curve(g, p) for g in self.distance} for p in (1, 2)}
        return plain({**asdict(self), **curves})


def sensitivity_curve(
    model: Model,
    batches: Iterable[Batch],
    eps: float,
    *,
    layers: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
    scale: str = "relative",
    seed: int = 0,
) -> Sensitivity:
    """[`perturb`] at each layer and of each token group, measured at the final state (arXiv 2512.19941, Fig. 10).

    Perturbed and base path are of the same images. All groups are measured whichever is perturbed.

    Args:
        model (`Teacher` or `RaptorModel`): the model; put in evaluation mode.
        batches (`Iterable`): as for [`measure_swaps`]; labels are not looked at.
        eps, scale, seed: as for [`perturb`].
        layers (`Sequence[int]`, *optional*): states to perturb, by default all that have a layer behind them, `0..L-1`.
        groups (`Sequence[str]`, *optional*): groups to perturb, by default all that the model has.

    Raises:
        ValueError: as [`perturb`]; if there is no batch, no layer or no group.
    """
    layout = layout_of(model)
    places = list(range(num_layers_of(model))) if layers is None else list(layers)
    pushed = list(layout.groups if groups is None else groups)
    if not places or not pushed:
        raise ValueError(f"layers={places}, groups={pushed}: nothing to perturb; name at least one of each.")
    for layer in places:
        checked_layer(model, layer, low=0)
    sums = torch.zeros(len(pushed), len(places), len(layout.groups), 2, dtype=torch.float64)
    num_images = 0
    for pixel_values, _ in unpacked(batches, needs_labels=False):
        states = base_states(model, pixel_values)
        for row, group in enumerate(pushed):
            for column, layer in enumerate(places):
                options = {"scale": scale, "seed": seed, "first_image": num_images}
                final = perturb(model, states[layer], layer, group, eps, **options)[-1]  # type: ignore[arg-type]
                sums[row, column] += group_sums(final, states[-1], layout)
        num_images += len(pixel_values)
    distance = {
        group: {
            measured: [1.0 - cosine_from_sums(sums[row, column, index]) for column in range(len(places))]
            for index, measured in enumerate(layout.groups)
        }
        for row, group in enumerate(pushed)
    }
    return Sensitivity(distance, places, eps, scale, seed, num_images)


def random_directions(shape: torch.Size, seed: int, first_image: int) -> torch.Tensor:
    """`N(0, I)` of shape `(batch_size, num_tokens, hidden_size)`, float32, on the CPU; keyed by seed and image."""
    images = []
    for number in range(first_image, first_image + shape[0]):
        key = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]) >> 1
        images.append(torch.randn(shape[1:], generator=torch.Generator().manual_seed(key)))
    return torch.stack(images)
