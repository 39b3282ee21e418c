"""Errors and objectives against loops that follow the definitions."""

import pytest
import torch

from raptor_hf.losses import LayerErrors, StateError, autoregressive, layer_variances, teacher_forcing, terminal
from raptor_hf.tokens import Segment, TokenLayout

LAYOUT = TokenLayout(2)
SLICES = {"cls": slice(0, 1), "registers": slice(1, 3), "patch": slice(3, None), "all": slice(None)}
WEIGHTS = {"cls": 0.34, "registers": 0.33, "patch": 0.33}


def reference(student, teacher, error):
    """Error of a group as the paper or its code writes it."""
    if error == "mse":
        return (student - teacher).square().mean()
    norms = torch.stack([torch.linalg.matrix_norm(a - b) for a, b in zip(student, teacher, strict=True)])
    return norms.mean() if error == "frobenius" else norms.square().mean()


@pytest.fixture
def pair():
    return torch.randn(3, 8, 5, dtype=torch.float64), torch.randn(3, 8, 5, dtype=torch.float64)


@pytest.mark.parametrize("error", ["mse", "squared", "frobenius"])
def test_group_errors_equal_the_definition(pair, error):
    student, teacher = pair
    measured = StateError(LAYOUT, error).group_errors(student, teacher, layer=1)
    assert set(measured) == set(SLICES)
    for group, span in SLICES.items():
        expected = reference(student[:, span], teacher[:, span], error)
        torch.testing.assert_close(measured[group], expected)


@pytest.mark.parametrize("error", ["mse", "squared", "frobenius"])
def test_scale_divides_by_variance_and_a_norm_by_the_deviation(pair, error):
    scale = {group: [9.0, 4.0] for group in SLICES}
    plain = StateError(LAYOUT, error).group_errors(*pair, layer=2)["patch"]
    scaled = StateError(LAYOUT, error, scale=scale).group_errors(*pair, layer=2)["patch"]
    torch.testing.assert_close(scaled, plain / (2.0 if error == "frobenius" else 4.0))


@pytest.mark.parametrize("error", ["mse", "squared", "frobenius"])
def test_direction_adds_one_minus_the_mean_cosine(pair, error):
    scale = {group: [4.0] for group in SLICES}
    plain = StateError(LAYOUT, error, scale=scale).group_errors(*pair, layer=1)
    turned = StateError(LAYOUT, error, scale=scale, direction_weight=0.5).group_errors(*pair, layer=1)
    cosine = torch.cosine_similarity(*pair, dim=-1)
    for group, span in SLICES.items():
        torch.testing.assert_close(turned[group] - plain[group], 0.5 * (1 - cosine[:, span].mean()))


def test_a_negative_direction_weight():
    with pytest.raises(ValueError, match=r"direction_weight=-1.0 must be 0 or more"):
        StateError(LAYOUT, direction_weight=-1.0)


def test_total_is_the_weighted_sum_of_groups(pair):
    error = StateError(LAYOUT, "mse", WEIGHTS)
    groups = error.group_errors(*pair, layer=1)
    expected = sum(WEIGHTS[group] * groups[group] for group in WEIGHTS)
    torch.testing.assert_close(error.total(groups), expected)
    plain = StateError(LAYOUT, "mse")
    torch.testing.assert_close(plain.total(groups), groups["all"])


def test_without_registers_the_term_is_absent_and_weights_are_renormalised(pair):
    error = StateError(TokenLayout(0), "mse", {"cls": 0.45, "registers": 0.10, "patch": 0.45})
    assert error.weights == pytest.approx({"cls": 0.5, "patch": 0.5})
    groups = error.group_errors(*pair, layer=1)
    assert set(groups) == {"all", "cls", "patch"}
    assert torch.isfinite(error.total(groups))


def test_norm_of_no_difference_has_gradient_zero(pair):
    student = pair[1].clone().requires_grad_()
    error = StateError(LAYOUT, "frobenius")
    error.total(error.group_errors(student, pair[1], layer=1)).backward()
    assert student.grad.abs().max() == 0


def test_half_precision_is_measured_in_float32():
    student = torch.full((1, 4, 2), 300.0, dtype=torch.float16)  # its square is beyond float16
    value = StateError(LAYOUT).group_errors(student, torch.zeros_like(student), layer=1)["all"]
    assert value.dtype == torch.float32
    assert value == 90_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error": "l1"}, "error='l1' is unknown; use one of mse, squared, frobenius"),
        ({"token_weights": {"cls": -1.0}}, "weights must be 0 or more"),
        ({"token_weights": {"mask": 1.0}}, "of the groups cls, registers, patch"),
        ({"token_weights": {"cls": 0.0}}, "leaves no token group with a weight"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StateError(LAYOUT, **options)


def test_unknown_reduction_is_named(pair):
    errors = LayerErrors()
    errors.add(StateError(LAYOUT), 1, *pair)
    with pytest.raises(ValueError, match="layer_reduction='max' is unknown; use one of mean, sum"):
        errors.reduce("max")


# ---- which states are compared ----

SEGMENTS = [Segment(0, 0, 2), Segment(1, 2, 3)]


def step(block, hidden_states, depth):
    """A block that depends on its number, its input and the layer, sample by sample."""
    depth = torch.as_tensor(depth, dtype=hidden_states.dtype).reshape(-1, 1, 1)
    return hidden_states * (1 + block) + 0.1 * depth


@pytest.fixture
def states():
    return [torch.randn(2, 5, 3, dtype=torch.float64) for _ in range(4)]


def test_teacher_forcing_steps_from_the_teachers_states(states):
    errors = teacher_forcing(step, states, SEGMENTS, StateError(LAYOUT))
    assert errors.layers == [1, 2, 3]
    for layer, block in ((1, 0), (2, 0), (3, 1)):
        torch.testing.assert_close(errors.states[layer - 1], step(block, states[layer - 1], layer))
        expected = (step(block, states[layer - 1], layer) - states[layer]).square().mean()
        torch.testing.assert_close(errors.totals[layer - 1], expected)


def test_autoregression_steps_from_its_own_states(states):
    errors = autoregressive(step, states, SEGMENTS, StateError(LAYOUT))
    state = states[0]
    for layer, block in ((1, 0), (2, 0), (3, 1)):
        state = step(block, state, layer)
        torch.testing.assert_close(errors.states[layer - 1], state)
        torch.testing.assert_close(errors.totals[layer - 1], (state - states[layer]).square().mean())
    torch.testing.assert_close(errors.reduce("sum"), 3 * errors.reduce("mean"))


def test_a_path_starts_at_the_teachers_state_of_its_segment(states):
    errors = autoregressive(step, states, SEGMENTS[1:], StateError(LAYOUT))
    assert errors.layers == [3]
    torch.testing.assert_close(errors.states[0], step(1, states[2], 3))


@pytest.mark.parametrize(("horizon", "last"), [(1, 1), (2, 2), (3, 3), (9, 3), (None, 3)])
def test_horizon_counts_layers_from_the_start(states, horizon, last):
    layers = list(range(1, last + 1))
    assert autoregressive(step, states, SEGMENTS, StateError(LAYOUT), horizon).layers == layers


def test_terminal_compares_the_last_layer_alone(states):
    errors = terminal(step, states, SEGMENTS, StateError(LAYOUT))
    full = autoregressive(step, states, SEGMENTS, StateError(LAYOUT))
    assert errors.layers == [3]
    torch.testing.assert_close(errors.totals[0], full.totals[-1])


# ---- variances ----


def test_layer_variances_equal_the_definition_and_do_not_depend_on_batches():
    states = [torch.randn(7, 8, 5, dtype=torch.float64) * (layer + 1) + layer for layer in range(4)]
    whole = layer_variances([states], LAYOUT)
    parts = layer_variances([[s[:3] for s in states], [s[3:] for s in states]], LAYOUT)
    for group, span in SLICES.items():
        for layer in (1, 2, 3):
            tokens = states[layer][:, span].flatten(0, 1)
            expected = tokens.var(dim=0, correction=0).mean().item()
            assert whole[group][layer - 1] == pytest.approx(expected, rel=1e-10)
            assert parts[group][layer - 1] == pytest.approx(expected, rel=1e-10)


def test_mse_over_variance_is_one_minus_r2():
    teacher, student = torch.randn(6, 8, 5).double(), torch.randn(6, 8, 5).double()
    scale = layer_variances([[teacher, teacher]], LAYOUT)
    error = StateError(LAYOUT, scale=scale).group_errors(student, teacher, layer=1)["all"]
    flat = teacher.flatten(0, 1)
    r2 = 1 - (student - teacher).square().sum() / (flat - flat.mean(0)).square().sum()
    assert error.item() == pytest.approx(1 - r2.item(), rel=1e-9)


def test_no_images_and_constant_layers_are_errors():
    with pytest.raises(ValueError, match="layer variances of no images"):
        layer_variances([], LAYOUT)
    with pytest.raises(ValueError, match="cls tokens do not vary over the images of loss_scale_images"):
        layer_variances([[torch.randn(1, 8, 5)] * 2], LAYOUT)
