"""One matrix for a run of layers: exact where the layers are one matrix, and honest beside its baselines."""

import pytest
import torch
from sklearn.linear_model import Ridge

from raptor_hf.dynamics import SpanMapEstimator, compare_tokens, fit_span_map


def rollout(step, num_steps=3, num_tokens=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(5, num_tokens // 5, len(step), generator=generator, dtype=torch.float64)]
    for _ in range(num_steps):
        states.append(states[-1] @ step.T)
    return states


@pytest.fixture
def step():
    return torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q * 0.9


def test_layers_that_are_one_matrix_are_found(step):
    span_map = fit_span_map(rollout(step))
    torch.testing.assert_close(span_map.step, step, atol=1e-9, rtol=0)
    torch.testing.assert_close(span_map.endpoint, torch.linalg.matrix_power(step, 3), atol=1e-9, rtol=0)
    held_out = rollout(step, seed=1)
    scores = span_map.evaluate(held_out[0], held_out[-1])
    assert scores["step"].cosine == pytest.approx(1)
    assert scores["step"].relative_error < 1e-8
    assert scores["endpoint"].relative_error < 1e-8
    assert scores["identity"].relative_error > 0.5
    assert scores["identity"].num_tokens == 50
    torch.testing.assert_close(span_map.predict(held_out[0], num_layers=1), held_out[1], atol=1e-9, rtol=0)
    assert torch.equal(span_map.predict(held_out[0], num_layers=0), held_out[0])


def test_layers_that_are_not_one_matrix_leave_the_step_behind_the_endpoint():
    first, second = torch.diag(torch.tensor([1.0, 0.1])), torch.diag(torch.tensor([0.1, 1.0]))
    start = torch.randn(1, 40, 2)
    states = [start, start @ first, start @ first @ second]
    scores = fit_span_map(states).evaluate(states[0], states[2])
    assert scores["endpoint"].relative_error < 1e-5
    assert scores["step"].relative_error > 0.5


@pytest.mark.parametrize("ridge", [0.5, 10.0])
def test_ridge_is_that_of_scikit_learn(step, ridge):
    states = [state + 0.1 * torch.randn_like(state) for state in rollout(step)]
    before = torch.cat([state.flatten(0, 1) for state in states[:-1]]).numpy()
    after = torch.cat([state.flatten(0, 1) for state in states[1:]]).numpy()
    reference = Ridge(alpha=ridge, fit_intercept=False, solver="cholesky").fit(before, after)
    torch.testing.assert_close(fit_span_map(states, ridge).step, torch.from_numpy(reference.coef_), atol=1e-9, rtol=0)


def test_a_truncated_map_has_that_rank_and_keeps_the_largest_inputs(step):
    states = [state * torch.tensor([9.0, 5, 3, 1, 1, 1]) for state in rollout(step)]
    cut = fit_span_map(states, rank=2)
    assert int(torch.linalg.matrix_rank(cut.step)) == 2
    assert cut.rank == 2
    torch.testing.assert_close(fit_span_map(states, rank=6).step, fit_span_map(states).step)


def test_batches_add_up_and_half_precision_comes_back_as_it_was(step):
    states = rollout(step)
    estimator = SpanMapEstimator()
    for image in range(5):
        estimator.update([state[image] for state in states])
    torch.testing.assert_close(estimator.fit().step, fit_span_map(states).step, atol=1e-11, rtol=0)
    assert estimator.fit().num_tokens == 50
    assert fit_span_map(states).predict(states[0].bfloat16()).dtype == torch.bfloat16


def test_tokens_without_direction_in_comparisons():
    target = torch.tensor([[0.0, 0], [0, 0], [3, 4]])
    score = compare_tokens(torch.tensor([[0.0, 0], [1, 0], [3, 4]]), target)
    assert score.cosine == pytest.approx(1 / 3)
    assert score.relative_error == pytest.approx(1 / 3)


def test_directions_without_any_input_stay_out(step):
    states = [torch.cat([state, torch.zeros_like(state)], dim=-1) for state in rollout(step)]
    span_map = fit_span_map(states)
    assert torch.isfinite(span_map.step).all()
    assert not span_map.step[:, 6:].any()


def test_wrong_input_is_named(step):
    states, estimator = rollout(step), SpanMapEstimator()
    with pytest.raises(ValueError, match=r"no token was seen"):
        estimator.fit()
    with pytest.raises(ValueError, match=r"pass the states l..l\+p of one span"):
        estimator.update(states[:1])
    estimator.update(states)
    with pytest.raises(ValueError, match=r"after spans of 3 layers"):
        estimator.update(states[:2])
    with pytest.raises(ValueError, match=r"states of 4 features after 6"):
        estimator.update([state[..., :4] for state in states])
    with pytest.raises(ValueError, match=r"ridge=-1 is no penalty"):
        estimator.fit(-1)
    with pytest.raises(ValueError, match=r"rank=7 for 6 features"):
        estimator.fit(rank=7)
    span_map = estimator.fit()
    with pytest.raises(ValueError, match=r"method='power' is no map of a span"):
        span_map.predict(states[0], "power")
    with pytest.raises(ValueError, match=r"num_layers=2 with method='identity'"):
        span_map.predict(states[0], "identity", 2)
    with pytest.raises(ValueError, match=r"for a map of 6 features"):
        span_map.predict(states[0][..., :3])
    with pytest.raises(ValueError, match=r"pass the same tokens"):
        compare_tokens(states[0], states[0][:1])
    estimator.update([torch.full_like(state, torch.inf) for state in states])
    with pytest.raises(ValueError, match=r"hold infinity or NaN"):
        estimator.fit()
