"""Layers of a model replaced by other layers of it: which swaps there are, and what each does (Fig. 15)."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import torch

from ..phases import Phases
from .runs import (
    Batch,
    Head,
    Model,
    base_states,
    checked_layer,
    group_cosines,
    group_sums,
    head_hits,
    layout_of,
    num_layers_of,
    plain,
    run_layers,
    unpacked,
)

SCOPES = ("intra", "inter")

Swap = tuple[tuple[int, int], ...]
"""Replacements `(layer, source)`, both counted from 1: layer `layer` is made by layer `source` instead."""


@dataclass(frozen=True)
class SwapEffect:
    """What one swap does to the model's output.

    Attributes:
        scope (`str`): `"intra"`, `"inter"`, or `"given"` for a swap of the caller's own.
        swap (`tuple[tuple[int, int], ...]`): the replacements `(layer, source)`, see [`Swap`].
        cosine (`dict[str, float]`): per token group and `"all"`, the mean over images and tokens of the cosine between
            state `L` with and without the swap; 1 is no effect.
        accuracy (`float`, *optional*): share of images that the head classifies rightly; `None` without a head.
    """

    scope: str
    swap: Swap
    cosine: dict[str, float]
    accuracy: float | None = None

    @property
    def num_swapped(self) -> int:
        """Layers replaced."""
        return len(self.swap)


@dataclass(frozen=True)
class SwapStudy:
    """Effects of many swaps on the same images (arXiv 2512.19941, Fig. 15).

    Attributes:
        effects (`list[SwapEffect]`): one per swap, in the order of measurement.
        num_images (`int`): images that each swap was measured on.
        num_layers (`int`): `L`.
        base_accuracy (`float`, *optional*): of the untouched model; `None` without a head.
    """

    effects: list[SwapEffect]
    num_images: int
    num_layers: int
    base_accuracy: float | None = None

    def summary(self) -> list[dict[str, Any]]:
        """One dict per scope and number of replaced layers: how many swaps, and mean, standard deviation over swaps
        (of the sample; `None` for one swap), minimum and maximum of each group's cosine and of the accuracy.
        """
        kinds: dict[tuple[str, int], list[SwapEffect]] = {}
        for effect in self.effects:
            kinds.setdefault((effect.scope, effect.num_swapped), []).append(effect)
        rows = []
        for (scope, num_swapped), effects in kinds.items():
            cosine = {group: _spread([effect.cosine[group] for effect in effects]) for group in effects[0].cosine}
            accuracies = [effect.accuracy for effect in effects if effect.accuracy is not None]
            rows.append(
                {
                    "scope": scope,
                    "num_swapped": num_swapped,
                    "num_swaps": len(effects),
                    "cosine": cosine,
                    "accuracy": _spread(accuracies) if accuracies else None,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values for strict JSON, the summary included: tuples become lists, NaN becomes `None`."""
        return plain({**asdict(self), "summary": self.summary()})


def count_swaps(phases: Phases | Sequence[int], num_swapped: int, scope: str = "intra") -> int:
    """How many swaps [`layer_swaps`] chooses from.

    Args:
        phases, num_swapped, scope: as for [`layer_swaps`].

    Raises:
        ValueError: as [`layer_swaps`], but 0 is an answer here.
    """
    return _completions(_sources(phases, scope), _checked_count(num_swapped))[0][num_swapped]


def layer_swaps(
    phases: Phases | Sequence[int],
    num_swapped: int = 1,
    scope: str = "intra",
    *,
    max_swaps: int | None = None,
    seed: int = 0,
) -> list[Swap]:
    """Swaps of `num_swapped` layers (arXiv 2512.19941, Fig. 15: 1, 2 and 3), all of them or a sample.

    A swap takes `num_swapped` distinct layers and gives each of them one other layer of its own phase (`"intra"`) or
    one of another phase (`"inter"`). Two layers may get the same source, and a source may itself be replaced.

    Args:
        phases (`Phases` or `Sequence[int]`): layers of each phase, such as `(7, 3, 2)`; with non-contiguous [`Phases`],
            the layers of a block are one phase.
        num_swapped (`int`): layers to replace.
        scope (`str`): `"intra"` or `"inter"`.
        max_swaps (`int`, *optional*): where more exist, that many are drawn, uniformly and without replacement.
        seed (`int`): of that draw.

    Returns:
        `list[Swap]`: sorted, without repetition; the same arguments give the same list.

    Raises:
        ValueError: if a number is below 1, the scope is unknown, or no such swap exists.
    """
    sources = _sources(phases, scope)
    table = _completions(sources, _checked_count(num_swapped))
    total = table[0][num_swapped]
    if total == 0:
        layers = sum(bool(choices) for choices in sources)
        raise ValueError(
            f"num_swapped={num_swapped}: only {layers} layers have another layer of scope {scope!r}; swap fewer."
        )
    if max_swaps is None or max_swaps >= total:
        ranks: Iterable[int] = range(total)
    elif max_swaps < 1:
        raise ValueError(f"max_swaps={max_swaps} is below 1; ask for at least one swap, or None for all.")
    else:
        ranks = random.Random(seed).sample(range(total), max_swaps)
    return sorted(_swap_of_rank(rank, sources, table, num_swapped) for rank in ranks)


def swapped_states(model: Model, states: Sequence[torch.Tensor], swap: Swap) -> list[torch.Tensor]:
    """States `0..L` of a run in which some layers are replaced; those before the first replaced layer are taken over.

    Args:
        model (`Teacher` or `RaptorModel`): the model.
        states (`Sequence[torch.Tensor]`): its own states `0..L`, each `(batch_size, seq_length, hidden_size)`, as
            [`base_states`] gives; those behind the first replaced layer are not looked at.
        swap (`Swap`): replacements `(layer, source)`.

    Raises:
        ValueError: if the swap is empty, replaces a layer twice or by itself, or names a layer that does not exist; or
            the number of states is wrong.
    """
    sources = _checked_swap(model, swap)
    num_layers = num_layers_of(model)
    if len(states) != num_layers + 1:
        raise ValueError(f"{len(states)} states of a model of {num_layers} layers; pass states 0..{num_layers}.")
    first = min(sources)
    rest = run_layers(model, states[first - 1], (sources.get(n, n) for n in range(first, num_layers + 1)))
    return [*states[: first - 1], *rest]


def measure_swaps(
    model: Model,
    batches: Iterable[Batch],
    swaps: Mapping[str, Sequence[Swap]] | Sequence[Swap],
    head: Head | None = None,
) -> SwapStudy:
    """Final-state cosine, and with a head the accuracy, of every swap over the same images (arXiv 2512.19941, Fig. 15).

    Cost: one run of the model per batch, and per swap and batch the layers from the first replaced one on.

    Args:
        model (`Teacher` or `RaptorModel`): the model; put in evaluation mode.
        batches (`Iterable`): pixel values `(batch_size, num_channels, height, width)`, or dicts with `"pixel_values"`
            and, needed with a head, `"labels"` `(batch_size,)` of class numbers.
        swaps (`Mapping[str, Sequence[Swap]]` or `Sequence[Swap]`): by scope, as [`layer_swaps`] gives them; a plain
            sequence has the scope `"given"`.
        head (`Callable`, *optional*): takes the final LayerNorm's output `(batch_size, seq_length, hidden_size)` to
            logits `(batch_size, num_labels)`: the model's own head, or a linear probe. Runs without gradients.

    Raises:
        ValueError: if there is no batch or no swap, a swap does not fit the model, labels are missing, or the head's
            output has another shape.
    """
    named = dict(swaps) if isinstance(swaps, Mapping) else {"given": swaps}
    chosen = [(scope, swap) for scope, group in named.items() for swap in group]
    if not chosen:
        raise ValueError("no swap was given; take some from layer_swaps, or name one such as ((3, 2),).")
    for _, swap in chosen:
        _checked_swap(model, swap)
    layout = layout_of(model)
    sums = torch.zeros(len(chosen), len(layout.groups), 2, dtype=torch.float64)
    hits, base_hits, num_images = [0] * len(chosen), 0, 0
    for pixel_values, labels in unpacked(batches, needs_labels=head is not None):
        states = base_states(model, pixel_values)
        num_images += len(pixel_values)
        base_hits += head_hits(model, states[-1], labels, head)
        for index, (_, swap) in enumerate(chosen):
            final = swapped_states(model, states, swap)[-1]
            sums[index] += group_sums(final, states[-1], layout)
            hits[index] += head_hits(model, final, labels, head)
    effects = [
        SwapEffect(scope, swap, group_cosines(sums[index], layout), hits[index] / num_images if head else None)
        for index, (scope, swap) in enumerate(chosen)
    ]
    return SwapStudy(effects, num_images, num_layers_of(model), base_hits / num_images if head else None)


def _sources(phases: Phases | Sequence[int], scope: str) -> list[list[int]]:
    """For each layer, the layers that may replace it; all counted from 1."""
    if scope not in SCOPES:
        raise ValueError(f"scope={scope!r} is not known; use one of {', '.join(map(repr, SCOPES))}.")
    phases = phases if isinstance(phases, Phases) else Phases.from_repeats(phases)
    blocks = list(enumerate(phases.block_schedule, start=1))
    same = scope == "intra"
    return [
        [source for source, other in blocks if source != layer and (other == block) == same] for layer, block in blocks
    ]


def _completions(sources: Sequence[Sequence[int]], num_swapped: int) -> list[list[int]]:
    """`table[i][n]`: ways to replace `n` of the layers from the `i`-th (from 0) on."""
    table = [[1] + [0] * num_swapped]
    for choices in reversed(sources):
        after = table[0]
        table.insert(0, [after[n] + (len(choices) * after[n - 1] if n else 0) for n in range(num_swapped + 1)])
    return table


def _swap_of_rank(
    rank: int, sources: Sequence[Sequence[int]], table: Sequence[Sequence[int]], num_swapped: int
) -> Swap:
    """The swap number `rank` of all, in an order in which each occurs once."""
    swap, left = [], num_swapped
    for index, choices in enumerate(sources):
        kept = table[index + 1][left]  # those that leave this layer as it is come first
        if rank < kept:
            continue
        choice, rank = divmod(rank - kept, table[index + 1][left - 1])
        swap.append((index + 1, choices[choice]))
        left -= 1
        if left == 0:
            break
    return tuple(swap)


def _checked_count(num_swapped: int) -> int:
    if num_swapped < 1:
        raise ValueError(f"num_swapped={num_swapped} is below 1; replace at least one layer.")
    return num_swapped


def _checked_swap(model: Model, swap: Swap) -> dict[int, int]:
    """The source of each replaced layer."""
    sources = dict(swap)
    if not swap or len(sources) < len(swap) or any(layer == source for layer, source in swap):
        raise ValueError(
            f"swap={swap!r}: pass pairs (layer, source) of which no two have the same layer and none replaces a layer "
            "by itself, such as ((3, 2),)."
        )
    for layer in (*sources, *sources.values()):
        checked_layer(model, layer)
    return sources


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": fmean(values),
        "std": stdev(values) if len(values) > 1 else None,
        "min": min(values),
        "max": max(values),
    }
