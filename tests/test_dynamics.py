"""The stream against the plain functions, whatever the batches and their order; degenerate flows; strict JSON."""

import json
import math

import pytest
import torch

from raptor_hf.dynamics import (
    QUANTILES,
    DynamicsEstimator,
    angular_speed,
    angular_updates,
    coherence,
    directional_convergence,
    dynamic_mode_decomposition,
    effective_rank,
    measure_dynamics,
    normalise,
    singular_spectrum,
    stable_rank,
)
from raptor_hf.tokens import TokenLayout

LAYOUT = TokenLayout(2)


def random_states(num_images=9, num_layers=4, num_patches=6, hidden_size=12, seed=0):
    """States `(L + 1, num_images, seq_length, hidden_size)` that drift, float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers + 1, num_images, 3 + num_patches, hidden_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).cumsum(dim=0)


def measure(states, sizes, order=None, labels=None, **options):
    estimator = DynamicsEstimator(LAYOUT, **options)
    states = states if order is None else states[:, order]
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        estimator.update(list(states[:, rows]), None if labels is None else labels[rows])
        start += size
    return estimator.result(rank=3)


@pytest.mark.parametrize("group", LAYOUT.groups)
def test_the_stream_is_what_the_functions_say(group):
    states = random_states()
    measured = measure(states, [4, 5]).groups[group]
    tokens = LAYOUT.select(states, group)
    updates = angular_updates(tokens).flatten(1, 2)
    close = {"atol": 1e-12, "rtol": 0}
    for spread, values in (
        (measured.norm, tokens.norm(dim=-1)),
        (measured.convergence, directional_convergence(tokens)),
        (measured.angular_speed, angular_speed(tokens)),
    ):
        images = values.mean(dim=-1)
        torch.testing.assert_close(spread.mean, images.mean(dim=1), **close)
        torch.testing.assert_close(spread.std, images.std(dim=1), **close)
        expected = images.quantile(torch.tensor(QUANTILES, dtype=torch.float64), dim=1)
        torch.testing.assert_close(spread.quantiles, expected, **close)
    torch.testing.assert_close(measured.coherence, coherence(updates), **close)
    spectrum = torch.linalg.svdvals(updates)
    torch.testing.assert_close(measured.singular_values[:, : spectrum.shape[1]], spectrum, atol=0, rtol=1e-8)
    torch.testing.assert_close(measured.stable_rank, stable_rank(spectrum), atol=0, rtol=1e-8)
    torch.testing.assert_close(measured.effective_rank, effective_rank(singular_spectrum(updates)), atol=0, rtol=1e-8)
    paths = normalise(tokens.mean(dim=-2)).transpose(0, 1)
    torch.testing.assert_close(measured.mean_token, paths.mean(dim=0), **close)
    torch.testing.assert_close(measured.mean_direction, normalise(tokens).mean(dim=(1, 2)), **close)
    modes = dynamic_mode_decomposition(paths, rank=3)
    torch.testing.assert_close(measured.modes.eigenvalues, modes.eigenvalues, atol=1e-8, rtol=0)
    torch.testing.assert_close(measured.modes.singular_values, modes.singular_values, atol=0, rtol=1e-8)


def test_batches_and_their_order_do_not_matter():
    states = random_states(num_images=20)
    one = measure(states, [20])
    for sizes, order in (([1] * 20, None), ([7, 13], torch.randperm(20)), ([3, 3, 14], torch.arange(19, -1, -1))):
        other = measure(states, sizes, order)
        for group in LAYOUT.groups:
            ours, theirs = one.groups[group], other.groups[group]
            for name in ("norm", "convergence", "angular_speed"):
                for field in ("mean", "std", "quantiles"):
                    first, second = (getattr(getattr(g, name), field) for g in (ours, theirs))
                    torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-12)
            torch.testing.assert_close(ours.coherence, theirs.coherence, atol=1e-12, rtol=0)
            torch.testing.assert_close(ours.effective_rank, theirs.effective_rank, atol=0, rtol=1e-8)
            torch.testing.assert_close(ours.modes.eigenvalues, theirs.modes.eigenvalues, atol=1e-8, rtol=0)


def test_many_rows_go_through_several_products(monkeypatch):
    states = random_states(num_images=40)
    whole = measure(states, [40])
    monkeypatch.setattr("raptor_hf.dynamics.flow._FLUSH_ROWS", 16)
    monkeypatch.setattr("raptor_hf.dynamics.flow._PIECE_BYTES", 2000)
    pieces = measure(states, [17, 23])
    for group in LAYOUT.groups:
        torch.testing.assert_close(
            whole.groups[group].singular_values, pieces.groups[group].singular_values, rtol=1e-8, atol=1e-12
        )
        torch.testing.assert_close(whole.groups[group].modes.eigenvalues, pieces.groups[group].modes.eigenvalues)


def test_a_result_in_between_changes_nothing():
    states = random_states()
    estimator = DynamicsEstimator(LAYOUT)
    estimator.update(list(states[:, :4]))
    first = estimator.result(3)
    assert first.num_images == 4
    estimator.update(list(states[:, 4:]))
    whole = measure(states, [9])
    torch.testing.assert_close(estimator.result(3).groups["patch"].stable_rank, whole.groups["patch"].stable_rank)
    torch.testing.assert_close(first.groups["cls"].stable_rank, measure(states, [4]).groups["cls"].stable_rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_states_are_measured_in_double(dtype):
    states = random_states().to(dtype)
    torch.testing.assert_close(
        measure(states, [9]).groups["patch"].angular_speed.mean,
        measure(states.double(), [9]).groups["patch"].angular_speed.mean,
        atol=0,
        rtol=0,
    )


def test_a_constant_flow_stands_still():
    states = random_states(num_layers=1)[:1].expand(6, -1, -1, -1)
    dynamics = measure(states, [9])
    for group in dynamics.groups.values():
        assert not group.angular_speed.mean.any()
        assert not group.effective_rank.any()
        assert not group.stable_rank.any()
        assert not group.coherence.any()
        torch.testing.assert_close(group.convergence.mean, torch.ones(6, dtype=torch.float64))
        torch.testing.assert_close(group.modes.eigenvalues.real, torch.ones_like(group.modes.eigenvalues.real))


def test_tokens_that_all_turn_alike_have_rank_one_and_are_coherent():
    phases = 0.2 * torch.arange(5, dtype=torch.float64)
    path = torch.stack([phases.cos(), phases.sin(), 0 * phases], dim=1)
    states = path.reshape(5, 1, 1, 3).expand(5, 4, 8, 3)
    for group in measure(states, [4]).groups.values():
        torch.testing.assert_close(group.angular_speed.mean, torch.full((4,), 0.2, dtype=torch.float64))
        torch.testing.assert_close(group.effective_rank, torch.ones(4, dtype=torch.float64))
        torch.testing.assert_close(group.coherence, torch.ones(4, dtype=torch.float64))
        assert group.modes.eigenvalues.abs().tolist() == pytest.approx([1, 1])
        assert group.modes.eigenvalues[0].imag == pytest.approx(math.sin(0.2))


def test_one_image_and_zero_tokens():
    states = random_states(num_images=1)
    states[2, :, 1] = 0
    dynamics = measure(states, [1])
    assert not dynamics.groups["cls"].norm.std.any()
    assert dynamics.groups["cls"].stable_rank.tolist() == pytest.approx([1] * 4)
    json.dumps(dynamics.to_dict(), allow_nan=False)


def test_a_zero_flow_is_strict_json():
    dynamics = measure(torch.zeros(3, 2, 9, 4), [2])
    record = json.loads(json.dumps(dynamics.to_dict(), allow_nan=False))
    assert record["groups"]["registers"]["angular_speed"]["mean"] == [0, 0]
    assert record["groups"]["registers"]["norm"]["quantiles"]["0.5"] == [0, 0, 0]
    assert record["groups"]["registers"]["dmd"]["eigenvalues"] == [[0, 0]]


def test_classes_part_over_depth():
    labels = torch.tensor([0, 0, 1, 1, 1, 7])
    centres = torch.eye(4, dtype=torch.float64)[labels.clamp_max(2)]
    noise = torch.randn(6, 9, 4, dtype=torch.float64)
    states = torch.stack([noise + 0 * centres[:, None], noise * 0 + 3 * centres[:, None]])
    dynamics = measure(states, [2, 4], labels=labels, num_classes=3)
    flow = dynamics.classes["patch"]
    assert flow.counts.tolist() == [2, 3, 0]
    torch.testing.assert_close(flow.paths[:2, 1], torch.eye(4, dtype=torch.float64)[:2])
    assert not flow.paths[2].any()
    assert flow.within[1] == pytest.approx(0)
    assert flow.between[1] == pytest.approx(1 - math.sqrt(0.5))
    assert flow.within[0] > 0.1
    torch.testing.assert_close(flow.paths[1, 0], normalise(LAYOUT.select(noise[2:5], "patch")).mean(dim=(0, 1)))
    assert "class_scatter" in dynamics.to_dict()["groups"]["cls"]
    assert measure(states, [6], num_classes=3).to_dict()["groups"]["cls"]["class_scatter"]["within"] == [None, None]


def test_groups_that_are_absent_are_absent_and_ranks_are_optional():
    dynamics = measure_dynamics([list(random_states())], TokenLayout(0), ranks=False)
    assert set(dynamics.groups) == {"cls", "patch"}
    assert dynamics.groups["cls"].stable_rank is None
    assert "stable_rank" not in dynamics.to_dict()["groups"]["cls"]


def test_images_of_several_sizes_count_alike():
    small, large = random_states(2, num_patches=4), random_states(2, num_patches=16, seed=1)
    estimator = DynamicsEstimator(LAYOUT)
    estimator.update(list(small))
    estimator.update(list(large))
    norms = [LAYOUT.select(states, "patch").norm(dim=-1).mean(dim=(1, 2)) for states in (small, large)]
    torch.testing.assert_close(estimator.result().groups["patch"].norm.mean, (norms[0] + norms[1]) / 2)


def test_a_teacher_is_measured_with_its_layout(teacher, images):
    dynamics = measure_dynamics(teacher.iter_hidden_states(images, batch_size=2))
    assert set(dynamics.groups) == {"cls", "registers", "patch"}
    assert dynamics.num_images == len(images)
    assert dynamics.groups["cls"].norm.mean.shape == (dynamics.num_layers + 1,)


@pytest.mark.parametrize(
    ("states", "labels", "message"),
    [
        (random_states()[:1], None, r"1 states of shapes"),
        (random_states()[:, :, :3], None, r"with more than 3 tokens"),
        (random_states()[:, 0], None, r"pass states 0..L of one batch"),
        (random_states().long(), None, r"states of torch.int64"),
        (random_states() / 0, None, r"state 0 holds infinity or NaN"),
        (random_states(num_layers=3), None, r"= \(4, 12\) after \(5, 12\)"),
        (random_states(), torch.zeros(3, dtype=torch.long), r"labels of shape \(3,\) for 9 images"),
    ],
)
def test_states_that_cannot_be_measured_are_named_and_leave_the_sums(states, labels, message):
    estimator = DynamicsEstimator(LAYOUT)
    estimator.update(list(random_states()))
    with pytest.raises(ValueError, match=message):
        estimator.update(list(states), labels)
    assert estimator.result().num_images == 9


def test_no_image_and_no_layout_are_named():
    with pytest.raises(ValueError, match=r"no image was measured"):
        measure_dynamics([], LAYOUT)
    with pytest.raises(ValueError, match=r"layout is missing"):
        measure_dynamics([list(random_states())])
    with pytest.raises(ValueError, match=r"num_classes=-1 is negative"):
        DynamicsEstimator(LAYOUT, num_classes=-1)
    with pytest.raises(ValueError, match=r"rank=0 is below 1"):
        measure_dynamics([list(random_states())], LAYOUT, rank=0)
    estimator = DynamicsEstimator(LAYOUT)
    estimator.update(list(random_states()[:, :0]))
    with pytest.raises(ValueError, match=r"no image was measured"):
        estimator.result()
