"""The solver against every partition, and the splits published for DINOv2-B."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from raptor_hf.phases import (
    SCORES,
    Phases,
    find_phases,
    partition_score,
    random_partitions,
)

DATA = Path(__file__).parent / "data" / "dinov2_b_cosine_distance.json"
PUBLISHED = 1.0 - np.array(json.loads(DATA.read_text())["cosine_distance"])
TRIPLES = [(L, k, m) for L in range(1, 13) for k in range(1, L + 1) for m in (1, 2, 3) if k * m <= L]


# ---------------------------------------------------------------------------------------------------------------------
# Phases


def test_contiguous_phases_say_what_they_are():
    phases = Phases.from_repeats((7, 3, 2))
    assert phases.block_schedule == (0,) * 7 + (1,) * 3 + (2,) * 2
    assert (phases.num_layers, phases.num_blocks, phases.repeats) == (12, 3, (7, 3, 2))
    assert phases.is_contiguous
    assert phases.boundaries == [(0, 7), (7, 10), (10, 12)]
    assert str(phases) == "1-7 | 8-10 | 11-12"
    assert str(Phases.from_repeats((2, 1))) == "1-2 | 3"


def test_non_contiguous_phases_say_what_they_are():
    phases = Phases.from_schedule([0, 0, 1, 0])
    assert not phases.is_contiguous
    assert phases.repeats == (3, 1)
    assert phases.boundaries == [(0, 2), (2, 3), (3, 4)]
    assert str(phases) == "1-2 (block 0) | 3 (block 1) | 4 (block 0)"
    backwards = Phases.from_schedule([1, 1, 0])
    assert not backwards.is_contiguous
    assert backwards.repeats == (1, 2)


def test_phases_go_to_strict_json_and_come_back():
    phases = find_phases(PUBLISHED, 3)
    record = json.loads(json.dumps(phases.to_dict(), allow_nan=False))
    assert record == phases.to_dict()
    assert record["boundaries"] == [[0, 7], [7, 10], [10, 12]]
    assert (record["repeats"], record["method"], record["score_name"]) == ([7, 3, 2], "dp", "weighted_mean")
    assert Phases.from_schedule(record["block_schedule"]).block_schedule == phases.block_schedule
    assert Phases((0, 1), score=math.nan).to_dict()["score"] is None
    assert Phases.from_repeats((1,)).to_dict()["score"] is None


def test_phases_hold_plain_ints():
    phases = Phases.from_schedule(np.array([0, 1, 1]))
    assert [type(block) for block in phases.block_schedule] == [int] * 3
    assert phases == Phases.from_repeats(np.array([1, 2]))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], r"block_schedule=\(\) does not use each block"),
        ([0, 2], r"block_schedule=\(0, 2\) does not use each block"),
        ([1, 1], "does not use each block"),
        ([0, -1], "block_schedule entry=-1 is not a whole number of at least 0"),
        ([0, 1.0], r"block_schedule entry=1\.0 is not a whole number"),
        ([False, True], "block_schedule entry=False is not a whole number"),
    ],
)
def test_bad_schedules_are_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        Phases.from_schedule(schedule)


@pytest.mark.parametrize(
    ("repeats", "message"),
    [
        ((), r"repeats=\(\) is empty"),
        ((3, 0), "repeats entry=0 is not a whole number of at least 1"),
        ((3, 1.5), r"repeats entry=1\.5 is not a whole number"),
    ],
)
def test_bad_repeats_are_refused(repeats, message):
    with pytest.raises(ValueError, match=message):
        Phases.from_repeats(repeats)


# ---------------------------------------------------------------------------------------------------------------------
# The solver against every partition


def compositions(num_layers, num_blocks, min_length):
    """Every tuple of `num_blocks` lengths of at least `min_length`, lexicographically from the smallest."""
    lengths = range(min_length, num_layers + 1)
    if num_blocks == 1:
        return [(num_layers,)] if num_layers >= min_length else []
    return [
        (first, *rest) for first in lengths for rest in compositions(num_layers - first, num_blocks - 1, min_length)
    ]


def block_value(matrix, start, end, score):
    """A block's score by its definition; exact (scaled by lcm(1..12)^2) where the matrix holds Python integers."""
    block, n = matrix[start:end, start:end], end - start
    if score == "offdiag":
        return block.sum() - np.trace(block)
    power = 1 if score == "weighted_mean" else 2
    return block.sum() * 27720**2 // n**power if matrix.dtype == object else block.sum() / n**power


def brute_force(matrix, num_blocks, min_length, score):
    """Best lengths over every composition; scores within 1e-9 relative are tied, the largest tuple wins."""
    num_layers = len(matrix)
    value = {
        (i, j): block_value(matrix, i, j, score)
        for i in range(num_layers)
        for j in range(i + min_length, num_layers + 1)
    }
    candidates = compositions(num_layers, num_blocks, min_length)
    totals = []
    for lengths in candidates:
        edges = [0, *itertools.accumulate(lengths)]
        totals.append(sum(value[pair] for pair in itertools.pairwise(edges)))
    best = max(totals)
    margin = 0 if matrix.dtype == object else 1e-9 * abs(best)
    return max(lengths for lengths, total in zip(candidates, totals, strict=True) if total >= best - margin)


def symmetric(rng, size, kind="random"):
    """Symmetric matrix: normal, of small integers (many exact ties), or with scores about the tie margin apart."""
    matrix = rng.integers(-1, 2, size=(size, size)) if kind == "tie-heavy" else rng.normal(size=(size, size))
    matrix = 1 + 2e-9 * matrix if kind == "near-ties" else matrix
    matrix = np.triu(matrix) + np.triu(matrix, 1).T
    return matrix.astype(object) if kind == "tie-heavy" else matrix


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", ["random", "tie-heavy", "near-ties"])
def test_solver_equals_brute_force(score, kind):
    rng = np.random.default_rng(0)
    for num_layers, num_blocks, min_length in TRIPLES:
        for _ in range(3 if num_layers < 9 else 1):
            matrix = symmetric(rng, num_layers, kind)
            expected = brute_force(matrix, num_blocks, min_length, score)
            phases = find_phases(matrix.astype(float), num_blocks, score=score, min_length=min_length)
            assert phases.repeats == expected, (num_layers, num_blocks, min_length, matrix)
            assert phases.score == partition_score(matrix.astype(float), expected, score)


@pytest.mark.parametrize("score", SCORES)
def test_constant_similarity_is_resolved_as_brute_force_does(score):
    for num_layers, num_blocks, min_length in TRIPLES:
        ones = np.ones((num_layers, num_layers))
        expected = brute_force(ones.astype(int).astype(object), num_blocks, min_length, score)
        assert find_phases(ones, num_blocks, score=score, min_length=min_length).repeats == expected
        zeros = find_phases(ones * 0, num_blocks, score=score, min_length=min_length)
        assert zeros.repeats == (num_layers - (num_blocks - 1) * min_length, *[min_length] * (num_blocks - 1))


def test_ties_within_rounding_go_to_the_largest_tuple():
    assert abs(partition_score(PUBLISHED, (7, 3, 2)) - partition_score(PUBLISHED, (6, 4, 2))) < 1e-12
    for noise in (0.0, 1e-13, -1e-13):
        matrix = PUBLISHED.copy()
        matrix[6, 6] += noise
        assert find_phases(matrix, 3).repeats == (7, 3, 2)
    matrix[6, 7:10] += 1e-6
    matrix[7:10, 6] += 1e-6
    assert find_phases(matrix, 3).repeats == (6, 4, 2)


@pytest.mark.parametrize("num_blocks", range(1, 5))
def test_every_number_of_blocks_of_four_layers(num_blocks):
    matrix = symmetric(np.random.default_rng(1), 4)
    for method in ("dp", "bisection"):
        cosines = np.clip(matrix, -1, 1)
        phases = find_phases(cosines, num_blocks, method=method, min_length=1)
        assert phases.num_blocks == num_blocks
        assert phases.is_contiguous
        assert sum(phases.repeats) == 4
    assert find_phases(matrix, 1).boundaries == [(0, 4)]
    assert find_phases(matrix, 4).boundaries == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_one_layer_is_one_phase():
    assert find_phases([[1.0]], 1).repeats == (1,)


def test_default_minimum_length_is_two_where_it_fits():
    matrix = np.eye(6)
    matrix[1:, 1:] = 1.0
    assert find_phases(matrix, 2, min_length=1).repeats == (1, 5)
    assert find_phases(matrix, 2).repeats == (2, 4)
    assert min(find_phases(matrix, 4).repeats) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Published splits and properties


@pytest.mark.parametrize("method", ["dp", "bisection"])
@pytest.mark.parametrize("repeats", [(7, 5), (7, 3, 2), (4, 3, 3, 2)])
def test_published_splits(method, repeats):
    phases = find_phases(PUBLISHED, len(repeats), method=method)
    assert phases.repeats == repeats
    assert phases.method == method
    assert phases.score == pytest.approx(partition_score(PUBLISHED, repeats))


@pytest.mark.parametrize(("threshold", "repeats"), [(0.2, (7, 5)), (0.10, (7, 3, 2)), (0.09, (4, 3, 3, 2))])
def test_published_thresholds(threshold, repeats):
    assert find_phases(PUBLISHED, method="bisection", threshold=threshold).repeats == repeats


def test_published_scores():
    assert partition_score(PUBLISHED, (7, 3, 2)) == pytest.approx(9.59)
    assert partition_score(PUBLISHED, (6, 4, 2)) == pytest.approx(9.59)


@pytest.mark.parametrize(
    ("score", "repeats"),
    [("mean", (2, 10)), ("mean", (2, 2, 8)), ("offdiag", (10, 2)), ("offdiag", (8, 2, 2))],
)
def test_other_scores_are_degenerate_as_documented(score, repeats):
    assert find_phases(PUBLISHED, len(repeats), score=score).repeats == repeats


def test_threshold_ends():
    assert find_phases(PUBLISHED, method="bisection", threshold=1.0).repeats == (12,)
    everything = find_phases(PUBLISHED, method="bisection", threshold=0.0).repeats
    assert max(everything) < 4  # segments of four are still cut
    assert min(everything) >= 2
    assert find_phases(np.ones((8, 8)), method="bisection", threshold=0.0).repeats == (8,)  # no distance to gain


def test_bisection_ties_go_to_the_latest_cut():
    assert find_phases(np.ones((8, 8)), 3, method="bisection").repeats == (4, 2, 2)


@pytest.mark.parametrize("num_layers", [5, 7, 9, 11, 13])
def test_bisection_ties_within_rounding_go_to_the_latest_cut(num_layers):
    for distance in (0.1, 0.3, 0.7):  # both middle cuts separate equally many pairs
        similarity = np.full((num_layers, num_layers), 1.0 - distance)
        expected = ((num_layers + 1) // 2, num_layers // 2)
        assert find_phases(similarity, 2, method="bisection").repeats == expected


def test_bisection_cuts_where_a_loop_says():
    rng = np.random.default_rng(2)
    for _ in range(20):
        matrix = np.clip(symmetric(rng, 9), -1, 1)
        gains = [sum(1 - matrix[i, j] for i in range(c) for j in range(c, 9)) for c in range(2, 8)]
        cut = 2 + int(np.argmax(gains))
        assert find_phases(matrix, 2, method="bisection").repeats == (cut, 9 - cut)


@pytest.mark.parametrize("score", SCORES)
def test_reversing_the_layers_keeps_the_objective(score):
    rng = np.random.default_rng(3)
    for num_blocks in (1, 2, 3, 5):
        matrix = symmetric(rng, 11)
        forward = find_phases(matrix, num_blocks, score=score)
        backward = find_phases(matrix[::-1, ::-1], num_blocks, score=score)
        assert forward.score == pytest.approx(backward.score, rel=1e-12)
        assert forward.repeats == backward.repeats[::-1]


@pytest.mark.parametrize("scale", [1e-12, 0.5, 1e12])
def test_scale_does_not_matter(scale):
    for num_blocks in (2, 3, 4):
        scaled = find_phases(PUBLISHED * scale, num_blocks)
        assert scaled.repeats == find_phases(PUBLISHED, num_blocks).repeats
        assert scaled.score == pytest.approx(scale * find_phases(PUBLISHED, num_blocks).score)


@pytest.mark.parametrize("repeats", [(4, 6, 2), (2, 2, 8), (3, 3, 3, 3)])
@pytest.mark.parametrize("method", ["dp", "bisection"])
def test_planted_phases_are_found(repeats, method):
    rng = np.random.default_rng(4)
    blocks = np.repeat(np.arange(len(repeats)), repeats)
    similarity = 0.9 ** (3.0 * np.abs(blocks[:, None] - blocks))
    noise = 0.01 * rng.normal(size=similarity.shape)
    similarity = similarity - 0.05 + (noise + noise.T) / 2
    np.fill_diagonal(similarity, 1.0)
    assert find_phases(similarity, len(repeats), method=method).repeats == repeats


def test_solver_is_deterministic_and_leaves_its_input_alone():
    matrix = PUBLISHED.copy()
    assert find_phases(matrix, 3) == find_phases(matrix, 3)
    assert np.array_equal(matrix, PUBLISHED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_any_float_type_are_taken(dtype):
    tensor = torch.tensor(PUBLISHED, dtype=dtype, requires_grad=True)
    reference = tensor.detach().double().numpy()
    assert find_phases(tensor, 4).repeats == (4, 3, 3, 2)
    assert find_phases(tensor, 3) == find_phases(reference, 3) == find_phases(reference.tolist(), 3)


def test_partition_score_of_any_assignment_equals_a_loop():
    matrix = symmetric(np.random.default_rng(5), 7)
    phases = Phases.from_schedule([0, 1, 0, 2, 2, 1, 0])
    groups = [[layer for layer in range(7) if phases.block_schedule[layer] == block] for block in range(3)]
    sums = [sum(matrix[i, j] for i in group for j in group) for group in groups]
    traces = [sum(matrix[i, i] for i in group) for group in groups]
    expected = {
        "weighted_mean": sum(s / len(g) for s, g in zip(sums, groups, strict=True)),
        "mean": sum(s / len(g) ** 2 for s, g in zip(sums, groups, strict=True)),
        "offdiag": sum(sums) - sum(traces),
    }
    for score in SCORES:
        assert partition_score(matrix, phases, score) == pytest.approx(expected[score], rel=1e-12)
    assert partition_score(np.ones((7, 7)), phases) == pytest.approx(7.0)


# ---------------------------------------------------------------------------------------------------------------------
# Wrong input


def with_entry(value):
    matrix = np.eye(3)
    matrix[0, 2] = matrix[2, 0] = value
    return matrix


@pytest.mark.parametrize(
    ("similarity", "message"),
    [
        (with_entry(np.nan), "similarity of layers 1 and 3 is NaN or inf"),
        (with_entry(np.inf), "is NaN or inf"),
        (np.ones((2, 3)), r"similarity is float64 of shape \(2, 3\)"),
        (np.ones(4), r"of shape \(4,\)"),
        (np.ones((2, 2, 2)), r"of shape \(2, 2, 2\)"),
        (np.ones((0, 0)), r"of shape \(0, 0\)"),
        (np.eye(3) + np.triu(np.ones((3, 3)), 1), "similarity is asymmetric by up to 1"),
        (np.eye(3) * 1j, "similarity is complex128"),
        (torch.eye(3) * 1j, "similarity is complex128"),
        (np.eye(3).astype(object), "similarity is object"),
        (np.full((2, 2), "a"), "similarity is <U1"),
    ],
)
def test_bad_matrices_are_refused(similarity, message):
    with pytest.raises(ValueError, match=message):
        find_phases(similarity, 1)
    with pytest.raises(ValueError, match=message):
        partition_score(similarity, (3,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0 is not a whole number of at least 1"),
        ({"num_blocks": -1}, "num_blocks=-1"),
        ({"num_blocks": 2.0}, r"num_blocks=2\.0 is not a whole number"),
        ({"num_blocks": 13}, "num_blocks=13 x min_length=1 exceeds 12 layers"),
        ({"num_blocks": 5, "min_length": 3}, "num_blocks=5 x min_length=3 exceeds 12 layers"),
        ({"num_blocks": 2, "min_length": 0}, "min_length=0 is not a whole number"),
        ({"num_blocks": 2, "method": "greedy"}, "method='greedy' is not known; use one of 'dp', 'bisection'"),
        ({"num_blocks": 2, "score": "sum"}, "score='sum' is not known; use one of 'weighted_mean', 'mean', 'offdiag'"),
        ({}, "num_blocks=None, threshold=None: 'dp' takes the former"),
        ({"threshold": 0.1}, "num_blocks=None, threshold=0.1: 'dp' takes"),
        ({"num_blocks": 2, "threshold": 0.1}, "num_blocks=2, threshold=0.1: 'dp' takes"),
        ({"method": "bisection"}, "num_blocks=None, threshold=None"),
        ({"method": "bisection", "num_blocks": 2, "threshold": 0.1}, "num_blocks=2, threshold=0.1"),
        ({"method": "bisection", "threshold": 1.5}, r"threshold=1\.5 is not within 0\.\.1"),
        ({"method": "bisection", "threshold": math.nan}, "threshold=nan is not within"),
        ({"method": "bisection", "num_blocks": 6}, "bisection stops at 5 segments, short of 6; use method='dp'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        find_phases(PUBLISHED, **options)


def test_bisection_wants_cosines():
    with pytest.raises(ValueError, match=r"similarity has 2 > 1, but bisection needs cosines"):
        find_phases(2 * np.eye(4), 2, method="bisection")


def test_partition_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"phases=1-2 \| 3 are not any number of blocks of 12 layers"):
        partition_score(PUBLISHED, (2, 1))
    with pytest.raises(ValueError, match="score='sum' is not known"):
        partition_score(PUBLISHED, (7, 5), "sum")


# ---------------------------------------------------------------------------------------------------------------------
# Random partitions


def all_assignments(num_layers, num_blocks):
    """Every non-contiguous assignment that uses all blocks, numbered by first use."""
    found = set()
    for schedule in itertools.product(range(num_blocks), repeat=num_layers):
        first = list(dict.fromkeys(schedule))
        if first == list(range(num_blocks)) and list(schedule) != sorted(schedule):
            found.add(schedule)
    return found


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("num_blocks", [2, 3, 4])
def test_random_partitions_are_distinct_valid_and_without_the_excluded_one(contiguous, num_blocks):
    exclude = find_phases(PUBLISHED, num_blocks)
    partitions = random_partitions(12, num_blocks, contiguous=contiguous, exclude=exclude, seed=1)
    schedules = {phases.block_schedule for phases in partitions}
    assert len(partitions) == len(schedules) == 10
    assert exclude.block_schedule not in schedules
    for phases in partitions:
        assert (phases.num_layers, phases.num_blocks, phases.method) == (12, num_blocks, "random")
        assert phases.is_contiguous == contiguous
        assert list(dict.fromkeys(phases.block_schedule)) == list(range(num_blocks))


@pytest.mark.parametrize("contiguous", [True, False])
def test_random_partitions_follow_the_seed(contiguous):
    draw = [random_partitions(12, 3, contiguous=contiguous, seed=seed) for seed in (5, 5, 6)]
    assert draw[0] == draw[1] != draw[2]


def test_where_fewer_exist_all_are_returned():
    few = random_partitions(12, 2, 10, min_length=2, exclude=(7, 5))
    assert sorted(phases.repeats for phases in few) == [(n, 12 - n) for n in range(2, 11) if n != 7]
    assert len(random_partitions(12, 2, 10, min_length=2)) == 9
    assert len(random_partitions(12, 2, 20)) == 11
    assert (
        len(random_partitions(12, 2, 20, min_length=2, exclude=(1, 11))) == 9
    )  # not in the pool: nothing to leave out
    assert random_partitions(3, 3, exclude=(1, 1, 1)) == []
    assert random_partitions(3, 3, contiguous=False) == []
    assert random_partitions(5, 1, contiguous=False) == []
    assert random_partitions(3, 2, keep_counts=(2, 1), contiguous=False)[0].block_schedule == (0, 1, 0)


@pytest.mark.parametrize(("num_layers", "num_blocks"), [(4, 2), (5, 3), (6, 4), (6, 5)])
def test_all_partitions_are_those_that_exist(num_layers, num_blocks):
    for min_length in (1, 2):
        if num_blocks * min_length <= num_layers:
            drawn = random_partitions(num_layers, num_blocks, 10_000, min_length=min_length)
            assert sorted(p.repeats for p in drawn) == compositions(num_layers, num_blocks, min_length)
    every = all_assignments(num_layers, num_blocks)
    drawn = random_partitions(num_layers, num_blocks, 10_000, contiguous=False)
    assert {phases.block_schedule for phases in drawn} == every
    for keep in {tuple(sorted(lengths)) for lengths in compositions(num_layers, num_blocks, 1)}:
        drawn = random_partitions(num_layers, num_blocks, 10_000, contiguous=False, keep_counts=keep)
        wanted = {s for s in every if sorted(np.bincount(s)) == sorted(keep)}
        assert {phases.block_schedule for phases in drawn} == wanted


def test_excluding_a_shuffle_numbers_it_by_first_use():
    every = all_assignments(5, 2)
    banned = Phases.from_schedule([1, 0, 1, 1, 0])
    drawn = random_partitions(5, 2, 1000, contiguous=False, exclude=banned)
    assert {phases.block_schedule for phases in drawn} == every - {(0, 1, 0, 0, 1)}


def test_kept_counts_are_kept():
    phases = Phases.from_repeats((7, 3, 2))
    for keep in (phases, (7, 3, 2)):
        for drawn in random_partitions(12, 3, contiguous=False, keep_counts=keep):
            assert sorted(drawn.repeats) == [2, 3, 7]


@pytest.mark.parametrize("contiguous", [True, False])
def test_draws_are_uniform(contiguous):
    counts = {}
    for seed in range(800):
        (drawn,) = random_partitions(5, 3, 1, contiguous=contiguous, seed=seed)
        counts[drawn.block_schedule] = counts.get(drawn.block_schedule, 0) + 1
    expected = 800 / len(counts)
    assert len(counts) == (6 if contiguous else 19)
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < 45  # chi-square: p < 0.001 at 18 degrees


def test_deep_models_with_nearly_as_many_blocks_are_drawn_at_once():
    partitions = random_partitions(48, 46, 5, contiguous=False)
    assert [phases.num_blocks for phases in partitions] == [46] * 5
    assert len(random_partitions(300, 10, 5, contiguous=False)) == 5


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1), {}, "num_layers=0 is not a whole number of at least 1"),
        ((12, 0), {}, "num_blocks=0 is not a whole number"),
        ((12, 13), {}, "num_blocks=13 x min_length=1 exceeds 12 layers"),
        ((12, 5), {"min_length": 3}, "num_blocks=5 x min_length=3 exceeds 12 layers"),
        ((12, 3, 0), {}, "count=0 is not a whole number of at least 1"),
        ((12, 3), {"keep_counts": (7, 3, 2)}, "contiguous=True takes no keep_counts"),
        ((12, 3), {"contiguous": False, "min_length": 2}, "contiguous=False takes no min_length"),
        ((12, 3), {"contiguous": False, "keep_counts": (7, 5)}, r"keep_counts=1-7 \| 8-12 are not 3 blocks of 12"),
        ((12, 3), {"exclude": (7, 3, 3)}, r"exclude=1-7 \| 8-10 \| 11-13 are not 3 blocks of 12 layers"),
    ],
)
def test_bad_requests_for_partitions_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        random_partitions(*arguments, **options)
