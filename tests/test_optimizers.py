"""Muon and AdamW as one optimiser: who steps what, parts of stacked matrices, one state that resumes bit for bit."""

import copy

import pytest
import torch
from torch import nn

from raptor_hf.optimizers import MuonAdamW, block_parameter_groups


@pytest.fixture
def gradients():
    """Factory: the same gradients in every call with the same step."""

    def factory(parameters, step):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    return factory


def matrix(rows, columns, seed=0):
    return nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


def test_groups_of_a_raptor(make_model):
    model = make_model(mlp_type="swiglu", adapter_rank=2)
    model.freeze_embeddings()
    decayed = [name for name, _ in model.named_parameters() if name.endswith("fc2.weight")]
    groups = block_parameter_groups(model, decayed, weight_decay=0.5)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        (group["num_parts"], group["weight_decay"]): sorted(names[parameter] for parameter in group["params"])
        for group in groups
    }
    assert found[3, 0.0] == ["blocks.0.attention.qkv.weight", "blocks.1.attention.qkv.weight"]
    assert found[2, 0.0] == ["blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc1.weight"]
    assert found[1, 0.0] == ["blocks.0.attention.proj.weight", "blocks.1.attention.proj.weight"]
    assert found[1, 0.5] == ["blocks.0.mlp.fc2.weight", "blocks.1.mlp.fc2.weight"]
    rest = found[0, 0.0]
    assert set(found) == {(3, 0.0), (2, 0.0), (1, 0.0), (1, 0.5), (0, 0.0)}
    assert {"blocks.0.depth_scale.linear2.weight", "blocks.0.mlp.fc1.adapter_up", "blocks.1.norm1.bias"} <= set(rest)
    assert not [name for name in rest if name.startswith(("embeddings", "layernorm"))]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(name for members in found.values() for name in members) == sorted(trained)


def test_gelu_fc1_is_one_matrix(make_model):
    model = make_model()
    parts = {
        parameter: group["num_parts"]
        for group in block_parameter_groups(model, (), 0.0)
        for parameter in group["params"]
    }
    assert parts[model.blocks[0].mlp.fc1.weight] == 1


def test_steps_equal_torchs_own_optimizers(gradients):
    weight, bias = matrix(6, 4), nn.Parameter(torch.ones(6))
    own_weight, own_bias = copy.deepcopy(weight), copy.deepcopy(bias)
    optimizer = MuonAdamW(
        [{"params": [weight], "num_parts": 1, "weight_decay": 0.1}, {"params": [bias], "num_parts": 0}], lr=0.02
    )
    muon = torch.optim.Muon([own_weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([own_bias], lr=0.02, weight_decay=0.0)
    for step in range(3):
        gradients([weight, bias], step)
        gradients([own_weight, own_bias], step)
        optimizer.step()
        muon.step()
        adamw.step()
    assert torch.equal(weight, own_weight)
    assert torch.equal(bias, own_bias)


def test_stacked_projections_are_orthogonalised_apart(gradients):
    stacked = matrix(12, 4)
    apart = [nn.Parameter(part.clone()) for part in stacked.detach().chunk(3)]
    optimizer = MuonAdamW([{"params": [stacked], "num_parts": 3}], lr=0.02)
    muon = torch.optim.Muon(apart, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        gradients([stacked], step)
        for part, gradient in zip(apart, stacked.grad.chunk(3), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
        muon.step()
    assert torch.equal(stacked, torch.cat([part.detach() for part in apart]))
    whole = matrix(12, 4)
    one_part = MuonAdamW([{"params": [whole], "num_parts": 1}], lr=0.02)
    gradients([whole], 0)
    one_part.step()
    start = matrix(12, 4)
    gradients([start], 0)
    MuonAdamW([{"params": [start], "num_parts": 3}], lr=0.02).step()
    assert not torch.allclose(whole, start, atol=1e-3)


def test_state_resumes_bit_for_bit(gradients):
    def make():
        parameters = [matrix(6, 4), nn.Parameter(torch.ones(6))]
        groups = [{"params": parameters[:1], "num_parts": 3}, {"params": parameters[1:], "num_parts": 0}]
        return parameters, MuonAdamW(groups, lr=0.02, weight_decay=0.01)

    through, optimizer = make()
    for step in range(4):
        gradients(through, step)
        optimizer.step()
    halfway, first = make()
    for step in range(2):
        gradients(halfway, step)
        first.step()
    resumed, second = make()
    with torch.no_grad():
        for parameter, value in zip(resumed, halfway, strict=True):
            parameter.copy_(value)
    state = copy.deepcopy(first.state_dict())
    assert set(state["state"][0]) == {"momentum_buffer"}
    assert set(state["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}
    second.load_state_dict(state)
    for step in range(2, 4):
        gradients(resumed, step)
        second.step()
    assert all(torch.equal(a, b) for a, b in zip(through, resumed, strict=True))


def test_schedulers_set_the_rate_of_both(gradients):
    weight, bias = matrix(4, 4), nn.Parameter(torch.ones(4))
    optimizer = MuonAdamW([{"params": [weight], "num_parts": 1}, {"params": [bias], "num_parts": 0}], lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    gradients([weight, bias], 0)
    optimizer.step()
    scheduler.step()
    before = weight.clone(), bias.clone()
    gradients([weight, bias], 1)
    optimizer.step()
    assert torch.equal(weight, before[0])
    assert torch.equal(bias, before[1])


def test_parameters_without_gradient_stay(gradients):
    used, unused = matrix(4, 4), matrix(4, 4, seed=1)
    before = unused.clone()
    optimizer = MuonAdamW([{"params": [used, unused], "num_parts": 1}], lr=0.02, weight_decay=0.1)
    gradients([used], 0)
    optimizer.step()
    assert torch.equal(unused, before)
    assert unused not in optimizer.state


def test_closure_gives_the_loss():
    weight = matrix(4, 4)
    optimizer = MuonAdamW([{"params": [weight], "num_parts": 1}], lr=0.02)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_rows_that_cannot_be_cut():
    with pytest.raises(ValueError, match="4 rows cannot be cut into num_parts=3"):
        MuonAdamW([{"params": [matrix(4, 4)], "num_parts": 3}])
