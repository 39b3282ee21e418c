"""The eps of the Block-Recurrent Hypothesis and the length of a model's description."""

import json
import math

import pytest
import torch

from raptor_hf import RaptorModel
from raptor_hf.complexity import (
    RecurrenceError,
    block_recurrence_error,
    description_length,
    elias_gamma_bits,
    entropy_coded_bits,
    runtime_ratio,
    schedule_bits,
)
from raptor_hf.interventions import base_states


@pytest.fixture
def photos():
    return torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))


def test_eps_is_the_mean_frobenius_error_of_each_layer(make_teacher, photos):
    teacher = make_teacher()
    model = RaptorModel.from_teacher(teacher, (2, 1))
    found = block_recurrence_error(teacher, model, [photos[:2], photos[2:]])
    ours, theirs = base_states(teacher, photos), base_states(model, photos)
    for layer in (1, 2, 3):
        error = (theirs[layer] - ours[layer]).flatten(1).norm(dim=1)
        assert found.epsilon[layer - 1] == pytest.approx(float(error.mean()), rel=1e-5)
        ratio = error / ours[layer].flatten(1).norm(dim=1)
        assert found.relative[layer - 1] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert found.num_images == 3
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["max_epsilon"] == max(found.epsilon) > 0
    assert record["worst_layer"] == 1 + found.epsilon.index(max(found.epsilon))


def test_one_block_per_layer_has_no_error(make_teacher, photos):
    teacher = make_teacher()
    exact = RaptorModel.from_teacher(teacher, (1, 1, 1))
    assert max(block_recurrence_error(teacher, exact, [photos]).relative) < 1e-5
    assert block_recurrence_error(teacher, teacher, [photos]) == RecurrenceError([0.0] * 3, [0.0] * 3, 3)


def test_models_that_do_not_compare_are_refused(make_teacher, make_model, photos):
    with pytest.raises(ValueError, match=r"\(4, 9, 32\) and \(6, 9, 32\): eps compares layer by layer"):
        block_recurrence_error(make_teacher(), make_model(block_schedule=[0, 0, 1, 1, 1]), [photos])
    with pytest.raises(ValueError, match=r"no batch of images"):
        block_recurrence_error(make_teacher(), make_teacher(), [])


@pytest.mark.parametrize(("number", "code"), [(1, "1"), (2, "010"), (3, "011"), (4, "00100"), (12, "0001100")])
def test_elias_gamma(number, code):
    assert elias_gamma_bits(number) == len(code)


def test_elias_gamma_begins_at_one():
    with pytest.raises(ValueError, match="number=0: Elias gamma codes whole numbers from 1 on"):
        elias_gamma_bits(0)


@pytest.mark.parametrize(
    ("schedule", "bits"),
    [
        ([0] * 7 + [1] * 3 + [2] * 2, 1 + 3 + (5 + 3 + 3)),
        ([0], 1 + 1 + 1),
        ([0, 1, 0, 0], 1 + 3 + (1 + 1 + 3) + 3 + 3 * 1),  # gamma(2), lengths, gamma(3 runs), a bit for each run's block
        ([1, 0], 1 + 3 + (1 + 1) + 3 + 2 * 1),
    ],
)
def test_bits_of_a_schedule(schedule, bits):
    assert schedule_bits(schedule) == bits


def test_an_empty_schedule_has_no_length():
    with pytest.raises(ValueError, match="an empty schedule has no length"):
        schedule_bits([])


def test_coded_size_is_near_the_entropy_of_the_bytes():
    weights = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    entropy = 0.0
    for plane in weights.view(torch.uint8).reshape(-1, 2).T:
        shares = torch.bincount(plane.int(), minlength=256).double() / len(weights)
        shares = shares[shares > 0]
        entropy -= float((shares * shares.log2()).sum())
    coded = entropy_coded_bits(weights) / len(weights)
    assert entropy <= coded < 1.02 * entropy < 16
    assert entropy_coded_bits(torch.zeros(200_000)) < 200_000 * 32 / 7.5  # a bit for each of four bytes


def test_description_of_a_teacher_and_its_raptor(make_teacher):
    teacher = make_teacher()
    model = RaptorModel.from_teacher(teacher, (2, 1))
    long, short = (description_length(each, (28, 28), "bfloat16") for each in (teacher, model))
    assert (long.num_blocks, short.num_blocks) == (3, 2)
    assert short.num_parameters == sum(weight.numel() for weight in model.blocks.parameters())
    assert long.num_parameters == sum(weight.numel() for weight in teacher.model.encoder.layer.parameters())
    assert short.block_bits == 16 * short.num_parameters
    assert short.coded_bits < short.block_bits
    assert short.schedule_bits == 1 + 3 + (3 + 1)
    record = json.loads(json.dumps(short.to_dict()))
    assert record["levin_bits"] == pytest.approx(short.coded_bits + 8 + math.log2(short.flops))
    assert short.flops >= long.flops > 0
    assert description_length(model, (28, 28)).block_bits == 32 * short.num_parameters
    with pytest.raises(ValueError, match="dtype='int8': bits of the blocks are counted in float32, bfloat16, float16"):
        description_length(model, (28, 28), "int8")


def test_runtime_is_of_pairs(make_teacher, photos, monkeypatch):
    teacher = make_teacher()
    clock = iter(range(0, 1000))
    monkeypatch.setattr("raptor_hf.complexity.time.perf_counter", lambda: next(clock) ** 2)
    found = runtime_ratio(teacher, RaptorModel.from_teacher(teacher, (2, 1)), photos, num_pairs=3)
    # Ticks n^2: a run from n to n + 1 takes 2 n + 1; the first pair (0..3) does not count.
    ratios = sorted((2 * (start + 2) + 1) / (2 * start + 1) for start in (4, 8, 12))
    assert (found.low, found.median, found.high) == tuple(ratios)
    assert found.to_dict()["delta"] == ratios[1] - 1
    assert (found.num_pairs, found.batch_size) == (3, 3)
    with pytest.raises(ValueError, match="num_pairs=0: time at least one pair"):
        runtime_ratio(teacher, teacher, photos, num_pairs=0)
