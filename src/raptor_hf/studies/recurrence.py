"""Is a phase one recurrent map? Beyond the paper: lengths, iteration past the end, maps of spans, exponents.

The Block-Recurrent Hypothesis says that the layers of a phase are one block applied again and again. Four measures of
how literally that holds, on the same model and images: what happens where the phase is shorter or longer, where its
last layer leads when it goes on, how well one linear map stands for the phase, and how fast neighbouring states part.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..dynamics import SPAN_METHODS, SpanMap, SpanMapEstimator, compare_tokens
from ..interventions import OFFSETS, Batch, Head, Model, base_states, lyapunov_exponents, measure_phase_lengths
from ..interventions.iterations import checked_phases
from ..interventions.runs import (
    first_images,
    group_cosines,
    group_sums,
    head_hits,
    layout_of,
    plain,
    run_layers,
    unpacked,
)
from ..phases import Phases
from ..tokens import TokenLayout


def study_recurrence(
    model: Model,
    batches: Iterable[Batch],
    phases: Phases | Sequence[int],
    *,
    offsets: Sequence[int] = OFFSETS,
    num_iterations: int = 32,
    tolerance: float = 1e-2,
    ridge: float | None = 0.1,
    num_exponents: int = 3,
    num_pushed: int = 8,
    seed: int = 0,
    head: Head | None = None,
) -> dict[str, Any]:
    """Measures the phases of one model.

    Three passes over the images, with `num_iterations` more applications per phase, then `num_pushed` of them for the
    exponents.

    Args:
        model (`Teacher` or `RaptorModel`): put in evaluation mode.
        batches (`Iterable`), head (`Callable`, *optional*): as for [`~raptor_hf.interventions.measure_swaps`];
            iterated four times.
        phases (`Phases` or `Sequence[int]`): layers of each phase, such as `(7, 3, 2)`, contiguous.
        offsets (`Sequence[int]`), num_iterations (`int`), tolerance (`float`): as for
            [`~raptor_hf.interventions.measure_phase_lengths`].
        ridge (`float`, *optional*): as for [`measure_span_maps`]; `None` for no maps.
        num_exponents (`int`): as for [`~raptor_hf.interventions.lyapunov_exponents`]; 0 for none.
        num_pushed (`int`): images of the exponents, the first ones.
        seed (`int`): of their displacements.

    Returns:
        `dict`: [`~raptor_hf.interventions.IterationStudy.to_dict`], with `"spans"` of [`measure_span_maps`] and
        `"exponents"` of [`~raptor_hf.interventions.LyapunovExponents.to_dict`], both `None` where they are not wanted;
        plain values for strict JSON.

    Raises:
        ValueError: if the phases are not those of the model or not contiguous, an argument is out of range, there is no
            image, or labels are missing.
    """
    phases = phases if isinstance(phases, Phases) else Phases.from_repeats(phases)
    if num_exponents < 0 or num_pushed < 1:
        raise ValueError(f"num_exponents={num_exponents}, num_pushed={num_pushed}: use 0 or more, and 1 or more.")
    study = measure_phase_lengths(
        model, batches, phases, offsets=offsets, num_iterations=num_iterations, tolerance=tolerance, head=head
    )
    spans = None if ridge is None else measure_span_maps(model, batches, phases, ridge=ridge, head=head)
    exponents = None
    if num_exponents > 0:
        images = first_images(batches, num_pushed)
        exponents = lyapunov_exponents(model, images, num_exponents, seed=seed).to_dict()
    return plain({**study.to_dict(), "tolerance": tolerance, "ridge": ridge, "spans": spans, "exponents": exponents})


def measure_span_maps(
    model: Model,
    batches: Iterable[Batch],
    phases: Phases | Sequence[int],
    *,
    ridge: float = 0.1,
    head: Head | None = None,
) -> dict[str, Any] | None:
    """Lets one linear map stand in for each phase: fitted on every second image, tried on the others.

    A map per token group, see [`~raptor_hf.dynamics.SpanMap`]: the step map taken `n_j` times, the map of both ends,
    and no map at all. Each is compared with the state that the phase makes, and with the last state, which the layers
    behind the phase make of the mapped tokens of all groups.

    Args:
        model (`Teacher` or `RaptorModel`), batches (`Iterable`), phases, head: as for [`study_recurrence`]; batches are
            iterated twice.
        ridge (`float`): penalty, as a share of the mean of the Gram matrix's diagonal, of the tokens at the head of the
            phase.

    Returns:
        `dict`: `"phases"`, per phase `"state"` (method, then group, then `cosine` and `relative_error` behind the
        phase) and `"final"` (method, then `cosine` by group at the last state, and `accuracy` or `None`);
        `"base_accuracy"` of the untouched model or `None`, and `"num_images"` that were tried. `None` for fewer than
        two images.

    Raises:
        ValueError: as [`study_recurrence`].
    """
    phases = phases if isinstance(phases, Phases) else Phases.from_repeats(phases)
    repeats = checked_phases(model, phases)
    ends = list(itertools.accumulate(repeats))
    layout = layout_of(model)
    maps = _fitted_maps(model, batches, layout, repeats, ends, ridge)
    totals = [{method: _Totals(layout) for method in SPAN_METHODS} for _ in repeats]
    base_hits, num_images = 0, 0
    for states, labels in _every_second(model, batches, 1, needs_labels=head is not None):
        base_hits += head_hits(model, states[-1], labels, head)
        num_images += len(states[0])
        for end, length, chosen, total in zip(ends, repeats, maps, totals, strict=True):
            for method in SPAN_METHODS:
                start = states[end - length]
                parts = [chosen[group].predict(layout.select(start, group), method) for group in layout.groups]
                mapped = torch.cat(parts, dim=-2)
                final = [mapped, *run_layers(model, mapped, range(end + 1, len(states)))][-1]
                total[method].update(mapped, states[end], final, states[-1])
                total[method].hits += head_hits(model, final, labels, head)
    if num_images == 0:
        return None
    return {
        "phases": [
            {
                "state": {method: total.state() for method, total in methods.items()},
                "final": {
                    method: {
                        "cosine": group_cosines(total.final, layout),
                        "accuracy": total.hits / num_images if head else None,
                    }
                    for method, total in methods.items()
                },
            }
            for methods in totals
        ],
        "base_accuracy": base_hits / num_images if head else None,
        "num_images": num_images,
    }


class _Totals:
    """Sums over images of what one map of one phase comes to."""

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.behind = torch.zeros(len(layout.groups), 3, dtype=torch.float64)  # tokens, cosine, relative error
        self.final = torch.zeros(len(layout.groups), 2, dtype=torch.float64)
        self.hits = 0

    def update(self, mapped: torch.Tensor, target: torch.Tensor, final: torch.Tensor, base: torch.Tensor) -> None:
        """Adds a batch: the mapped state and what it stands for, the last state from it and the untouched one."""
        for row, group in zip(self.behind, self.layout.groups, strict=True):
            found = compare_tokens(self.layout.select(mapped, group), self.layout.select(target, group))
            means = torch.tensor([1.0, found.cosine, found.relative_error], dtype=torch.float64)
            row += found.num_tokens * means
        self.final += group_sums(final, base, self.layout)

    def state(self) -> dict[str, dict[str, float]]:
        """Means behind the phase, by group."""
        return {
            group: {"cosine": float(row[1] / row[0]), "relative_error": float(row[2] / row[0])}
            for group, row in zip(self.layout.groups, self.behind, strict=True)
        }


def _every_second(
    model: Model, batches: Iterable[Batch], first: int, needs_labels: bool = False
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor | None]]:
    """States and labels of every second image, from image `first` (0 or 1) on; batches without any are left out."""
    count = 0
    for pixel_values, labels in unpacked(batches, needs_labels):
        own = slice((count + first) % 2, None, 2)
        count += len(pixel_values)
        if len(pixel_values[own]):
            chosen = labels[own] if labels is not None else None
            yield list(base_states(model, pixel_values[own])), chosen


def _fitted_maps(
    model: Model, batches: Iterable[Batch], layout: TokenLayout, repeats: list[int], ends: list[int], ridge: float
) -> list[dict[str, SpanMap]]:
    """Maps of each phase by token group, from the even images."""
    estimators = [{group: SpanMapEstimator() for group in layout.groups} for _ in repeats]
    squares = [dict.fromkeys(layout.groups, 0.0) for _ in repeats]
    for states, _ in _every_second(model, batches, 0):
        for end, length, fits, sums in zip(ends, repeats, estimators, squares, strict=True):
            for group, estimator in fits.items():
                span = [layout.select(state, group) for state in states[end - length : end + 1]]
                estimator.update(span)
                sums[group] += float(span[0].cpu().double().square().sum()) / span[0].shape[-1]
    return [
        {group: estimator.fit(ridge * sums[group]) for group, estimator in fits.items()}
        for fits, sums in zip(estimators, squares, strict=True)
    ]
