"""Swapped layers and perturbed tokens: counts by brute force, states by hand, and what must not happen to the model."""

import itertools
import json
import math

import pytest
import torch

from raptor_hf import Phases
from raptor_hf.dynamics import angle
from raptor_hf.interventions import (
    base_states,
    count_swaps,
    layer_swaps,
    lyapunov_exponents,
    measure_phase_lengths,
    measure_swaps,
    perturb,
    run_layers,
    sensitivity_curve,
    swapped_states,
)
from raptor_hf.interventions.perturbations import random_directions
from raptor_hf.interventions.runs import final_norm

SCHEDULE = [0, 0, 1, 1]
SCHEDULE_REPEATS = (2, 2)


@pytest.fixture(params=["teacher", "raptor"])
def model(request, make_teacher, make_model):
    if request.param == "teacher":
        return make_teacher(num_hidden_layers=4)
    return make_model(block_schedule=SCHEDULE)


def all_swaps(schedule, num_swapped, scope):
    """Every swap, from the definition: choose layers, then any other layer of the same or of another phase for each."""
    layers, swaps = range(1, len(schedule) + 1), []
    for chosen in itertools.combinations(layers, num_swapped):
        for sources in itertools.product(layers, repeat=num_swapped):
            pairs = tuple(zip(chosen, sources, strict=True))
            alike = [schedule[a - 1] == schedule[b - 1] for a, b in pairs]
            wanted = all(alike) if scope == "intra" else not any(alike)
            if wanted and all(a != b for a, b in pairs):
                swaps.append(pairs)
    return sorted(swaps)


@pytest.mark.parametrize("repeats", [(2, 2), (3, 1, 2), (1, 1, 4)])
@pytest.mark.parametrize("scope", ["intra", "inter"])
@pytest.mark.parametrize("num_swapped", [1, 2, 3])
def test_swaps_are_those_of_the_definition(repeats, scope, num_swapped):
    expected = all_swaps(Phases.from_repeats(repeats).block_schedule, num_swapped, scope)
    assert layer_swaps(repeats, num_swapped, scope) == expected
    assert count_swaps(repeats, num_swapped, scope) == len(expected)


def test_a_sample_of_swaps_is_a_subset_and_depends_on_the_seed_alone():
    every = layer_swaps((4, 4, 4), 3, "inter")
    drawn = layer_swaps((4, 4, 4), 3, "inter", max_swaps=20, seed=1)
    assert len(drawn) == len(set(drawn)) == 20
    assert set(drawn) < set(every)
    assert drawn == layer_swaps((4, 4, 4), 3, "inter", max_swaps=20, seed=1)
    assert drawn != layer_swaps((4, 4, 4), 3, "inter", max_swaps=20, seed=2)
    assert layer_swaps((2, 2), 1, max_swaps=99) == layer_swaps((2, 2), 1)


def test_the_draw_is_uniform():
    every = layer_swaps((2, 2), 2, "inter")
    counts = dict.fromkeys(every, 0)
    for seed in range(2400):
        for swap in layer_swaps((2, 2), 2, "inter", max_swaps=1, seed=seed):
            counts[swap] += 1
    assert len(every) == 24
    assert min(counts.values()) > 60
    assert max(counts.values()) < 150


def test_blocks_that_come_back_are_one_phase():
    assert layer_swaps(Phases.from_schedule([0, 1, 0]), 1) == [((1, 3),), ((3, 1),)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 2), 0), r"num_swapped=0 is below 1"),
        (((2, 2), 1, "both"), r"scope='both' is not known"),
        (((1, 1), 1), r"num_swapped=1: only 0 layers"),
        (((2, 1), 3), r"num_swapped=3: only 2 layers"),
    ],
)
def test_swaps_that_do_not_exist_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_swaps(*arguments)


def test_no_swap_is_none():
    with pytest.raises(ValueError, match=r"max_swaps=0 is below 1"):
        layer_swaps((2, 2), 1, max_swaps=0)


def test_the_model_is_its_layers_in_order(model, pixels):
    states = base_states(model, pixels)
    again = run_layers(model, states[0], range(1, 5))
    assert len(states) == len(again) == 5
    for state, other in zip(states, again, strict=True):
        torch.testing.assert_close(state, other)


def test_swapped_states_are_those_of_the_layers_named(model, pixels):
    states = base_states(model, pixels)
    swapped = swapped_states(model, states, ((2, 4), (3, 1)))
    expected = [states[0], states[1]]
    for layer in (4, 1, 4):
        expected.append(run_layers(model, expected[-1], [layer])[1])
    for state, other in zip(swapped, expected, strict=True):
        torch.testing.assert_close(state, other)
    assert not torch.allclose(swapped[-1], states[-1], atol=1e-3)


def test_a_swap_within_a_phase_of_a_raptor_without_depth_scale_changes_nothing(make_model, pixels):
    model = make_model(block_schedule=SCHEDULE, depth_scale=False)
    swaps = {scope: layer_swaps((2, 2), 1, scope) for scope in ("intra", "inter")}
    study = measure_swaps(model, [pixels], swaps)
    rows = {row["scope"]: row for row in study.summary()}
    assert rows["intra"]["cosine"]["all"]["min"] == pytest.approx(1, abs=1e-12)
    assert rows["inter"]["cosine"]["all"]["max"] < 0.999


def test_measured_swaps_do_not_depend_on_the_batches(model):
    images, labels = torch.randn(6, 3, 28, 28), torch.tensor([0, 1, 2, 0, 1, 2])
    weight = torch.randn(32, 3)

    def head(last_hidden_state):
        return last_hidden_state[:, 0] @ weight

    def study(size):
        batches = [{"pixel_values": images[i : i + size], "labels": labels[i : i + size]} for i in range(0, 6, size)]
        return measure_swaps(model, batches, {"intra": [((1, 2),)], "inter": [((1, 3),)]}, head)

    whole, parts = study(6), study(2)
    assert whole.num_images == parts.num_images == 6
    assert whole.base_accuracy == parts.base_accuracy
    for one, other in zip(whole.effects, parts.effects, strict=True):
        assert one.accuracy == other.accuracy
        assert one.cosine == pytest.approx(other.cosine, abs=1e-6)
    states = base_states(model, images)
    norm = model.final_norm if hasattr(model, "final_norm") else model.layernorm
    with torch.no_grad():
        guess = head(norm(states[-1])).argmax(1)
    assert whole.base_accuracy == float((guess == labels).double().mean())
    final = run_layers(model, states[0], [2, 2, 3, 4])[-1]
    assert whole.effects[0].cosine["patch"] == pytest.approx(
        float(torch.cosine_similarity(final[:, 5:].double(), states[-1][:, 5:].double(), dim=-1).mean())
    )


def test_a_study_is_strict_json(model, pixels):
    study = measure_swaps(model, [pixels], [((1, 2),)])
    read = json.loads(json.dumps(study.to_dict(), allow_nan=False))
    assert read["effects"][0]["scope"] == "given"
    assert read["effects"][0]["swap"] == [[1, 2]]
    assert read["summary"][0]["cosine"]["cls"]["std"] is None
    assert read["base_accuracy"] is None


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ((), r"pass pairs"),
        (((1, 1),), r"none replaces a layer by itself"),
        (((1, 2), (1, 3)), r"no two have the same layer"),
        (((1, 5),), r"layer=5: this model has layers 1 to 4"),
        (((0, 1),), r"layer=0: this model has layers 1 to 4"),
        (((True, 2),), r"layer=True"),
    ],
)
def test_swaps_that_do_not_fit_are_named(swap, message, model, pixels):
    with pytest.raises(ValueError, match=message):
        measure_swaps(model, [pixels], [swap])
    with pytest.raises(ValueError, match=message):
        swapped_states(model, base_states(model, pixels), swap)


def test_input_that_cannot_be_measured_is_named(model, pixels):
    swaps = [((1, 2),)]
    with pytest.raises(ValueError, match=r"no swap was given"):
        measure_swaps(model, [pixels], [])
    with pytest.raises(ValueError, match=r"no batch of images"):
        measure_swaps(model, [], swaps)
    with pytest.raises(ValueError, match=r"labels \(none\) of 2 images"):
        measure_swaps(model, [pixels], swaps, head=lambda x: x[:, 0])
    with pytest.raises(ValueError, match=r"'pixel_values' is missing"):
        measure_swaps(model, [{"labels": torch.zeros(2)}], swaps)
    with pytest.raises(ValueError, match=r"the head gave \(2, \d+, 32\)"):
        measure_swaps(model, [{"pixel_values": pixels, "labels": torch.zeros(2)}], swaps, head=lambda x: x)
    with pytest.raises(ValueError, match=r"3 states of a model of 4 layers"):
        swapped_states(model, base_states(model, pixels)[:3], swaps[0])
    with pytest.raises(ValueError, match=r"hidden_states of shape \(2, 32\)"):
        run_layers(model, torch.zeros(2, 32), [1])


@pytest.mark.parametrize("group", ["cls", "registers", "patch", "all"])
def test_a_perturbation_has_its_size_and_leaves_the_other_tokens(group, model, pixels):
    states = base_states(model, pixels)
    layout = model.layout if hasattr(model, "layout") else model.config.token_layout
    start = perturb(model, states[2], 2, group, 0.25)[0]
    change = start - states[2]
    pushed = layout.select(change, group)
    norms = layout.select(states[2], group).norm(dim=-1)
    torch.testing.assert_close(pushed.norm(dim=-1), 0.25 * norms)
    assert (change != 0).sum() == (pushed != 0).sum()


def test_an_absolute_perturbation_is_standard_normal(model, pixels):
    state = base_states(model, pixels)[1]
    noise = perturb(model, state, 1, "all", 2.0, scale="absolute")[0] - state
    assert noise.mean().abs() < 0.1
    assert noise.std() == pytest.approx(2.0, rel=0.05)
    tokens = noise.flatten(0, 1)
    assert torch.unique(tokens.round(decimals=3), dim=0).shape == tokens.shape  # independent per token


def test_a_perturbation_depends_on_seed_and_image_not_on_the_batch(model, pixels):
    state = base_states(model, pixels)[1]
    whole = perturb(model, state, 1, "patch", 0.1, seed=3)
    second = perturb(model, state[1:], 1, "patch", 0.1, seed=3, first_image=1)
    torch.testing.assert_close(whole[-1][1:], second[-1])
    assert not torch.equal(whole[0], perturb(model, state, 1, "patch", 0.1, seed=4)[0])


def test_sensitivity_is_quadratic_and_keeps_its_digits(model, pixels):
    model = model.double() if isinstance(model, torch.nn.Module) else model
    if not isinstance(model, torch.nn.Module):
        model.model.double()
    small, large = (sensitivity_curve(model, [pixels.double()], eps) for eps in (1e-5, 2e-5))
    for group in ("cls", "registers", "patch"):
        assert len(small.curve(group)) == 4
        assert large.curve(group, 2) == pytest.approx(small.curve(group, 2), rel=2e-2)
        assert min(small.curve(group, 2)) > 1e-4
    assert small.curve("cls") == pytest.approx([value / 1e-5 for value in small.distance["cls"]["cls"]])


def test_sensitivity_does_not_depend_on_the_batches_and_is_strict_json(model):
    images = torch.randn(4, 3, 28, 28)
    options = {"layers": [0, 3, 4], "groups": ["cls", "patch"], "seed": 5}
    whole = sensitivity_curve(model, [images], 0.1, **options)
    parts = sensitivity_curve(model, [{"pixel_values": images[:1]}, {"pixel_values": images[1:]}], 0.1, **options)
    assert whole.distance["cls"]["patch"] == pytest.approx(parts.distance["cls"]["patch"], rel=1e-4)
    assert whole.distance["cls"]["patch"][2] == 0  # nothing mixes tokens behind the last layer
    assert whole.distance["cls"]["cls"][2] == pytest.approx(0.005, rel=0.1)  # 1 - cos(0.1)
    read = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    assert read["layers"] == [0, 3, 4]
    assert read["per_eps2"]["cls"] == pytest.approx([value / 0.01 for value in whole.distance["cls"]["cls"]])
    with pytest.raises(ValueError, match=r"group='registers' was not perturbed"):
        whole.curve("registers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, r"eps=0.0 is not a size"),
        ({"eps": math.nan}, r"eps=nan is not a size"),
        ({"eps": 1e-12}, r"vanishes in torch.float32"),
        ({"eps": 0.1, "scale": "log"}, r"scale='log' is not known"),
        ({"eps": 0.1, "seed": -1}, r"seed=-1 is negative"),
        ({"eps": 0.1, "layers": [5]}, r"layer=5: this model has states 0 to 4"),
        ({"eps": 0.1, "layers": []}, r"nothing to perturb"),
        ({"eps": 0.1, "groups": ["eyes"]}, r"tokens='eyes' is not a token group"),
    ],
)
def test_perturbations_out_of_range_are_named(options, message, model, pixels):
    with pytest.raises(ValueError, match=message):
        sensitivity_curve(model, [pixels], **options)


def test_models_without_registers_have_no_such_curve(make_teacher, pixels):
    curve = sensitivity_curve(make_teacher("vit", patch_size=14, image_size=28), [torch.randn(2, 3, 28, 28)], 0.1)
    assert set(curve.distance) == set(curve.distance["cls"]) == {"cls", "patch"}


@pytest.fixture
def photos():
    """Four images, `(4, 3, 28, 28)`."""
    return torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(3))


def test_exponents_are_the_growth_of_displacements_through_the_model(model, photos):
    pixel_values = photos[:3]
    found = lyapunov_exponents(model, [pixel_values], 2, seed=3)
    assert [len(rates) for rates in found.rates] == [4, 4]
    assert found.exponents == pytest.approx([sum(rates) / 4 for rates in found.rates])
    assert found.relative == pytest.approx([e - sum(found.state_growth) / 4 for e in found.exponents])
    states = base_states(model, pixel_values)
    norms = torch.stack([state.double().flatten(1).norm(dim=1) for state in states])
    assert found.state_growth == pytest.approx((norms[1:] / norms[:-1]).log().mean(dim=1).tolist(), abs=1e-5)
    assert sum(share[-1] for share in found.shares.values()) == pytest.approx(1)
    size = 1e-2  # finite differences of the same directions, which the first rates are of
    ratios = []
    for number in range(3):
        displacement = random_directions(torch.Size((1, 2 * states[0].shape[1], states[0].shape[2])), 3, number)
        displacement = displacement[:, : states[0].shape[1]].double()
        displacement /= displacement.norm()
        after = [
            run_layers(model, (states[0][number : number + 1].double() + sign * size * displacement).float(), [1])[-1]
            for sign in (1, -1)
        ]
        ratios.append(((after[0] - after[1]).double().norm() / (2 * size)).log())
    assert found.rates[0][0] == pytest.approx(float(sum(ratios) / 3), abs=2e-3)


def test_exponents_do_not_depend_on_batches_or_the_number_of_directions(model, photos):
    whole = lyapunov_exponents(model, [photos[:4]], 3)
    parts = lyapunov_exponents(model, [{"pixel_values": photos[:1]}, photos[1:4]], 3)
    assert parts.exponents == pytest.approx(whole.exponents, abs=1e-5)
    assert parts.std == pytest.approx(whole.std, abs=1e-5)
    assert lyapunov_exponents(model, [photos[:4]], 1).rates[0] == pytest.approx(whole.rates[0], abs=1e-5)
    assert lyapunov_exponents(model, [photos[:1]], 1).std == [0.0]
    json.dumps(whole.to_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="num_exponents=0, seed=0: use 1 or more"):
        lyapunov_exponents(model, [photos], 0)


def test_a_phase_of_another_length_is_the_run_of_those_layers(model, photos):
    pixel_values, head = photos[:4], lambda state: state[:, 0, :2]
    study = measure_phase_lengths(
        model, [{"pixel_values": pixel_values, "labels": torch.tensor([0, 1, 0, 1])}], SCHEDULE_REPEATS, head=head
    )
    kinds = [(effect.phase, effect.offset) for effect in study.lengths]
    assert kinds == [(phase, offset) for phase in (0, 1) for offset in (-1, 1, 2, 4)]
    states = base_states(model, pixel_values)
    for kind, order in {(0, -1): [1, 3, 4], (0, 2): [1, 2, 2, 2, 3, 4], (1, 1): [1, 2, 3, 4, 4]}.items():
        final = run_layers(model, states[0], order)[-1]
        cosine = torch.nn.functional.cosine_similarity(final, states[-1], dim=-1).mean()
        effect = study.lengths[kinds.index(kind)]
        assert effect.cosine["all"] == pytest.approx(float(cosine), abs=1e-6)
        logits = head(final_norm(model, final))
        assert effect.accuracy == float((logits.argmax(dim=1) == torch.tensor([0, 1, 0, 1])).double().mean())
    walk = study.iterations[0]
    assert (walk.phase, walk.layer) == (0, 2)
    path = run_layers(model, states[2], [2] * 32)
    turned = angle(path[4], path[5])[:, 0].mean()
    assert walk.speed["cls"][4] == pytest.approx(float(turned), abs=1e-9)
    norms = [state[:, 0].double().norm(dim=-1) for state in (path[0], path[-1])]
    assert walk.norm["cls"][-1] == pytest.approx(float((norms[1] / norms[0]).mean()))
    mean = torch.nn.functional.normalize(path[7][:, 0].double(), dim=-1).mean(dim=0)
    assert walk.agreement["cls"][7] == pytest.approx(float(mean.norm()))
    assert sum(walk.ends["patch"].values()) == pytest.approx(1)
    json.dumps(study.to_dict(), allow_nan=False)


def test_iterations_do_not_depend_on_batches(model, photos):
    whole = measure_phase_lengths(model, [photos[:4]], SCHEDULE_REPEATS, num_iterations=5)
    parts = measure_phase_lengths(model, [photos[:1], photos[1:4]], SCHEDULE_REPEATS, num_iterations=5)
    assert whole.base_accuracy is None
    for one, other in zip(whole.iterations, parts.iterations, strict=True):
        for name in ("speed", "norm", "agreement"):
            for group, curve in getattr(one, name).items():
                assert curve == pytest.approx(getattr(other, name)[group], abs=1e-5)
        assert one.ends == other.ends


def test_a_block_that_turns_nothing_is_at_rest(make_model, photos):
    model = make_model(block_schedule=SCHEDULE, depth_scale=False)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "blocks" in name and "layer_scale" in name:
                weight.zero_()
    study = measure_phase_lengths(model, [photos[:2]], SCHEDULE_REPEATS, num_iterations=5)
    for walk in study.iterations:
        assert walk.ends["patch"] == {"fixed": 1.0, "cycle": 0.0, "none": 0.0}
        assert max(walk.speed["patch"]) < 1e-6


@pytest.mark.parametrize(
    ("phases", "options", "message"),
    [
        ((2, 1), {}, r"are not runs of layers that make up all 4 of this model; give the layers of each"),
        (Phases.from_schedule([0, 1, 0, 1]), {}, "are not runs of layers"),
        ((2, 2), {"offsets": (0, 1)}, r"offsets=\[0, 1\], num_iterations=32: leave 0 out"),
        ((2, 2), {"num_iterations": 3}, "num_iterations=3: leave 0 out, use 4 or more"),
    ],
)
def test_wrong_lengths_are_refused(phases, options, message, model, photos):
    with pytest.raises(ValueError, match=message):
        measure_phase_lengths(model, [photos], phases, **options)
