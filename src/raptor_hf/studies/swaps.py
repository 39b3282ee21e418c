"""Layers replaced within and between phases (arXiv 2512.19941, Fig. 15)."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..interventions import SCOPES, Batch, Head, Model, count_swaps, layer_swaps, measure_swaps
from ..interventions.runs import num_layers_of
from ..phases import Phases


def study_swaps(
    model: Model,
    batches: Iterable[Batch],
    phases: Phases | Sequence[int],
    *,
    num_swapped: Sequence[int] = (1, 2, 3),
    max_swaps: int | None = 50,
    seed: int = 0,
    head: Head | None = None,
) -> dict[str, Any]:
    """Replaces layers by others of the same phase (intra) and of other phases (inter), on the same images.

    Args:
        model (`Teacher` or `RaptorModel`): put in evaluation mode.
        batches (`Iterable`), head (`Callable`, *optional*): as for [`~raptor_hf.interventions.measure_swaps`].
        phases (`Phases` or `Sequence[int]`): layers of each phase, such as `(7, 3, 2)`.
        num_swapped (`Sequence[int]`): how many layers at once; a number that a scope has no swap of is left out.
        max_swaps (`int`, *optional*): swaps of each number and scope, drawn where more exist; `None` for all.
        seed (`int`): of the draw.

    Returns:
        `dict`: [`~raptor_hf.interventions.SwapStudy.to_dict`] with `"phases"`, and `"num_possible"` of each scope and
        number; plain values for strict JSON.

    Raises:
        ValueError: if the phases are not those of the model, there is no swap or no image, or labels are missing.
    """
    phases = phases if isinstance(phases, Phases) else Phases.from_repeats(phases)
    schedule, num_layers = list(phases.block_schedule), num_layers_of(model)
    if len(schedule) != num_layers:
        raise ValueError(f"phases {phases} are {len(schedule)} layers of {num_layers}; give phases of all of them.")
    possible = {scope: {str(n): count_swaps(phases, n, scope) for n in num_swapped} for scope in SCOPES}
    swaps = {
        scope: [
            swap
            for n in num_swapped
            if possible[scope][str(n)]
            for swap in layer_swaps(phases, n, scope, max_swaps=max_swaps, seed=seed)
        ]
        for scope in SCOPES
    }
    study = measure_swaps(model, batches, swaps, head)
    repeats = list(phases.repeats) if phases.is_contiguous else None
    return {"phases": repeats, "block_schedule": schedule, "num_possible": possible, **study.to_dict()}
