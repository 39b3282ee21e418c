"""Studies on tiny models: records against the libraries they come from."""

import json

import pytest
import torch

from raptor_hf import layer_similarity
from raptor_hf.dynamics import angle, measure_dynamics
from raptor_hf.interventions import base_states, layer_swaps, measure_swaps, sensitivity_curve
from raptor_hf.studies import compare_flows, study_dynamics, study_swaps


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
