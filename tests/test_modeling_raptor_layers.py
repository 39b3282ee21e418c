"""Adapters: a low-rank change that every application has to itself, and what they leave alone."""

import pytest
import torch

from raptor_hf import RaptorConfig, RaptorModel

PROJECTIONS = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")


def with_adapters(model, layer):
    """The same model without adapters, whose block of `layer` has that application's change in its weights."""
    config = RaptorConfig(**{**model.config.to_dict(), "adapter_rank": 0})
    plain = RaptorModel(config).to(model.dtype)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "adapter" not in name})
    number = config.block_schedule[layer - 1]
    application = config.block_schedule[: layer - 1].count(number)
    with torch.no_grad():
        for name in PROJECTIONS:
            own, target = model.blocks[number].get_submodule(name), plain.blocks[number].get_submodule(name)
            target.weight += own.adapter_up[application] @ own.adapter_down[application]
    return plain.eval()


@pytest.mark.parametrize("mlp_type", ["gelu", "swiglu"])
@pytest.mark.parametrize("schedule", [[0, 0, 1], [0, 1, 0, 1, 0]], ids=["contiguous", "noncontiguous"])
def test_every_application_has_its_own_change(schedule, mlp_type, make_model, pixels):
    model = make_model(block_schedule=schedule, mlp_type=mlp_type, adapter_rank=3).double()
    with torch.no_grad():
        states = model(pixels.double(), output_hidden_states=True).hidden_states
        for layer in range(1, len(schedule) + 1):
            expected = with_adapters(model, layer).apply_layer(states[layer - 1], layer)
            torch.testing.assert_close(states[layer], expected, rtol=1e-10, atol=1e-10)


def test_a_depth_for_each_sample(make_model):
    model = make_model(block_schedule=[0, 0, 0, 1], adapter_rank=2)
    states = torch.randn(3, 7, 32)
    with torch.no_grad():
        together = model.apply_block(0, states, [1, 3, 2])
        apart = torch.cat([model.apply_block(0, states[i : i + 1], layer) for i, layer in enumerate((1, 3, 2))])
    torch.testing.assert_close(together, apart)
    assert not torch.allclose(together[1], model.apply_block(0, states[1:2], 1)[0], atol=1e-4)


def test_a_layer_of_another_block_takes_the_nearest_application(make_model):
    block = make_model(block_schedule=[0, 0, 1, 1, 1], adapter_rank=1).blocks[1]
    depths = torch.tensor([1.0, 3.0, 4.0, 5.0, 9.0])
    assert block.application(depths).tolist() == [0, 0, 1, 2, 2]
    assert block.application(torch.tensor(4.0)).tolist() == [1]


def test_without_rank_there_is_nothing(make_model):
    model = make_model()
    assert not [name for name in model.state_dict() if "adapter" in name]
    assert model.blocks[0].application(torch.tensor(1.0)) is None


def test_names_shapes_and_share_of_parameters(make_model):
    model, plain = make_model(adapter_rank=2), make_model()
    block = model.blocks[0]
    assert block.attention.qkv.adapter_down.shape == (2, 2, 32)
    assert block.attention.qkv.adapter_up.shape == (2, 96, 2)
    assert model.blocks[1].mlp.fc2.adapter_down.shape == (1, 2, 128)
    added = {name for name in model.state_dict()} - set(plain.state_dict())
    assert added == {
        f"blocks.{block}.{name}.adapter_{part}" for block in (0, 1) for name in PROJECTIONS for part in ("down", "up")
    }
    layers, sizes = 3, (32 + 96) + (32 + 32) + (32 + 128) + (128 + 32)
    assert model.num_parameters() - plain.num_parameters() == layers * 2 * sizes


def test_saved_and_loaded(make_model, pixels, tmp_path):
    model = make_model(adapter_rank=2)
    model.save_pretrained(tmp_path)
    loaded = RaptorModel.from_pretrained(tmp_path).eval()
    assert loaded.config.adapter_rank == 2
    with torch.no_grad():
        assert torch.equal(loaded(pixels).last_hidden_state, model(pixels).last_hidden_state)


def test_a_checkpoint_without_adapters_gets_ones_that_change_nothing(make_model, pixels, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = RaptorModel.from_pretrained(tmp_path, adapter_rank=4).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixels).last_hidden_state, model(pixels).last_hidden_state)
    loaded(pixels).last_hidden_state.square().sum().backward()
    assert loaded.blocks[0].mlp.fc1.adapter_up.grad.abs().sum() > 0
    assert loaded.blocks[0].mlp.fc1.adapter_down.std().item() == pytest.approx(32**-0.5, rel=0.2)


def test_svd_of_full_rank_makes_the_teachers_matrices(make_teacher):
    teacher = make_teacher(num_hidden_layers=4)
    model = RaptorModel.from_teacher(teacher, (3, 1), adapter_rank=32)
    for layer in (1, 2, 3):
        source = teacher.block_state(layer)
        for name in PROJECTIONS:
            own = model.blocks[0].get_submodule(name)
            made = own.weight + own.adapter_up[layer - 1] @ own.adapter_down[layer - 1]
            torch.testing.assert_close(made, source[f"{name}.weight"], rtol=1e-4, atol=1e-5)


def test_svd_of_low_rank_is_the_best_approximation_and_learns_where_nothing_differs(make_teacher):
    teacher = make_teacher(num_hidden_layers=3)
    model = RaptorModel.from_teacher(teacher, (3,), adapter_rank=4)
    fc1 = model.blocks[0].mlp.fc1
    difference = teacher.block_state(3)["mlp.fc1.weight"] - teacher.block_state(2)["mlp.fc1.weight"]
    left_over = torch.linalg.norm(difference - fc1.adapter_up[2] @ fc1.adapter_down[2])
    smallest = torch.linalg.svdvals(difference)[4:].square().sum().sqrt()  # Eckart and Young
    torch.testing.assert_close(left_over, smallest, rtol=1e-4, atol=1e-5)
    assert not fc1.adapter_up[1].any()  # the block began as layer 2
    model(torch.randn(1, 3, 56, 56)).last_hidden_state.square().sum().backward()
    assert fc1.adapter_up.grad[1].abs().sum() > 0


def test_zeros_start_as_the_tied_block(make_teacher, pixels):
    teacher = make_teacher(num_hidden_layers=3)
    tied = RaptorModel.from_teacher(teacher, (3,)).eval()
    model = RaptorModel.from_teacher(teacher, (3,), adapter_rank=4, adapter_init="zeros").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(pixels).last_hidden_state, tied(pixels).last_hidden_state)


def test_another_mlp_keeps_adapters_of_no_change(make_teacher):
    model = RaptorModel.from_teacher(make_teacher(), (3,), adapter_rank=2, mlp_type="swiglu")
    assert not model.blocks[0].mlp.fc1.adapter_up.any()
    assert model.blocks[0].attention.qkv.adapter_up.any()


@pytest.mark.parametrize("rank", [-1, 33])
def test_rank_out_of_range(rank, make_config):
    with pytest.raises(ValueError, match=f"adapter_rank={rank} must lie between 0"):
        make_config(adapter_rank=rank)


def test_unknown_adapter_init(make_teacher):
    with pytest.raises(ValueError, match="adapter_init='lora' is unknown; use one of zeros, svd"):
        RaptorModel.from_teacher(make_teacher(), (3,), adapter_init="lora")


def test_one_graph_with_adapters(make_model, pixels):
    model = make_model(adapter_rank=2)
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
        compiled = torch.compile(model, fullgraph=True, backend="eager")(pixels).last_hidden_state
        exported = torch.export.export(model, (pixels,), strict=False).module()(pixels).last_hidden_state
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(exported, expected)
