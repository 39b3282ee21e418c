import json
import math
import weakref

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from raptor_hf.fidelity import (
    R2_DEFINITIONS,
    Fidelity,
    FidelityAccumulator,
    _sum_device,
    cosine_from_sums,
    measure_fidelity,
    r2_from_sums,
    token_sums,
)
from raptor_hf.tokens import TokenLayout

LAYERS, HIDDEN, PATCHES = 3, 6, 5


def make_states(registers=2, images=7, noise=0.5, seed=0, dtype=torch.float32):
    """Teacher with features of unlike mean and scale, and a student that is the teacher plus noise."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS + 1, images, 1 + registers + PATCHES, HIDDEN)
    scale, mean = torch.linspace(0.5, 4, HIDDEN), torch.linspace(-3, 3, HIDDEN)
    teacher = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + mean
    student = teacher + noise * torch.randn(shape, generator=generator, dtype=torch.float64)
    student[0] = teacher[0]
    return student.to(dtype).unbind(0), teacher.to(dtype).unbind(0)


def image_range(states, start, stop):
    return [state[start:stop] for state in states]


def rows_of(state, layout, group):
    return layout.select(state.double(), group).reshape(-1, state.shape[-1]).numpy()


def reference_r2(student, teacher, definition):
    if definition == "global_mean":
        return r2_score(teacher.ravel(), student.ravel())
    if definition == "ols":
        s, t = (rows - rows.mean(1, keepdims=True) for rows in (student, teacher))
        slope = (s * t).sum(1, keepdims=True) / (s * s).sum(1, keepdims=True)
        return np.mean(1 - ((t - slope * s) ** 2).sum(1) / (t**2).sum(1))
    return r2_score(teacher, student, multioutput=definition)


def vectors(values, **kwargs):
    """Token vectors `(tokens, features)` as a batch of one image."""
    return torch.tensor(values, **kwargs).unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("registers", [0, 2])
def test_all_definitions_equal_scikit_learn(registers, dtype):
    layout = TokenLayout(registers)
    student, teacher = make_states(registers, dtype=dtype)
    result = measure_fidelity([(student, teacher)], layout, R2_DEFINITIONS)
    assert result.definition == "variance_weighted"
    assert set(result.other) == set(R2_DEFINITIONS[1:])
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for definition, by_group in {"variance_weighted": result.r2, **result.other}.items():
        assert list(by_group) == ["all", *layout.groups]
        for group, per_layer in by_group.items():
            expected = [
                reference_r2(rows_of(student[n], layout, group), rows_of(teacher[n], layout, group), definition)
                for n in range(1, LAYERS + 1)
            ]
            assert per_layer == pytest.approx(expected, abs=tolerance), (definition, group)


def test_cosine_equals_loop():
    layout = TokenLayout(2)
    student, teacher = make_states()
    result = measure_fidelity([(student, teacher)], layout)
    assert list(result.cosine) == ["all", "cls", "registers", "patch"]
    for group, per_layer in result.cosine.items():
        for number, value in enumerate(per_layer, start=1):
            pairs = zip(rows_of(student[number], layout, group), rows_of(teacher[number], layout, group), strict=True)
            expected = np.mean([s @ t / (np.linalg.norm(s) * np.linalg.norm(t)) for s, t in pairs])
            assert value == pytest.approx(expected, abs=1e-6)


def test_streaming_equals_one_shot_and_repeats_exactly():
    layout = TokenLayout(2)
    student, teacher = make_states()
    once = measure_fidelity([(student, teacher)], layout, R2_DEFINITIONS)
    assert measure_fidelity([(student, teacher)], layout, R2_DEFINITIONS) == once
    bounds = [(0, 2), (2, 5), (5, 5), (5, 6), (6, 7)]  # an empty batch changes nothing
    batches = ((image_range(student, a, b), image_range(teacher, a, b)) for a, b in bounds)
    streamed = measure_fidelity(batches, layout, R2_DEFINITIONS)
    assert streamed.num_images == once.num_images == 7
    for definition in R2_DEFINITIONS[1:]:
        assert streamed.other[definition]["all"] == pytest.approx(once.other[definition]["all"], abs=1e-12)
    for group in once.r2:
        assert streamed.r2[group] == pytest.approx(once.r2[group], abs=1e-12)
        assert streamed.cosine[group] == pytest.approx(once.cosine[group], abs=1e-12)


def shards(layout, sizes, **kwargs):
    """One accumulator per shard of the same images, and one that has seen all of them."""
    student, teacher = make_states(layout.num_register_tokens, images=sum(sizes))
    parts, start = [], 0
    for size in sizes:
        part = FidelityAccumulator(LAYERS, layout, **kwargs)
        if size:
            part.update(image_range(student, start, start + size), image_range(teacher, start, start + size))
        parts.append(part)
        start += size
    whole = FidelityAccumulator(LAYERS, layout, **kwargs)
    whole.update(student, teacher)
    return parts, whole


@pytest.mark.parametrize("sizes", [(3, 2), (5, 0), (0, 5), (2, 2, 1)])
def test_sums_of_ranks_add_up_to_one_process(sizes):
    parts, whole = shards(TokenLayout(2), sizes, hidden_size=HIDDEN, definitions=R2_DEFINITIONS)
    total = sum(part.sums() for part in parts)
    for part in parts:
        part.reduce(lambda _: total)
        assert part.num_images == 5
        assert part.compute().r2["patch"] == pytest.approx(whole.compute().r2["patch"], abs=1e-12)
    assert torch.allclose(parts[0].sums(), whole.sums(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(3, 2), (5, 0), (0, 5)])
def test_merged_accumulators_equal_one(sizes):
    (first, second), whole = shards(TokenLayout(0), sizes)
    before = second.sums() if sizes[1] else None
    first.merge(second)
    assert first.num_images == 5
    assert torch.allclose(first.sums(), whole.sums(), rtol=1e-12, atol=1e-12)
    if before is not None:
        assert torch.equal(second.sums(), before)
        first.update(*make_states(0))
        assert torch.equal(second.sums(), before), "merging must copy"


def test_update_continues_after_load_sums():
    (first, _), whole = shards(TokenLayout(2), (3, 2))
    resumed = FidelityAccumulator(LAYERS, TokenLayout(2))
    resumed.load_sums(first.sums())
    student, teacher = make_states(2, images=5)
    resumed.update(image_range(student, 3, 5), image_range(teacher, 3, 5))
    assert torch.allclose(resumed.sums(), whole.sums(), rtol=1e-12, atol=1e-12)


def test_layout_of_the_sum_vector():
    layout = TokenLayout(2)
    student, teacher = make_states()
    accumulator = FidelityAccumulator(LAYERS, layout)
    accumulator.update(student, teacher)
    sums = accumulator.sums()
    assert sums.dtype == torch.float64
    assert sums[0] == 7
    rows = sums[1:].view(LAYERS, len(layout.groups), 3 + 3 * HIDDEN)
    for index, group in enumerate(layout.groups):
        tokens = rows_of(teacher[2], layout, group)
        error = rows_of(student[2], layout, group) - tokens
        assert rows[1, index, 0] == len(tokens)
        assert rows[1, index, 2] == 0
        moments = np.stack([tokens.sum(0), (tokens**2).sum(0), (error**2).sum(0)])
        assert np.allclose(rows[1, index, 3:].view(3, HIDDEN), moments, rtol=1e-6)


@pytest.mark.parametrize("mean", [1e3, 1e5])
def test_large_means_and_small_variance_keep_their_digits(mean):
    generator = torch.Generator().manual_seed(0)
    teacher = mean + torch.randn(40, 30, 4, generator=generator)
    student = teacher + torch.randn(teacher.shape, generator=generator)
    expected = r2_score(teacher.reshape(-1, 4).double(), student.reshape(-1, 4).double())
    assert r2_from_sums(token_sums(student, teacher), "uniform_average") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("registers", [2, 4])
def test_register_values_do_not_leak_into_cls_or_patch(registers):
    layout = TokenLayout(registers)
    student, teacher = make_states(registers)
    before = measure_fidelity([(student, teacher)], layout, R2_DEFINITIONS)
    for state in student[1:]:
        layout.select(state, "registers").fill_(1e6)
    after = measure_fidelity([(student, teacher)], layout, R2_DEFINITIONS)
    for group in ("cls", "patch"):
        assert after.r2[group] == before.r2[group]
        assert after.cosine[group] == before.cosine[group]
        assert [values[group] for values in after.other.values()] == [values[group] for values in before.other.values()]
    assert max(after.r2["registers"]) < -1e6
    assert max(after.r2["all"]) < -1e6


def test_layers_are_kept_apart_and_state_0_is_not_looked_at():
    layout = TokenLayout(2)
    student, teacher = make_states()
    before = measure_fidelity([(student, teacher)], layout)
    worse = list(student)
    worse[0] = torch.full_like(worse[0], math.nan)
    worse[2] = worse[2] + 1
    after = measure_fidelity([(worse, teacher)], layout)
    for group, values in before.r2.items():
        assert after.r2[group][0] == values[0]
        assert after.r2[group][1] < values[1]
        assert after.r2[group][2] == values[2]


@pytest.mark.parametrize("definition", R2_DEFINITIONS)
def test_more_noise_is_less_fidelity(definition):
    results = [
        measure_fidelity([make_states(noise=noise)], TokenLayout(2), (definition,)) for noise in (0.0, 0.1, 0.5, 2.0)
    ]
    assert results[0].mean_r2() == pytest.approx(1.0, abs=0.0 if definition != "ols" else 1e-6)
    assert results[0].cosine["all"] == pytest.approx([1.0] * LAYERS, abs=1e-6)
    for group in results[0].r2:
        scores = [result.last_r2(group) for result in results]
        assert scores == sorted(scores, reverse=True)
        assert len(set(scores)) == 4
        cosines = [result.cosine[group][-1] for result in results]
        assert cosines == sorted(cosines, reverse=True)


def test_one_dominant_feature_separates_the_definitions():
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(1, 200, 4, generator=generator) * torch.tensor([100.0, 1, 1, 1])
    student = teacher + torch.randn(teacher.shape, generator=generator)
    sums = token_sums(student, teacher)
    assert r2_from_sums(sums) > 0.99
    assert r2_from_sums(sums, "uniform_average") < 0.5


def test_global_mean_is_never_below_variance_weighted():
    for seed in range(20):
        sums = token_sums(*(states[1] for states in make_states(seed=seed, noise=3.0)))
        assert r2_from_sums(sums, "global_mean") > r2_from_sums(sums)


@pytest.mark.parametrize("definition", ["uniform_average", "variance_weighted"])
@pytest.mark.parametrize("error", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, 1234.567])
def test_constant_teacher_feature(value, dtype, error, definition):
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(50, 4, 3, generator=generator, dtype=dtype)
    student = teacher + 0.1 * torch.randn(teacher.shape, generator=generator, dtype=dtype)
    teacher[..., 1] = value
    student[..., 1] = value + error
    rows = [states.reshape(-1, 3).double().numpy() for states in (student, teacher)]
    others = [r2_score(rows[1][:, f], rows[0][:, f]) for f in (0, 2)]
    expected = np.mean([*others, 0.0 if error else 1.0])  # as scikit-learn where its mean is exact
    if definition == "variance_weighted":  # the formula; scikit-learn gives the feature's error no weight
        expected = 1 - ((rows[0] - rows[1]) ** 2).sum() / (rows[1].var(axis=0).sum() * len(rows[1]))
    accumulated = sum(token_sums(student[i : i + 1], teacher[i : i + 1]) for i in range(50))
    for sums in (token_sums(student, teacher), accumulated):
        assert r2_from_sums(sums, definition) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("definition", ["variance_weighted", "uniform_average", "global_mean"])
def test_wholly_constant_teacher_is_1_if_reproduced_else_0(definition):
    teacher = torch.full((3, 4, 5), 0.7)
    assert r2_from_sums(token_sums(teacher.clone(), teacher), definition) == 1.0
    assert r2_from_sums(token_sums(teacher + 0.01, teacher), definition) == 0.0


def test_single_token_has_no_variance():
    sums = token_sums(vectors([[1.0, 2.0]]), vectors([[1.0, 2.5]]))
    assert math.isnan(r2_from_sums(sums))
    assert math.isnan(r2_from_sums(sums, "uniform_average"))
    assert r2_from_sums(sums, "global_mean") == pytest.approx(1 - 0.25 / (2 * 0.75**2))
    nothing = token_sums(torch.zeros(0, 2, 3), torch.zeros(0, 2, 3))
    assert math.isnan(cosine_from_sums(nothing))
    assert math.isnan(r2_from_sums(nothing, "ols"))


def test_ols_ignores_scale_offset_and_sign_and_stays_in_0_to_1():
    student, teacher = (states[1] for states in make_states(noise=2.0))
    base = r2_from_sums(token_sums(student, teacher, with_ols=True), "ols")
    assert 0 < base < 1
    changed = token_sums(-3 * student + 7, teacher, with_ols=True)
    assert r2_from_sums(changed, "ols") == pytest.approx(base, abs=1e-6)
    assert r2_from_sums(changed) < 0


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        ([[1.0, 2, 3]], [[0.1, 0.1, 0.1]], 1.0),  # the bias alone fits a constant vector
        ([[0.1, 0.1, 0.1]], [[1.0, 2, 3]], 0.0),
        ([[0.3, 0.3, 0.3]], [[0.1, 0.1, 0.1]], 1.0),
        ([[0.1, 0.1, 0.1], [1, 2, 3]], [[1, 2, 3], [2.0, 4, 6]], 0.5),
    ],
)
def test_ols_of_constant_vectors(student, teacher, expected):
    sums = token_sums(vectors(student), vectors(teacher), with_ols=True)
    assert r2_from_sums(sums, "ols") == pytest.approx(expected, abs=1e-6)


def test_zero_vectors_have_cosine_0():
    sums = token_sums(vectors([[0.0, 0.0], [1.0, 0.0]]), vectors([[1.0, 0.0], [2.0, 0.0]]))
    assert cosine_from_sums(sums) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_states_are_not_hidden(bad):
    student, teacher = make_states()
    student[2][3, -1, 0] = bad
    result = measure_fidelity([(student, teacher)], TokenLayout(2), R2_DEFINITIONS)
    for per_group in (result.r2, result.cosine, *result.other.values()):
        for group in ("all", "patch"):
            assert not math.isfinite(per_group[group][1])
        assert math.isfinite(per_group["cls"][1])
        assert math.isfinite(per_group["all"][0])
    assert result.to_dict()["r2"]["patch"][1] is None


def test_precision_is_the_higher_of_the_two():
    student, teacher = make_states(dtype=torch.float64)
    half = [state.bfloat16() for state in student]
    mixed = measure_fidelity([(half, teacher)], TokenLayout(2))
    upcast = measure_fidelity([([state.double() for state in half], teacher)], TokenLayout(2))
    assert mixed == upcast


def test_autocast_and_gradients_make_no_difference():
    student, teacher = make_states()
    expected = measure_fidelity([(student, teacher)], TokenLayout(2))
    accumulator = FidelityAccumulator(LAYERS, TokenLayout(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        accumulator.update([state.clone().requires_grad_() for state in student], teacher)
    assert not accumulator.sums().requires_grad
    assert accumulator.compute() == expected


def test_updates_inside_and_outside_inference_mode():
    batch = make_states()
    accumulator = FidelityAccumulator(LAYERS, TokenLayout(2))
    with torch.inference_mode():
        accumulator.update(*batch)
        accumulator.reduce(torch.clone)
    accumulator.update(*batch)
    assert accumulator.num_images == 14
    assert accumulator.compute().mean_r2() == pytest.approx(measure_fidelity([batch], TokenLayout(2)).mean_r2())


def test_memory_does_not_grow_with_images_and_inputs_stay_untouched():
    accumulator = FidelityAccumulator(LAYERS, TokenLayout(2), R2_DEFINITIONS)
    student, teacher = make_states()
    copies = [state.clone() for state in (*student, *teacher)]
    accumulator.update(student, teacher)
    assert all(torch.equal(state, copy) for state, copy in zip((*student, *teacher), copies, strict=True))
    size = len(accumulator.sums())
    last = student[-1].clone()
    kept = weakref.ref(last)
    for _ in range(5):
        accumulator.update([*student[:-1], last], teacher)
    del last
    assert kept() is None
    assert len(accumulator.sums()) == size == 1 + LAYERS * 3 * (3 + 3 * HIDDEN)
    assert accumulator.num_images == 42


def test_images_of_different_size_may_follow_each_other():
    student, teacher = make_states()
    fewer = [[state[:, :-2] for state in states] for states in (student, teacher)]
    result = measure_fidelity([(student, teacher), tuple(fewer)], TokenLayout(2))
    tokens = [[rows_of(state[1], TokenLayout(2), "all") for state in pair] for pair in ((student, teacher), fewer)]
    expected = reference_r2(*(np.concatenate(rows) for rows in zip(*tokens, strict=True)), "variance_weighted")
    assert result.r2["all"][0] == pytest.approx(expected, abs=1e-6)


def test_first_definition_is_the_main_one():
    batch = make_states()
    both = measure_fidelity([batch], TokenLayout(2), ("ols", "variance_weighted", "ols"))
    assert both.definition == "ols"
    assert list(both.other) == ["variance_weighted"]
    assert both.r2 == measure_fidelity([batch], TokenLayout(2), ("ols",)).r2
    assert both.other["variance_weighted"] == measure_fidelity([batch], TokenLayout(2)).r2


def test_summaries_and_strict_json():
    result = Fidelity(
        r2={"all": [0.5, 0.25], "cls": [math.nan, 1.0]},
        cosine={"all": [0.75, 0.5], "cls": [0.5, 1.0]},
        num_images=1,
        num_layers=2,
        definition="variance_weighted",
        other={"ols": {"all": [0.125, math.inf]}},
    )
    assert result.mean_r2() == 0.375
    assert result.last_r2() == 0.25
    assert math.isnan(result.mean_r2("cls"))
    assert result.last_r2("cls") == 1.0
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["r2"]["cls"] == [None, 1.0]
    assert values["other"]["ols"]["all"] == [0.125, None]
    again = Fidelity.from_dict(values)
    assert math.isnan(again.r2["cls"][0])
    assert again.cosine == result.cosine
    assert again.to_dict() == values
    with pytest.raises(ValueError, match="group='patch' was not measured; use one of 'all', 'cls'"):
        result.mean_r2("patch")
    with pytest.raises(ValueError, match=r"fields \['num_layers', 'sigma'\] are missing or unknown"):
        Fidelity.from_dict({**{k: v for k, v in values.items() if k != "num_layers"}, "sigma": 1})


def test_computed_values_are_plain_floats():
    result = measure_fidelity([make_states()], TokenLayout(2), R2_DEFINITIONS)
    for per_group in (result.r2, result.cosine, *result.other.values()):
        assert all(type(value) is float for per_layer in per_group.values() for value in per_layer)
    assert type(result.num_images) is int
    assert Fidelity.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result


def test_sums_of_devices_without_float64_are_kept_on_the_cpu():
    assert _sum_device(torch.device("mps")) == torch.device("cpu")
    assert _sum_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


def cut(states, number, change):
    states = list(states)
    states[number] = change(states[number])
    return states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, t: (s[1:], t), "3 student and 4 teacher states for 3 layers; pass states 0..3, 4 of each"),
        (lambda s, t: (s, t[1:]), "4 student and 3 teacher states for 3 layers"),
        (lambda s, t: (cut(s, 3, lambda x: x[:-1]), t), r"student state 3 is torch.float32 of shape \(6, 8, 6\)"),
        (lambda s, t: (s, cut(t, 2, lambda x: x[..., :1])), r"teacher state 2 is .* of shape \(7, 8, 1\)"),
        (lambda s, t: (s, cut(t, 2, torch.Tensor.long)), "teacher state 2 is torch.int64"),
        (lambda s, t: (cut(s, 1, lambda x: x[0]), t), r"states of shape \(8, 6\); pass \(batch_size, seq_length"),
        (lambda s, t: ([x[:, :3] for x in s], [x[:, :3] for x in t]), r"shape \(7, 3, 6\).* at least one patch"),
        (lambda s, t: ([x[..., :4] for x in s], [x[..., :4] for x in t]), "states with 4 features where hidden_size=6"),
    ],
)
def test_wrong_states_are_refused_and_add_nothing(change, message):
    student, teacher = make_states()
    accumulator = FidelityAccumulator(LAYERS, TokenLayout(2), hidden_size=HIDDEN)
    with pytest.raises(ValueError, match=message):
        accumulator.update(*change(student, teacher))
    accumulator.update(student, teacher)
    before = accumulator.sums()
    with pytest.raises(ValueError, match=message):
        accumulator.update(*change(student, teacher))
    assert torch.equal(accumulator.sums(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 is below 1"),
        ({"hidden_size": 0}, "hidden_size=0 is below 1"),
        ({"definitions": ("r2",)}, r"definitions=\('r2',\) are not all R2 definitions; use one or more of variance_"),
        ({"definitions": "ols"}, "definitions='ols' are not all R2 definitions"),
        ({"definitions": ()}, r"definitions=\(\) are not"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FidelityAccumulator(**{"num_layers": LAYERS, "layout": TokenLayout(2), **arguments})


def test_unknown_definition_of_sums_is_refused():
    with pytest.raises(ValueError, match="are not all R2 definitions"):
        r2_from_sums(torch.zeros(6, dtype=torch.float64), "adjusted")


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="no batch of states was given"):
        measure_fidelity(iter(()), TokenLayout(0))
    for hidden_size in (None, HIDDEN):
        empty = FidelityAccumulator(LAYERS, TokenLayout(0), hidden_size=hidden_size)
        with pytest.raises(ValueError, match="no image was measured"):
            empty.compute()
    with pytest.raises(ValueError, match="hidden_size is unknown before the first update"):
        FidelityAccumulator(LAYERS, TokenLayout(0)).sums()


@pytest.mark.parametrize(
    ("sums", "message"),
    [
        (torch.zeros(10), "sums of torch.float32 in 1 dimensions"),
        (torch.zeros(1, 10, dtype=torch.float64), "sums of torch.float64 in 2 dimensions"),
        (torch.zeros(1 + 6 * 9 + 1, dtype=torch.float64), "56 sums do not belong to 3 layers"),
        (torch.zeros(1 + 6 * 10, dtype=torch.float64), "61 sums do not belong to 3 layers"),
        (torch.zeros(1 + 6 * 3, dtype=torch.float64), "19 sums do not belong"),
        (torch.zeros(0, dtype=torch.float64), "0 sums do not belong"),
        (torch.zeros(1 + 6 * 9, dtype=torch.float64), "hidden_size=6; make all accumulators with the same arguments"),
    ],
)
def test_foreign_sums_are_refused(sums, message):
    accumulator = FidelityAccumulator(LAYERS, TokenLayout(0), hidden_size=HIDDEN if "hidden_size" in message else None)
    with pytest.raises(ValueError, match=message):
        accumulator.load_sums(sums)
    assert accumulator.num_images == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_layers": LAYERS + 1},
        {"layout": TokenLayout(1)},
        {"definitions": ("ols",)},
        {"hidden_size": HIDDEN + 1},
    ],
)
def test_different_accumulators_do_not_merge(arguments):
    same = {"num_layers": LAYERS, "layout": TokenLayout(2), "hidden_size": HIDDEN}
    with pytest.raises(ValueError, match=r"accumulators differ: .* make both with the same arguments"):
        FidelityAccumulator(**same).merge(FidelityAccumulator(**{**same, **arguments}))
