"""Whether states come to rest, or come back, when one map is applied again and again (beyond the Raptor paper)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .geometry import angle

MAX_PERIOD = 4


@dataclass(frozen=True)
class Recurrence:
    """Where a rollout ends.

    Attributes:
        return_angle (`torch.Tensor` of shape `(max_period, ...)`): angle in radians between the last state of each
            token and the one `p = 1, ..., max_period` steps before it; of the tokens' shape, float64.
        period (`torch.Tensor` of shape `(...)`): smallest `p` whose angle is within the tolerance, 1 for a fixed
            direction, 0 for none; int64.
    """

    return_angle: torch.Tensor
    period: torch.Tensor

    def shares(self) -> dict[str, float]:
        """Share of the tokens by period: `"fixed"`, `"cycle"` (of 2 or more), `"none"`."""
        count = max(self.period.numel(), 1)
        fixed, cycle = int((self.period == 1).sum()), int((self.period > 1).sum())
        return {"fixed": fixed / count, "cycle": cycle / count, "none": 1 - (fixed + cycle) / count}


def recurrence(states: Sequence[torch.Tensor], max_period: int = MAX_PERIOD, tolerance: float = 1e-2) -> Recurrence:
    """Compares the last state of a rollout with those before it, token by token, as directions.

    Args:
        states (sequence of `torch.Tensor` of shape `(..., hidden_size)`): the rollout, `max_period + 1` states or more.
        max_period (`int`): longest cycle to look for.
        tolerance (`float`): angle in radians that counts as none.

    Raises:
        ValueError: if there are too few states, shapes differ, or a number is out of range.
    """
    if max_period < 1 or not 0 < tolerance < float("inf"):
        raise ValueError(f"max_period={max_period}, tolerance={tolerance}: use 1 or more, and an angle above 0.")
    if len(states) <= max_period:
        raise ValueError(f"{len(states)} states show no period of {max_period}; apply the map {max_period} times.")
    if len({state.shape for state in states[-max_period - 1 :]}) != 1:
        raise ValueError("states of a rollout have different shapes; pass the same tokens after each step.")
    angles = torch.stack([angle(states[-1], states[-1 - number]) for number in range(1, max_period + 1)])
    met = angles <= tolerance
    first = met.int().argmax(dim=0) + 1  # the first of equal maxima
    return Recurrence(angles, torch.where(met.any(dim=0), first, 0))
