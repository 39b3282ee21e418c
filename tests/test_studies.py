"""Studies on tiny models: records against the libraries they come from."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from raptor_hf import DistillationArguments, Phases, RaptorModel, find_phases, layer_similarity
from raptor_hf.complexity import block_recurrence_error, description_length
from raptor_hf.dynamics import angle, fit_span_map, measure_dynamics
from raptor_hf.interventions import (
    base_states,
    layer_swaps,
    lyapunov_exponents,
    measure_phase_lengths,
    measure_swaps,
    sensitivity_curve,
)
from raptor_hf.studies import (
    PARADIGMS,
    boundary_stability,
    compare_flows,
    distil_paradigms,
    distil_partitions,
    measure_span_maps,
    partition_schemes,
    partition_scores,
    study_complexity,
    study_dynamics,
    study_recurrence,
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
    (tmp_path / "max-cut-0.0.1.1" / "seed1" / "study.json").unlink()
    again = distil_partitions(teacher, schemes, arguments, digits, digits, tmp_path, lambda model: 0.5, seeds=(0, 1))
    assert again == records
    assert len(calls) == 5


def test_paradigms_learn_from_what_they_say(teacher, digits, tmp_path):
    calls = []

    def arguments(folder, seed, **options):
        calls.append((Path(folder).relative_to(tmp_path).as_posix(), options))
        return DistillationArguments(
            folder, max_steps=2, per_device_train_batch_size=2, seed=seed, use_cpu=True, report_to="none", **options
        )

    phases = Phases.from_repeats((2, 2))
    records = distil_paradigms(teacher, phases, arguments, digits, digits, tmp_path)
    assert [record["paradigm"] for record in records] == list(PARADIGMS)
    assert calls == [(f"{name.replace(' ', '-')}-0.0.1.1/seed0", options) for name, options in PARADIGMS.items()]
    for record in records:
        assert record["accuracy"] is None
        assert record["stage"] == PARADIGMS[record["paradigm"]]["stage"]
        assert len(record["r2_layers"]) == 4
        assert record["r2"] == pytest.approx(sum(record["r2_layers"]) / 4)
        assert record["r2_last"] == record["r2_layers"][-1]
    assert len({record["r2"] for record in records}) == 4
    assert distil_paradigms(teacher, phases, arguments, digits, digits, tmp_path) == records
    assert len(calls) == 4


def cls_head(last_hidden_state):
    return last_hidden_state[:, 0, :2]


def test_recurrence_is_its_parts(make_model, batches):
    model = make_model(block_schedule=[0, 0, 1])
    record = study_recurrence(model, batches, (2, 1), num_iterations=4, num_pushed=4, num_exponents=2, head=cls_head)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    study = measure_phase_lengths(model, batches, (2, 1), num_iterations=4, head=cls_head).to_dict()
    assert {key: record[key] for key in study} == study
    images = torch.cat([batch["pixel_values"] for batch in batches])[:4]
    expected = lyapunov_exponents(model, [images], 2)
    assert record["exponents"]["exponents"] == pytest.approx(expected.exponents, abs=1e-5)
    assert record["exponents"]["num_images"] == 4
    assert record["spans"] == measure_span_maps(model, batches, (2, 1), head=cls_head)
    bare = study_recurrence(model, batches, (2, 1), num_iterations=4, num_exponents=0, ridge=None)
    assert (bare["exponents"], bare["spans"], bare["base_accuracy"]) == (None, None, None)
    with pytest.raises(ValueError, match="num_exponents=-1, num_pushed=8"):
        study_recurrence(model, batches, (2, 1), num_exponents=-1)


def test_maps_of_spans_are_tried_on_other_images(make_model, batches):
    model = make_model(block_schedule=[0, 0, 1])
    found = measure_span_maps(model, batches, (2, 1), head=cls_head)
    images = torch.cat([batch["pixel_values"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])[1::2]
    states = [state.detach() for state in base_states(model, images)]
    assert found["num_images"] == 2
    span = [state[::2, 5:] for state in states[:3]]
    ridge = 0.1 * float(span[0].double().square().sum()) / 32
    chosen = fit_span_map(span, ridge)
    agreement = chosen.evaluate(states[0][1::2, 5:], states[2][1::2, 5:])
    for method, values in agreement.items():
        entry = found["phases"][0]["state"][method]["patch"]
        assert entry["cosine"] == pytest.approx(values.cosine, abs=1e-5)
        assert entry["relative_error"] == pytest.approx(values.relative_error, abs=1e-5)
    final = found["phases"][0]["final"]["identity"]
    skipped = model.apply_layer(states[0][1::2], 3).detach()
    cosine = torch.cosine_similarity(skipped[:, 0], states[3][1::2, 0], dim=-1).mean()
    assert final["cosine"]["cls"] == pytest.approx(float(cosine), abs=1e-5)
    hits = cls_head(model.layernorm(skipped)).argmax(dim=-1) == labels
    assert final["accuracy"] == float(hits.float().mean())
    base = cls_head(model.layernorm(states[3][1::2])).argmax(dim=-1) == labels
    assert found["base_accuracy"] == float(base.float().mean())
    last = found["phases"][1]
    assert last["final"]["step"]["cosine"]["patch"] == pytest.approx(last["state"]["step"]["patch"]["cosine"])


def test_maps_of_spans_do_not_depend_on_batches_and_need_two_images(make_model, batches):
    model = make_model(block_schedule=[0, 0, 1])
    images = torch.cat([batch["pixel_values"] for batch in batches])
    whole = measure_span_maps(model, [images], (2, 1))
    parts = measure_span_maps(model, list(images.split(1)), (2, 1))
    for one, other in zip(whole["phases"], parts["phases"], strict=True):
        for method, groups in one["state"].items():
            for group, values in groups.items():
                assert values == pytest.approx(other["state"][method][group], abs=1e-4)
    assert measure_span_maps(model, [images[:1]], (2, 1)) is None
    with pytest.raises(ValueError, match="are not runs of layers that make up all 3"):
        measure_span_maps(model, [images], (2, 2))


def test_complexity_of_a_teacher_and_its_raptors(make_teacher, batches):
    teacher = make_teacher()
    models = {"k2": RaptorModel.from_teacher(teacher, (2, 1)), "k3": RaptorModel.from_teacher(teacher, (1, 1, 1))}
    record = study_complexity(teacher, models, batches, dtypes=("bfloat16",), num_pairs=1)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    own = description_length(teacher, (28, 28), "bfloat16")
    assert record["teacher"]["lengths"]["bfloat16"]["coded_bits"] == own.coded_bits
    for name, model in models.items():
        entry = record["models"][name]
        assert entry["error"] == block_recurrence_error(teacher, model, batches).to_dict()
        flops = description_length(model, (28, 28)).flops
        assert entry["delta_flops"] == flops / own.flops - 1
        assert entry["runtime"]["batch_size"] == 3
    assert study_complexity(teacher, models, batches, num_pairs=0)["models"]["k2"]["runtime"] is None
    with pytest.raises(ValueError, match="no batch of images"):
        study_complexity(teacher, models, [])
