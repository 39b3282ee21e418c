"""Similarity of layers in, schedule out: which layers of a trained ViT belong to one recurrent block.

Layers of a trained ViT fall into contiguous phases within which the states hardly turn (arXiv 2512.19941, Sec. 2).
Here the similarity of layers ([`raptor_hf.similarity`]) is cut into phases (the paper's dynamic programme, or the
bisection of the authors' notebook) and compared with random partitions. No model, no trainer: matrices in, [`Phases`]
out. Layers, states and blocks are counted as [`raptor_hf.tokens`] says.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .tokens import schedule_segments

TIE_TOLERANCE = 1e-9  # relative; scores closer than this are tied

# Score of a block of `n` layers, from the sum of its n x n similarities and of their diagonal (float64 arrays).
_GAINS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "weighted_mean": lambda sums, traces, lengths: sums / lengths,
    "mean": lambda sums, traces, lengths: sums / lengths**2,
    "offdiag": lambda sums, traces, lengths: sums - traces,
}
SCORES = tuple(_GAINS)


@dataclass(frozen=True)
class Phases:
    """An assignment of layers to blocks, and how it was found.

    Attributes:
        block_schedule (`tuple[int, ...]`): block of each layer, `block_schedule[l - 1]` for layer `l`, from 0.
        score (`float`, *optional*): objective reached, `None` if none was computed.
        method (`str`): `"dp"`, `"bisection"`, `"random"` or `"given"`.
        score_name (`str`, *optional*): which objective `score` is, see [`partition_score`].

    Raises:
        ValueError: if the schedule (or the repeats) is empty, its ids are not the whole numbers `0..k-1`, each used,
            or the repeats are not whole numbers of at least 1.
    """

    block_schedule: tuple[int, ...]
    score: float | None = None
    method: str = "given"
    score_name: str | None = None

    def __post_init__(self) -> None:
        schedule = tuple(_whole("block_schedule entry", entry, 0, "count from 0") for entry in self.block_schedule)
        if len(set(schedule)) != max(schedule, default=0) + 1:
            raise ValueError(f"block_schedule={schedule} does not use each block 0..k-1; give one block per layer.")
        object.__setattr__(self, "block_schedule", schedule)

    @classmethod
    def from_schedule(cls, block_schedule: Sequence[int]) -> "Phases":
        """Phases from the block id of each layer, contiguous or not; errors as the class."""
        return cls(tuple(block_schedule))

    @classmethod
    def from_repeats(cls, repeats: Sequence[int]) -> "Phases":
        """Contiguous phases from the layers of each block: `(7, 3, 2)` is `1-7 | 8-10 | 11-12`; errors as above."""
        lengths = [_whole("repeats entry", length, 1, "each block makes at least one layer") for length in repeats]
        if not lengths:
            raise ValueError("repeats=() is empty; give the number of layers of each block, such as (7, 3, 2).")
        return cls(tuple(np.repeat(range(len(lengths)), lengths).tolist()))

    @property
    def num_layers(self) -> int:
        """`L`, the number of layers."""
        return len(self.block_schedule)

    @property
    def num_blocks(self) -> int:
        """`k`, the number of blocks."""
        return max(self.block_schedule) + 1

    @property
    def repeats(self) -> tuple[int, ...]:
        """Layers made by each block, in order of block id: the run lengths `n_j` if the phases are contiguous."""
        return tuple(np.bincount(self.block_schedule).tolist())

    @property
    def is_contiguous(self) -> bool:
        """Whether each block is one run of layers and the blocks come in the order of their ids."""
        return all(left <= right for left, right in pairwise(self.block_schedule))

    @property
    def boundaries(self) -> list[tuple[int, int]]:
        """Half-open ranges of states, one per segment: `(7, 10)` starts at state 7 and makes layers 8, 9 and 10."""
        return [(segment.start_layer, segment.end_layer) for segment in schedule_segments(self.block_schedule)]

    def __str__(self) -> str:
        """`1-7 | 8-10 | 11-12`; a block id follows each segment if the phases are not contiguous."""
        names = []
        for block, start, end in schedule_segments(self.block_schedule):
            layers = f"{start + 1}-{end}" if end - start > 1 else f"{end}"
            names.append(layers if self.is_contiguous else f"{layers} (block {block})")
        return " | ".join(names)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON: lists, and `None` for a score that is not finite."""
        names = ("num_blocks", "num_layers", "is_contiguous", "method", "score_name")
        return {
            "block_schedule": list(self.block_schedule),
            "repeats": list(self.repeats),
            "boundaries": [list(boundary) for boundary in self.boundaries],
            "score": self.score if self.score is not None and math.isfinite(self.score) else None,
            **{name: getattr(self, name) for name in names},
        }


def find_phases(
    similarity: Any,
    num_blocks: int | None = None,
    *,
    method: str = "dp",
    score: str = "weighted_mean",
    min_length: int | None = None,
    threshold: float | None = None,
) -> Phases:
    """Cut the layers into contiguous phases of high similarity (arXiv 2512.19941, App. A.1).

    `method="dp"` finds the exact maximum of [`partition_score`] over all partitions into `num_blocks` segments, in
    O(k L^2) time. Unlike the paper's printed formulas, it weights a segment's mean by its length (else degenerate) and
    its last cut starts at `(t - 1)*m` (`t*m - 1` misses optima for `m >= 2`). Scores within 1e-9 of the maximum
    (relative to it or the largest entry) are tied, and the lexicographically largest tuple of lengths wins.

    `method="bisection"` is the authors' notebook: over all segments, the cut that separates the largest sum of cosine
    distances `1 - S` is made (a tie goes to the latest cut), until there are `num_blocks` segments or the gain is no
    more than `threshold` times the sum over all pairs of layers. Cuts are contiguous, while the notebook tries any
    bipartition. Both sides keep `min_length` layers, so that by default segments shorter than 4 stay whole.

    Args:
        similarity: `(L, L)` real symmetric matrix: array, list, or tensor of any float type on any device.
        num_blocks: `k`, between 1 and `L`; bisection takes either this or `threshold`.
        method: `"dp"` or `"bisection"`.
        score: `"weighted_mean"`, `"mean"` or `"offdiag"`; for bisection only the score that is reported.
        min_length: least layers of a segment; by default 2, or 1 if `2 * num_blocks > L`.
        threshold: share of the total distance, 0..1 (the notebook's 0.2, 0.10 and 0.09 give 2, 3 and 4 blocks).

    Raises:
        ValueError: if the matrix is not real, finite, square and symmetric; if an option is unknown, out of range or
            does not suit the method; for bisection, if an entry exceeds 1 or its cuts cannot reach `num_blocks`.
    """
    matrix = _checked_similarity(similarity)
    _check_option("score", score, SCORES)
    _check_option("method", method, ("dp", "bisection"))
    min_length = _checked_lengths(len(matrix), 1 if num_blocks is None else num_blocks, min_length)
    if method == "dp" and num_blocks is not None and threshold is None:
        repeats = _dynamic_programme(matrix, num_blocks, score, min_length)
    elif method == "bisection" and (num_blocks is None) != (threshold is None):
        repeats = _bisection(matrix, num_blocks, threshold, min_length)
    else:
        raise ValueError(f"num_blocks={num_blocks}, threshold={threshold}: 'dp' takes the former, 'bisection' one.")
    found = Phases.from_repeats(repeats)
    return replace(found, score=partition_score(matrix, found, score), method=method, score_name=score)


def partition_score(similarity: Any, phases: Phases | Sequence[int], score: str = "weighted_mean") -> float:
    """Sum over blocks of the similarity among a block's own layers (arXiv 2512.19941, App. A.1).

    With `sum(A)` the sum of `S` over all pairs of the `n` layers `A` of a block, contiguous or not:

    - `"weighted_mean"`: `sum(A) / n`, as the paper's text says. Divided by `L`: mean intra-block similarity by layer.
    - `"mean"`: `sum(A) / n^2`, as its formula says. Divided by `k`: mean intra-block similarity by block. Degenerate
      as an objective: a long incoherent block costs no more than a short one (2|10, 2|2|8 on the published matrix).
    - `"offdiag"`: `sum(A)` without the diagonal. Degenerate too, for long blocks have most pairs (10|2, 8|2|2).

    Args:
        similarity: as [`find_phases`] takes it.
        phases: [`Phases`], or the lengths of contiguous ones such as `(7, 3, 2)`.
        score: one of the three above.

    Raises:
        ValueError: if the matrix, phases or score are invalid, or the phases have not the matrix's number of layers.
    """
    matrix = _checked_similarity(similarity)
    _check_option("score", score, SCORES)
    phases = _matching_phases("phases", phases, len(matrix))
    member = np.eye(phases.num_blocks)[:, list(phases.block_schedule)]
    sums = ((member @ matrix) * member).sum(axis=1)
    return float(_GAINS[score](sums, member @ np.diag(matrix), member.sum(axis=1)).sum())


def random_partitions(
    num_layers: int,
    num_blocks: int,
    count: int = 10,
    *,
    contiguous: bool = True,
    min_length: int = 1,
    keep_counts: Phases | Sequence[int] | None = None,
    exclude: Phases | Sequence[int] | None = None,
    seed: int = 0,
) -> list[Phases]:
    """Distinct random partitions, uniform and without replacement: the baselines of arXiv 2512.19941, App. B, Fig. 3.

    Contiguous ones are compositions of `L` into `k` lengths. Non-contiguous ones ("random shuffle") use all blocks,
    are numbered in order of first use and told apart by which layers share a block; those that happen to be contiguous
    are left out, as they belong to the other baseline. Where fewer exist than asked, all are returned (possibly none).

    Args:
        num_layers, num_blocks: `L` and `k`.
        count, contiguous: how many are wanted, and of which baseline.
        min_length: least layers of a segment, contiguous only. The paper's baselines use 1.
        keep_counts: layers per block to shuffle, `(7, 3, 2)` or [`Phases`], non-contiguous only. Numbering by first
            use may permute them.
        exclude: partition never returned: the max-cut's [`Phases`], or its lengths.
        seed: of the numpy generator; the same seed gives the same list.

    Raises:
        ValueError: if a number is out of range, an option does not apply, or a given partition does not fit `L`, `k`.
    """
    min_length = _checked_lengths(_whole("num_layers", num_layers, 1, "count the layers"), num_blocks, min_length)
    _whole("count", count, 1, "ask for at least one partition")
    if (keep_counts is not None) if contiguous else (min_length != 1):
        raise ValueError(f"{contiguous=} takes no {'keep_counts' if contiguous else 'min_length'}; drop one of them.")
    keep = () if keep_counts is None else _matching_phases("keep_counts", keep_counts, num_layers, num_blocks).repeats
    banned = () if exclude is None else _matching_phases("exclude", exclude, num_layers, num_blocks).block_schedule
    completions = _completions(num_layers - num_blocks * (min_length - 1), num_blocks, contiguous)
    if keep:  # arrangements less the contiguous ones; blocks of one size are interchangeable
        available = math.factorial(num_layers) // math.prod(map(math.factorial, keep)) - math.factorial(num_blocks)
        available //= math.prod(map(math.factorial, Counter(keep).values()))
    else:
        available = completions[-1][0] - (0 if contiguous else math.comb(num_layers - 1, num_blocks - 1))
    rng, found = np.random.default_rng(seed), dict[tuple[int, ...], None]()
    while len(found) < min(count + 1, available):  # one to spare, since the excluded partition may be among them
        if keep:
            schedule = _first_use(rng.permutation(np.repeat(range(num_blocks), keep)).tolist())
        else:
            schedule = _draw(rng, completions, contiguous, min_length)
        if contiguous or list(schedule) != sorted(schedule):
            found[schedule] = None
    return [Phases(schedule, method="random") for schedule in found if schedule != _first_use(banned)][:count]


def _whole(name: str, value: Any, low: int, remedy: str) -> int:
    """`value` as an int of at least `low`; numpy integers pass, booleans and floats do not."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ValueError(f"{name}={value!r} is not a whole number of at least {low}; {remedy}.")
    return int(value)


def _check_option(name: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise ValueError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, options))}.")


def _checked_lengths(num_layers: int, num_blocks: int, min_length: int | None) -> int:
    """Minimum length to use for `num_blocks` segments of `num_layers` layers."""
    num_blocks = _whole("num_blocks", num_blocks, 1, "ask for at least one block")
    default = 2 if 2 * num_blocks <= num_layers else 1
    min_length = default if min_length is None else _whole("min_length", min_length, 1, "a segment has a layer")
    if num_blocks * min_length > num_layers:
        raise ValueError(f"num_blocks={num_blocks} x min_length={min_length} exceeds {num_layers} layers; lower one.")
    return min_length


def _checked_similarity(similarity: Any) -> np.ndarray:
    """The matrix as an exactly symmetric float64 array on the CPU."""
    if isinstance(similarity, torch.Tensor):
        similarity = similarity.detach().cpu().to(torch.promote_types(similarity.dtype, torch.float64)).numpy()
    matrix = np.asarray(similarity)
    if matrix.dtype.kind not in "fiu" or matrix.ndim != 2 or len(set(matrix.shape)) > 1 or matrix.size == 0:
        raise ValueError(f"similarity is {matrix.dtype} of shape {matrix.shape}; pass real numbers of shape (L, L).")
    matrix = matrix.astype(np.float64)
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0] + 1
        raise ValueError(f"similarity of layers {row} and {column} is NaN or inf; look for non-finite states there.")
    gap = float(np.abs(matrix - matrix.T).max())
    if gap > 1e-6 * np.abs(matrix).max():
        raise ValueError(f"similarity is asymmetric by up to {gap:.3g}; pass (S + S.T) / 2 if that is meant.")
    return (matrix + matrix.T) / 2


def _matching_phases(name: str, given: Phases | Sequence[int], num_layers: int, num_blocks: int = 0) -> Phases:
    """`given` as phases of `num_layers` layers and, unless 0, `num_blocks` blocks."""
    phases = given if isinstance(given, Phases) else Phases.from_repeats(given)
    if phases.num_layers != num_layers or num_blocks not in (0, phases.num_blocks):
        blocks = num_blocks or "any number of"
        raise ValueError(f"{name}={phases} are not {blocks} blocks of {num_layers} layers in all; make them agree.")
    return phases


def _dynamic_programme(matrix: np.ndarray, num_blocks: int, score: str, min_length: int) -> tuple[int, ...]:
    """Lengths of the best partition; among ties the lexicographically largest.

    `best[t, i]` is the best score of the layers after state `i` in `t` segments, -inf where they do not fit. It is
    built from the back; a walk from the front then takes the last end from which the maximum is still within reach.
    It stands for back-pointers, which would judge each tie alone and not against the margin left to the whole score.
    """
    states = np.arange(len(matrix) + 1)
    lengths = states - states[:, None]
    table = np.pad(matrix.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))  # table[i, j] = sum(matrix[:i, :j])
    sums = table.diagonal() - table - table.T + table.diagonal()[:, None]
    traces = np.append(0.0, np.diag(matrix).cumsum())
    gains = np.where(lengths < min_length, -np.inf, _GAINS[score](sums, traces - traces[:, None], lengths.clip(1)))
    best = np.full((num_blocks + 1, len(states)), -np.inf)
    best[0, -1] = 0.0
    for segments in range(1, num_blocks + 1):
        best[segments] = (gains + best[segments - 1]).max(axis=1)
    goal = best[num_blocks, 0] - TIE_TOLERANCE * max(abs(best[num_blocks, 0]), np.abs(matrix).max())
    edges, reached = [0], 0.0
    for segments in range(num_blocks - 1, -1, -1):
        totals = reached + gains[edges[-1]] + best[segments]
        end = int(np.flatnonzero(totals >= min(goal, totals.max()))[-1])  # min: rounding must not empty the set
        reached += gains[edges[-1], end]
        edges.append(end)
    return tuple(np.diff(edges).tolist())


def _bisection(matrix: np.ndarray, num_blocks: int | None, threshold: float | None, shortest: int) -> tuple[int, ...]:
    """Lengths after repeated best cuts; a cut's gain is the distance summed over the pairs it separates."""
    if matrix.max() > 1 + 1e-6:
        raise ValueError(f"similarity has {matrix.max():.6g} > 1, but bisection needs cosines; use method='dp'.")
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold} is not within 0..1; give a share of the total distance, such as 0.1.")
    distance = 1.0 - matrix
    table = np.pad(distance.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
    least_gain = -np.inf if threshold is None else threshold * np.triu(distance, 1).sum()
    edges = [0, len(matrix)]
    while num_blocks is None or len(edges) <= num_blocks:
        gains = np.full(len(matrix), -np.inf)
        for start, end in pairwise(edges):
            cut = np.arange(start + shortest, end - shortest + 1)
            gains[cut] = table[cut, end] - table[start, end] - table[cut, cut] + table[start, cut]
        if gains.max() <= least_gain:
            break
        tied = gains >= gains.max() - TIE_TOLERANCE * max(abs(gains.max()), np.abs(distance).max())
        edges = sorted([*edges, int(np.flatnonzero(tied)[-1])])
    if num_blocks is not None and len(edges) <= num_blocks:
        raise ValueError(f"bisection stops at {len(edges) - 1} segments, short of {num_blocks}; use method='dp'.")
    return tuple(np.diff(edges).tolist())


def _first_use(schedule: Sequence[int]) -> tuple[int, ...]:
    """Blocks numbered anew in order of first use: `(2, 0, 2)` becomes `(0, 1, 0)`."""
    blocks = list(dict.fromkeys(schedule))
    return tuple(map(blocks.index, schedule))


def _completions(num_layers: int, num_blocks: int, contiguous: bool) -> list[list[int]]:
    """`[r][j]`: ways to give `r` more layers a block so that all `k` get used, if blocks `0..j-1` are used by now."""
    table = [[0] * num_blocks + [1, 0]]
    for _ in range(num_layers):
        now, stays = table[-1], [min(used, 1) if contiguous else used for used in range(num_blocks + 1)]
        table.append([stay * now[used] + now[used + 1] for used, stay in enumerate(stays)] + [0])
    return table


def _draw(rng: np.random.Generator, table: list[list[int]], contiguous: bool, min_length: int) -> tuple[int, ...]:
    """Uniform partition, layer by layer: a new block opens with the share of the completions that open one here."""
    schedule: list[int] = []
    used = 0
    for now, rest in zip(table[:0:-1], table[-2::-1], strict=True):
        opens = rng.random() < rest[used + 1] / now[used]
        used += opens
        schedule.append(used - 1 if opens or contiguous else int(rng.integers(used)))
    lengths = np.bincount(schedule) + min_length - 1  # each segment gets back what the table left out
    return tuple(np.repeat(range(used), lengths).tolist()) if contiguous else tuple(schedule)
