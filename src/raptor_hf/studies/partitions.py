"""How many phases, how surely their boundaries are found, and whether they matter (arXiv 2512.19941, App. B)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arguments import DistillationArguments
from ..data import PixelDataset
from ..modeling_raptor import RaptorModel
from ..phases import Phases, find_phases, partition_score, random_partitions
from ..results import read_json, write_json
from ..runs import distill
from ..similarity import layer_similarity
from ..teachers import Teacher
from ..tokens import TokenLayout

SCHEMES = ("max-cut", "bisection", "random contiguous", "random")
RECORD_FILE = "study.json"


def partition_scores(similarity: Any, **options: Any) -> dict[str, Any]:
    """Score of the best partition for every number of blocks, and where its growth bends.

    Args:
        similarity (array-like of shape `(L, L)`): from [`~raptor_hf.layer_similarity`].
        options: of [`~raptor_hf.find_phases`].

    Returns:
        `dict`: `"scores"`, for `k` = 1..L as text keys; `"elbow"`, the `k` whose score lies highest above the straight
        line from `k` = 1 to `k` = L, a hint and no test; `None` for fewer than three layers or scores all alike.

    Raises:
        ValueError: as `find_phases`.
    """
    matrix = np.asarray(similarity, dtype=np.float64)
    options = {"min_length": 1, **options}
    scores = [
        partition_score(matrix, find_phases(matrix, count, **options), options.get("score", "weighted_mean"))
        for count in range(1, len(matrix) + 1)
    ]
    line = np.linspace(scores[0], scores[-1], len(scores))
    above = np.asarray(scores) - line
    has_elbow = len(scores) > 2 and above.max() > 1e-12
    return {
        "scores": {str(count): float(score) for count, score in enumerate(scores, start=1)},
        "elbow": int(above.argmax()) + 1 if has_elbow else None,
    }


def boundary_stability(
    hidden_states: Iterable[Sequence[torch.Tensor]],
    num_blocks: Sequence[int],
    *,
    tokens: str = "all",
    layout: TokenLayout | None = None,
    num_resamples: int = 200,
    seed: int = 0,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """How often each boundary is found when images are drawn anew (bootstrap over images).

    Args:
        hidden_states, tokens, layout: as for [`~raptor_hf.layer_similarity`].
        num_blocks (`Sequence[int]`): numbers of blocks.
        num_resamples (`int`): sets of images, each as large as the whole, drawn with replacement.
        seed (`int`): of the draw.
        options: of [`~raptor_hf.find_phases`].

    Returns:
        `dict[str, dict[str, float]]`: per number of blocks, for every last layer of a phase that was found in any
        resample, the share of resamples with it.

    Raises:
        ValueError: if `num_resamples` is below 1, or as `layer_similarity` and `find_phases`.
    """
    if num_resamples < 1:
        raise ValueError(f"num_resamples={num_resamples} is below 1; draw at least once, better 200 times.")
    layout = getattr(hidden_states, "layout", None) if layout is None else layout
    every = [
        layer_similarity([[state[image : image + 1] for state in states]], tokens, layout)
        for states in hidden_states
        for image in range(len(states[0]))
    ]
    if not every:
        raise ValueError("hidden_states holds no image; pass at least one batch.")
    images = np.stack(every)
    draws = np.random.default_rng(seed).multinomial(len(images), [1 / len(images)] * len(images), num_resamples)
    means = np.tensordot(draws / len(images), images, axes=1)
    shares: dict[str, dict[str, float]] = {}
    for count in num_blocks:
        found = [end for mean in means for end in np.cumsum(find_phases(mean, count, **options).repeats)[:-1].tolist()]
        shares[str(count)] = {str(end): found.count(end) / num_resamples for end in sorted(set(found))}
    return shares


def partition_schemes(
    similarity: Any, num_blocks: int, num_random: int = 3, *, min_length: int | None = None, seed: int = 0
) -> dict[str, list[Phases]]:
    """The partitions that are compared: max-cut, bisection if it differs, and random ones (App. B, Fig. 3).

    Args:
        similarity (array-like of shape `(L, L)`): from [`~raptor_hf.layer_similarity`].
        num_blocks (`int`): `k`.
        num_random (`int`): of each kind, fewer where fewer exist. The non-contiguous ones ("random") keep the max-cut's
            numbers of layers per block.
        min_length (`int`, *optional*): as for [`~raptor_hf.find_phases`].
        seed (`int`): of the draw.

    Raises:
        ValueError: as `find_phases` and [`~raptor_hf.phases.random_partitions`].
    """
    best = find_phases(similarity, num_blocks, min_length=min_length)
    halved = find_phases(similarity, num_blocks, method="bisection", min_length=min_length)
    num_layers = len(best.block_schedule)
    options: dict[str, Any] = {"seed": seed, "exclude": best}
    schemes = {
        "max-cut": [best],
        "bisection": [halved] if halved.block_schedule != best.block_schedule else [],
        "random contiguous": random_partitions(num_layers, num_blocks, num_random, **options),
        "random": random_partitions(
            num_layers, num_blocks, num_random, contiguous=False, keep_counts=best.repeats, **options
        ),
    }
    return {name: partitions for name, partitions in schemes.items() if partitions}


def distil_partitions(
    teacher: Teacher,
    schemes: Mapping[str, Sequence[Phases]],
    arguments: Callable[[str, int], DistillationArguments],
    train: PixelDataset,
    evaluation: PixelDataset,
    output_dir: str | Path,
    score: Callable[[Any], float] | None = None,
    *,
    seeds: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """Distils a Raptor of each partition with the same budget, and measures it (App. B, Fig. 3).

    What is finished stands in `output_dir` and is not done again; a run that was interrupted goes on.

    Args:
        teacher, train, evaluation: as for [`~raptor_hf.runs.distill`].
        schemes: as from [`partition_schemes`].
        arguments (`Callable`): of a run, from its folder and seed.
        output_dir: folder of the runs' folders.
        score (`Callable`, *optional*): Raptor to accuracy, 0..1.
        seeds (`Sequence[int]`): Raptors of each partition.

    Returns:
        `list[dict]`: per run `"scheme"`, `"block_schedule"`, `"seed"`, and what [`finished_run`] adds.

    Raises:
        ValueError: as the trainer does.
    """
    records = []
    for scheme, partitions in schemes.items():
        for partition in partitions:
            for seed in seeds:
                schedule = list(partition.block_schedule)
                name = f"{scheme.replace(' ', '-')}-{'.'.join(map(str, schedule))}"
                folder = Path(output_dir) / name / f"seed{seed}"
                own = {"scheme": scheme, "block_schedule": schedule, "seed": seed}
                run = partial(distill, teacher, partition, train=train, evaluation=evaluation, name=name)
                records.append(finished_run(folder, own, run, partial(arguments, str(folder), seed), score))
    return records


def finished_run(
    folder: Path,
    labels: Mapping[str, Any],
    run: Callable[..., tuple[RaptorModel, dict[str, Any]]],
    arguments: Callable[[], DistillationArguments],
    score: Callable[[Any], float] | None,
) -> dict[str, Any]:
    """The record of one distillation, `run(args=arguments())`, which is done only if `folder` has none.

    Returns:
        `dict`: `labels`, `"accuracy"` of the Raptor (`None` without `score`), and R2 of all tokens: `"r2"` (mean over
        layers), `"r2_last"`, and `"r2_layers"`.
    """
    if not (folder / RECORD_FILE).is_file():
        model, record = run(args=arguments())
        curve = record["fidelity"]["r2"]["all"]
        values = {"r2": sum(curve) / len(curve), "r2_last": curve[-1], "r2_layers": curve}
        accuracy = None if score is None else score(model.eval())
        write_json(folder / RECORD_FILE, {**labels, "accuracy": accuracy, **values})
    return read_json(folder / RECORD_FILE)
