"""Studies on tiny models: records against the libraries they come from."""

import json

import numpy as np
import pytest
import torch

from raptor_hf import DistillationArguments, Phases, find_phases, layer_similarity
from raptor_hf.dynamics import angle, measure_dynamics
from raptor_hf.interventions import base_states, layer_swaps, measure_swaps, sensitivity_curve
from raptor_hf.studies import (
    boundary_stability,
    compare_flows,
    distil_partitions,
    partition_schemes,
    partition_scores,
    study_dynamics,
    study_swaps,
)


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(count, 3, 28, 28, generator=generator), "labels": torch.arange(count) % 2}
        for count in (3, 2)
    ]


def test_a_teacher_has_its_measures_phases_and_paths(make_teacher, batches):
    teacher = make_teacher(num_hidden_layers=4)
    record = study_dynamics(teacher, batches, num_blocks=2, num_perturbed=4, epsilon=0.2)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    states = [base_states(teacher, batch["pixel_values"]) for batch in batches]
    measured = measure_dynamics(states, teacher.layout)
    assert record["groups"]["cls"]["norm"] == measured.to_dict()["groups"]["cls"]["norm"]
    assert record["num_images"] == 5
    assert record["similarity"] == layer_similarity(states).tolist()
    assert sum(record["phases"]) == 4
    assert len(record["phases"]) == 2
    assert record["block_schedule"] is None
    images = torch.cat([batch["pixel_values"] for batch in batches])[:4]
    curve = sensitivity_curve(teacher, [images], 0.2)
    assert record["sensitivity"]["per_eps"]["cls"] == pytest.approx(curve.curve("cls"), rel=1e-3)
    assert record["sensitivity"]["num_images"] == 4
    for group in ("cls", "registers", "patch"):
        paths = record["paths"]["classes"][group]["paths"]
        assert {name: len(path) for name, path in paths.items()} == {"class 0": 5, "class 1": 5}
        moved = record["paths"]["perturbed"][group]
        assert [len(moved["paths"][name]) for name in ("base", "perturbed")] == [5, 4]
        assert moved["state"] == 1


def test_a_raptor_has_its_own_phases_and_images_without_labels_no_class_paths(make_model, batches):
    model = make_model(block_schedule=[0, 0, 1, 1, 1])
    record = study_dynamics(model, [batch["pixel_values"] for batch in batches], num_perturbed=0, ranks=False)
    assert record["phases"] == [2, 3]
    assert record["block_schedule"] == [0, 0, 1, 1, 1]
    assert record["paths"] == {"classes": {}}
    assert "sensitivity" not in record
    assert "effective_rank" not in record["groups"]["cls"]


def test_flows_of_a_teacher_and_of_raptors(make_teacher, make_model, batches):
    teacher, model = make_teacher(), make_model()
    assert compare_flows(model, model, batches)["patch"] == [0] * 4
    angles = compare_flows(teacher, model, batches)
    images = torch.cat([batch["pixel_values"] for batch in batches])
    ours, theirs = base_states(teacher, images), base_states(model, images)
    expected = [float(angle(a[:, 1:5], b[:, 1:5]).mean()) for a, b in zip(ours, theirs, strict=True)]
    assert angles["registers"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"states \(L \+ 1, seq_length, hidden_size\) = \(4, 9, 32\) and \(6, 9, 32\)"):
        compare_flows(teacher, make_model(block_schedule=[0, 0, 1, 1, 1]), batches)
    with pytest.raises(ValueError, match=r"no batch of images"):
        compare_flows(teacher, model, [])


def test_swaps_of_all_numbers_and_scopes(make_model, batches):
    model = make_model(block_schedule=[0, 0, 1, 1, 1])
    record = study_swaps(model, batches, (2, 3), num_swapped=(1, 2), max_swaps=6)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["num_possible"] == {"intra": {"1": 8, "2": 25}, "inter": {"1": 12, "2": 57}}
    rows = {(row["scope"], row["num_swapped"]): row for row in record["summary"]}
    assert {key: row["num_swaps"] for key, row in rows.items()} == dict.fromkeys(
        [("intra", 1), ("intra", 2), ("inter", 1), ("inter", 2)], 6
    )
    again = measure_swaps(model, batches, {"intra": layer_swaps((2, 3), 1, max_swaps=6)})
    assert [effect["cosine"] for effect in record["effects"][:6]] == [effect.cosine for effect in again.effects]
    assert record["base_accuracy"] is None


def test_numbers_without_a_swap_are_left_out_and_wrong_phases_named(make_model, batches):
    model = make_model(block_schedule=[0, 1, 1])
    record = study_swaps(model, batches, (1, 2), num_swapped=(1, 3))
    assert {(row["scope"], row["num_swapped"]) for row in record["summary"]} == {
        ("intra", 1),
        ("inter", 1),
        ("inter", 3),
    }
    with pytest.raises(ValueError, match=r"are 4 layers of 3; give phases of all of them"):
        study_swaps(model, batches, (2, 2))


def similarity_of(schedule):
    """Two layers of one block are alike, others are not."""
    blocks = np.asarray(schedule)
    return np.where(blocks[:, None] == blocks[None], 0.9, 0.2) + 0.1 * np.eye(len(blocks))


def test_scores_bend_at_the_number_of_blocks_that_is_there():
    similarity = similarity_of([0, 0, 0, 0, 1, 1, 2, 2])
    record = partition_scores(similarity)
    assert record["elbow"] == 3
    assert list(record["scores"]) == [str(count) for count in range(1, 9)]
    assert record["scores"]["3"] == pytest.approx(find_phases(similarity, 3, min_length=1).score)
    assert partition_scores(np.ones((4, 4)))["elbow"] is None
    assert partition_scores(np.ones((2, 2)))["elbow"] is None


def test_boundaries_that_all_images_show_are_always_found():
    base = torch.randn(3, 16)
    sure = torch.stack([base[block] for block in (0, 0, 0, 1, 1, 2, 2)])  # state 0 and six layers
    states = [[state.expand(4, 3, 16) for state in sure]]
    found = boundary_stability(states, [2, 3], num_resamples=20)
    assert found["3"] == {"2": 1.0, "4": 1.0}
    assert set(found["2"]) <= {"2", "4"}


def test_boundaries_that_half_of_the_images_show_are_sometimes_found():
    base = torch.randn(2, 64)
    early = torch.stack([base[block] for block in (0, 0, 0, 1, 1, 1, 1)])
    late = torch.stack([base[block] for block in (0, 0, 0, 0, 0, 1, 1)])
    states = [[torch.stack([a, b]).unsqueeze(1).expand(2, 3, 64) for a, b in zip(early, late, strict=True)]] * 3
    shares = boundary_stability(states, [2], num_resamples=300)["2"]
    assert set(shares) <= {"2", "3", "4"}
    assert sum(shares.values()) == pytest.approx(1)
    assert 0.2 < shares["2"] < 0.8
    assert 0.2 < shares["4"] < 0.8
    assert shares == boundary_stability(states, [2], num_resamples=300)["2"]
    with pytest.raises(ValueError, match=r"num_resamples=0 is below 1"):
        boundary_stability(states, [2], num_resamples=0)
    with pytest.raises(ValueError, match=r"hidden_states holds no image"):
        boundary_stability([], [2])


def test_schemes_are_the_baselines_of_the_paper():
    schemes = partition_schemes(similarity_of([0, 0, 0, 0, 1, 1, 2, 2]), 3, num_random=4, seed=1)
    assert [str(part) for part in schemes["max-cut"]] == [str(Phases.from_repeats((4, 2, 2)))]
    assert len(schemes["random contiguous"]) == len(schemes["random"]) == 4
    assert all(part.is_contiguous and part.repeats != (4, 2, 2) for part in schemes["random contiguous"])
    for part in schemes["random"]:
        assert not part.is_contiguous
        assert sorted(np.bincount(part.block_schedule)) == [2, 2, 4]
    assert "random" not in partition_schemes(similarity_of([0, 0, 1, 1]), 4, min_length=1)


def test_partitions_are_distilled_once_and_gone_on_with(teacher, digits, tmp_path):
    schemes = {"max-cut": [Phases.from_repeats((2, 2))], "random": [Phases.from_schedule([0, 1, 0, 1])]}
    calls = []

    def arguments(folder, seed):
        calls.append((folder, seed))
        return DistillationArguments(
            folder, max_steps=2, per_device_train_batch_size=2, seed=seed, use_cpu=True, report_to="none"
        )

    records = distil_partitions(teacher, schemes, arguments, digits, digits, tmp_path, lambda model: 0.5, seeds=(0, 1))
    assert [(record["scheme"], record["seed"]) for record in records] == [
        ("max-cut", 0), ("max-cut", 1), ("random", 0), ("random", 1)
    ]  # fmt: skip
    assert all(record["accuracy"] == 0.5 and np.isfinite(record["r2"]) for record in records)
    assert records[2]["block_schedule"] == [0, 1, 0, 1]
    assert len(calls) == 4
    (tmp_path / "max-cut-0.0.1.1" / "seed1" / "partition.json").unlink()
    again = distil_partitions(teacher, schemes, arguments, digits, digits, tmp_path, lambda model: 0.5, seeds=(0, 1))
    assert again == records
    assert len(calls) == 5
