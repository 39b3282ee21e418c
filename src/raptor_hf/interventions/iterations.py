"""A phase's block applied fewer or more times than the model does: is it at rest, and what does the output say?

Beyond the paper. If a phase is one recurrent block that runs towards a fixed point, applying it once more changes
little, and applying it for ever ends somewhere.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..dynamics import angle, normalise, recurrence
from ..phases import Phases
from .runs import (
    Batch,
    Head,
    Model,
    base_states,
    group_cosines,
    group_sums,
    head_hits,
    layout_of,
    num_layers_of,
    plain,
    run_layers,
    unpacked,
)

OFFSETS = (-2, -1, 1, 2, 4)


@dataclass(frozen=True)
class LengthEffect:
    """A phase of another length.

    Attributes:
        phase (`int`): its number, from 0.
        offset (`int`): applications more (or, below 0, fewer) than the model's.
        cosine (`dict[str, float]`): as of [`SwapEffect`], with the untouched final state.
        accuracy (`float`, *optional*): share of images that the head classifies rightly; `None` without a head.
    """

    phase: int
    offset: int
    cosine: dict[str, float]
    accuracy: float | None = None


@dataclass(frozen=True)
class PhaseIteration:
    """The last layer of a phase, applied again and again to the state behind the phase.

    Attributes:
        phase (`int`), layer (`int`): its number, from 0, and the layer that is applied, from 1.
        speed (`dict[str, list[float]]`): per token group, the angle in radians that each further application turns a
            token by; mean over images and tokens.
        norm (`dict[str, list[float]]`): the tokens' norm after each, relative to that behind the phase; mean.
        agreement (`dict[str, list[float]]`): length of the mean over images of the group's mean direction, behind the
            phase and after each application: 1 where all images have become one.
        ends (`dict[str, dict[str, float]]`): share of the tokens that end at a fixed direction, in a cycle, or in
            neither, see [`~raptor_hf.dynamics.Recurrence`].
    """

    phase: int
    layer: int
    speed: dict[str, list[float]]
    norm: dict[str, list[float]]
    agreement: dict[str, list[float]]
    ends: dict[str, dict[str, float]]


@dataclass(frozen=True)
class IterationStudy:
    """Both of the above on the same images.

    Attributes:
        phases (`list[int]`): layers of each phase.
        lengths (`list[LengthEffect]`), iterations (`list[PhaseIteration]`): by phase.
        base_accuracy (`float`, *optional*): of the untouched model.
        num_images (`int`): images measured.
    """

    phases: list[int]
    lengths: list[LengthEffect]
    iterations: list[PhaseIteration]
    base_accuracy: float | None
    num_images: int

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values for strict JSON; numbers that are not finite become `None`."""
        return plain(asdict(self))


def measure_phase_lengths(
    model: Model,
    batches: Iterable[Batch],
    phases: Phases | Sequence[int],
    *,
    offsets: Sequence[int] = OFFSETS,
    num_iterations: int = 32,
    tolerance: float = 1e-2,
    head: Head | None = None,
) -> IterationStudy:
    """Gives each phase other lengths, and iterates its last layer past its end.

    A shorter phase lacks its last layers, a longer one repeats its last layer (a Raptor's block at that layer's depth);
    the layers behind it stay as they are. A phase is never shorter than one layer.

    Args:
        model (`Teacher` or `RaptorModel`): put in evaluation mode.
        batches (`Iterable`), head (`Callable`, *optional*): as for [`measure_swaps`].
        phases (`Phases` or `Sequence[int]`): layers of each phase, such as `(7, 3, 2)`, contiguous.
        offsets (`Sequence[int]`): changes of length, not 0.
        num_iterations (`int`): applications past the phase's end, 4 or more.
        tolerance (`float`): angle in radians that counts as no turn.

    Raises:
        ValueError: if the phases are not those of the model or not contiguous, an argument is out of range, there is no
            image, or labels are missing.
    """
    repeats = checked_phases(model, phases)
    if 0 in offsets or num_iterations < 4:
        raise ValueError(f"offsets={list(offsets)}, num_iterations={num_iterations}: leave 0 out, use 4 or more.")
    layout = layout_of(model)
    ends = [sum(repeats[: index + 1]) for index in range(len(repeats))]
    chosen = [(phase, offset) for phase in range(len(repeats)) for offset in offsets if repeats[phase] + offset >= 1]
    sums = torch.zeros(len(chosen), len(layout.groups), 2, dtype=torch.float64)
    walks = [_Walk(layout.groups, num_iterations) for _ in repeats]
    hits, base_hits, num_images = [0] * len(chosen), 0, 0
    for pixel_values, labels in unpacked(batches, needs_labels=head is not None):
        states = base_states(model, pixel_values)
        base_hits += head_hits(model, states[-1], labels, head)
        for index, (phase, offset) in enumerate(chosen):
            end = ends[phase]
            order = [end] * offset + list(range(end + 1, num_layers_of(model) + 1))
            final = run_layers(model, states[end + min(offset, 0)], order)[-1]
            sums[index] += group_sums(final, states[-1], layout)
            hits[index] += head_hits(model, final, labels, head)
        for walk, end in zip(walks, ends, strict=True):
            path = run_layers(model, states[end], [end] * num_iterations)
            for name in layout.groups:
                walk.update(name, [layout.select(state, name) for state in path], tolerance)
        num_images += len(pixel_values)
    lengths = [
        LengthEffect(*choice, group_cosines(sums[index], layout), hits[index] / num_images if head else None)
        for index, choice in enumerate(chosen)
    ]
    iterations = [
        PhaseIteration(phase, end, **walk.result()) for phase, (walk, end) in enumerate(zip(walks, ends, strict=True))
    ]
    return IterationStudy(repeats, lengths, iterations, base_hits / num_images if head else None, num_images)


class _Walk:
    """Sums over the images of what [`PhaseIteration`] holds of one phase."""

    def __init__(self, groups: Sequence[str], num_iterations: int) -> None:
        zeros = torch.zeros(num_iterations + 1, dtype=torch.float64)
        self.turned = {name: zeros.clone()[1:] for name in groups}
        self.norms = {name: zeros.clone() for name in groups}
        self.directions: dict[str, torch.Tensor | float] = dict.fromkeys(groups, 0.0)
        self.ends = {name: dict.fromkeys(("fixed", "cycle", "none"), 0.0) for name in groups}
        self.num_images = 0

    def update(self, group: str, path: list[torch.Tensor], tolerance: float) -> None:
        """Adds a batch: the states behind the phase and after each application, `(batch_size, num_tokens, D)`."""
        batch_size = len(path[0])
        self.num_images += batch_size if group == next(iter(self.turned)) else 0
        for number, (before, after) in enumerate(itertools.pairwise(path)):
            self.turned[group][number] += angle(before, after).mean(dim=1).sum().cpu()
        first = torch.linalg.vector_norm(path[0].cpu().double(), dim=-1)
        for number, state in enumerate(path):
            ratio = torch.linalg.vector_norm(state.cpu().double(), dim=-1) / first
            self.norms[group][number] += ratio.mean(dim=1).sum()
        means = torch.stack([normalise(normalise(state).mean(dim=1)).sum(dim=0).cpu() for state in path])
        self.directions[group] = self.directions[group] + means
        for name, share in recurrence(path, tolerance=tolerance).shares().items():
            self.ends[group][name] += share * batch_size

    def result(self) -> dict[str, Any]:
        """Fields of [`PhaseIteration`]."""
        count = self.num_images
        agreement = {
            name: (torch.linalg.vector_norm(torch.as_tensor(total), dim=-1) / count).tolist()
            for name, total in self.directions.items()
        }
        return {
            "speed": {name: (total / count).tolist() for name, total in self.turned.items()},
            "norm": {name: (total / count).tolist() for name, total in self.norms.items()},
            "agreement": agreement,
            "ends": {name: {key: value / count for key, value in shares.items()} for name, shares in self.ends.items()},
        }


def checked_phases(model: Model, phases: Phases | Sequence[int]) -> list[int]:
    """Layers of each phase, if the phases are runs that make up the model's depth.

    Raises:
        ValueError: if not.
    """
    phases = phases if isinstance(phases, Phases) else Phases.from_repeats(phases)
    num_layers = num_layers_of(model)
    if not phases.is_contiguous or len(phases.block_schedule) != num_layers:
        raise ValueError(
            f"phases {phases} are not runs of layers that make up all {num_layers} of this model; give the layers of "
            "each, such as (7, 3, 2)."
        )
    return list(phases.repeats)
