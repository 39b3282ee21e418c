"""The wrapped student: its losses, which blocks they reach, and that a perfect student has none."""

import pytest
import torch

from raptor_hf import RaptorModel
from raptor_hf.distillation import DistillationObjective, RaptorForDistillation


@pytest.fixture
def teacher(make_teacher):
    return make_teacher(num_hidden_layers=4)


@pytest.fixture
def states(teacher, pixels):
    return teacher.hidden_states(pixels)


def wrap(teacher, repeats=(2, 2), blocks=None, init="first", **options):
    torch.manual_seed(0)
    student = RaptorModel.from_teacher(teacher, repeats, init=init)
    return RaptorForDistillation(student.config, student, DistillationObjective(**options), blocks).train()


def assert_same(one, other):
    own, expected = one.state_dict(), other.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.raptor.blocks.named_parameters()}


@pytest.mark.parametrize("stage", ["blocks", "end_to_end"])
@pytest.mark.parametrize("objective", ["hybrid", "teacher_forcing", "autoregressive", "terminal"])
@pytest.mark.parametrize("error", ["mse", "squared", "frobenius"])
def test_the_teacher_as_its_own_student_has_no_error(teacher, states, stage, objective, error):
    model = wrap(teacher, (1, 1, 1, 1), stage=stage, objective=objective, error=error)
    output = model(states, teacher_forcing_weight=0.5, return_states=True)
    assert output.loss.item() < 1e-4 * states[-1].norm().item()
    assert torch.isfinite(output.loss)
    worse = wrap(teacher, (2, 2), stage=stage, objective=objective, error=error)(states, teacher_forcing_weight=0.5)
    assert worse.loss.item() > 100 * max(output.loss.item(), 1e-9)


def test_hybrid_mixes_the_two_parts(teacher, states):
    model = wrap(teacher, stage="blocks")
    output = model(states, teacher_forcing_weight=0.3)
    torch.testing.assert_close(output.loss, 0.3 * output.tf + 0.7 * output.ar)
    assert model(states, teacher_forcing_weight=0.0).tf is None
    assert model(states, teacher_forcing_weight=1.0).ar is None
    torch.testing.assert_close(wrap(teacher, stage="blocks", objective="teacher_forcing")(states).loss, output.tf)
    torch.testing.assert_close(wrap(teacher, stage="blocks", objective="autoregressive")(states).loss, output.ar)


def test_stage_one_weighs_tokens_in_the_last_block_alone(teacher, states):
    heavy = {"cls": 10.0, "registers": 0.0, "patch": 0.0}
    plain = wrap(teacher, stage="blocks", last_block_weights={"cls": 1.0, "registers": 1.0, "patch": 1.0})
    weighted = wrap(teacher, stage="blocks", last_block_weights=heavy)
    for model in (plain, weighted):
        model(states).loss.backward()
    first, last = "0.mlp.fc1.weight", "1.mlp.fc1.weight"
    torch.testing.assert_close(gradients(plain)[first], gradients(weighted)[first])
    assert not torch.allclose(gradients(plain)[last], gradients(weighted)[last])


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("repeats", [(2, 2), (1, 1, 2)])
def test_joint_stage_one_has_the_gradients_of_every_block_trained_alone(teacher, states, repeats, reduction, weight):
    joint = wrap(teacher, repeats, init="random", stage="blocks", layer_reduction=reduction)
    joint(states, teacher_forcing_weight=weight).loss.backward()
    for block in range(len(repeats)):
        alone = wrap(teacher, repeats, [block], "random", stage="blocks", layer_reduction=reduction)
        alone(states, teacher_forcing_weight=weight).loss.backward()
        for name, gradient in gradients(joint).items():
            if name.startswith(f"{block}."):
                assert torch.equal(gradient, gradients(alone)[name]), name
                assert gradient.abs().max() > 0 or "depth_scale.linear1" in name
            else:
                assert gradients(alone)[name] is None


def test_only_the_chosen_blocks_learn(teacher, states):
    model = wrap(teacher, (2, 2), blocks=[1], stage="blocks")
    model(states).loss.backward()
    learning = {name.split(".")[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning == {"1"}
    assert all(p.grad is None for p in model.raptor.blocks[0].parameters())
    frozen = (*model.raptor.embeddings.parameters(), *model.raptor.layernorm.parameters())
    assert not any(parameter.requires_grad for parameter in frozen)
    with pytest.raises(ValueError, match=r"blocks=\[2\]: this model has the blocks 0 to 1"):
        wrap(teacher, (2, 2), blocks=[2], stage="blocks")


def test_a_block_with_several_runs_trains_on_all_of_them(teacher, states):
    class Alternating:
        block_schedule = (0, 1, 0, 1)

    student = RaptorModel.from_teacher(teacher, Alternating())
    model = RaptorForDistillation(student.config, student, DistillationObjective(stage="blocks")).train()
    output = model(states, return_states=True)
    for layer in (1, 2, 3, 4):  # every run is one layer long and starts at the teacher's state
        expected = student.apply_layer(states[layer - 1], layer)
        torch.testing.assert_close(output.student_states[layer], expected)
    losses = [(output.student_states[layer] - states[layer]).square().mean() for layer in (1, 3)]
    first_block = RaptorForDistillation(student.config, student, DistillationObjective(stage="blocks"), [0])
    torch.testing.assert_close(first_block(states).loss, torch.stack(losses).mean())


def test_noise_is_seeded_and_only_in_training(teacher, states):
    model = wrap(teacher, stage="end_to_end", input_noise_std=0.5)
    one, same, other = (model(states, noise_seed=seed).loss for seed in (1, 1, 2))
    assert one == same
    assert one != other
    model.eval()
    assert model(states).loss == wrap(teacher, stage="end_to_end").eval()(states).loss
    model.train()
    with pytest.raises(ValueError, match=r"input_noise_std=0\.5 needs a noise_seed"):
        model(states)


def test_rollout_is_the_model_itself(teacher, states, pixels):
    model = wrap(teacher, stage="blocks").eval()
    with torch.no_grad():
        own = model(states, rollout=True).student_states
        expected = model.raptor(pixels, output_hidden_states=True).hidden_states
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_loss_scale_makes_layers_count_alike(teacher, states):
    model = wrap(teacher, stage="end_to_end", end_to_end_weights={"cls": 0, "registers": 0, "patch": 1})
    plain = model(states).loss
    model.loss_scale = {group: [4.0] * 4 for group in ("all", "cls", "registers", "patch")}
    torch.testing.assert_close(model(states).loss, plain / 4)


def test_components_are_the_groups_errors(teacher, states):
    output = wrap(teacher, stage="end_to_end")(states, return_states=True)
    errors = [own - target for own, target in zip(output.student_states[1:], states[1:], strict=True)]
    torch.testing.assert_close(output.cls, torch.stack([e[:, :1].square().mean() for e in errors]).mean())
    torch.testing.assert_close(output.reg, torch.stack([e[:, 1:5].square().mean() for e in errors]).mean())
    torch.testing.assert_close(output.patch, torch.stack([e[:, 5:].square().mean() for e in errors]).mean())


def test_training_lowers_the_loss(teacher, states):
    model = wrap(teacher, stage="end_to_end")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    first = model(states).loss.item()
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(states).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5 * first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "both"}, "stage='both' is unknown; use one of blocks, end_to_end"),
        ({"objective": "mixed"}, "objective='mixed' is unknown"),
        ({"horizon": 0}, "horizon=0 must be at least 1 layer"),
        ({"input_noise_std": -1.0}, r"input_noise_std=-1\.0 must be 0 or more"),
    ],
)
def test_wrong_objectives_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DistillationObjective(**options)


def test_another_number_of_layers_is_named(teacher, states):
    with pytest.raises(ValueError, match="4 hidden states for a student of 4 layers"):
        wrap(teacher)(states[:-1])


def test_wrapper_base_and_wrapper_load_into_each_other(teacher, tmp_path):
    model = wrap(teacher)
    model.save_pretrained(tmp_path / "wrapper")
    inner = RaptorModel.from_pretrained(tmp_path / "wrapper")
    assert_same(inner, model.raptor)
    inner.save_pretrained(tmp_path / "inner")
    again = RaptorForDistillation.from_pretrained(tmp_path / "inner")
    assert_same(again, model)
