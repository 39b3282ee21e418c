"""The research code's own numbers: random weights in its names, and the trajectory it computed from them."""

import pathlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from raptor_hf import RaptorModel
from raptor_hf.research_import import convert_research_state, load_research_blocks, research_config

DATA = pathlib.Path(__file__).parent / "data"


def oracle(name):
    path = DATA / f"research_raptor3_{name}.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    trajectory = tensors.pop("trajectory")
    state = {key.removeprefix("state."): value for key, value in tensors.items()}
    last_layers = [int(layer) for layer in metadata["thresholds"].split(",")]
    config = research_config(
        state, last_layers, int(metadata["layers"]), int(metadata["heads"]), image_size=28, num_register_tokens=4
    )
    return state, trajectory, config


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_trajectory_of_the_research_code(name, attention):
    state, trajectory, config = oracle(name)
    model = RaptorModel(config).double().eval()
    model.set_attn_implementation(attention)
    load_research_blocks(model, state)
    with torch.no_grad():
        states = model(hidden_states=trajectory[:, 0], output_hidden_states=True).hidden_states
    assert config.mlp_type == name
    assert len(states) == 13
    for layer, own in enumerate(states):
        torch.testing.assert_close(own, trajectory[:, layer], rtol=0, atol=1e-9)
    assert (trajectory[:, 0] - trajectory[:, 12]).abs().max() > 0.1  # a trajectory that stands still proves nothing


def test_teacher_forcing_equals_the_trajectory_layer_by_layer():
    state, trajectory, config = oracle("gelu")
    model = RaptorModel(config).double().eval()
    load_research_blocks(model, state)
    inputs = trajectory[:, 7:10].transpose(0, 1).flatten(0, 1)  # states 7, 8, 9 of two samples in one batch
    with torch.no_grad():
        outputs = model.apply_block(1, inputs, torch.tensor([8, 9, 10]).repeat_interleave(2))
    torch.testing.assert_close(outputs, trajectory[:, 8:11].transpose(0, 1).flatten(0, 1), rtol=0, atol=1e-9)


def test_float32_model_stays_close():
    state, trajectory, config = oracle("swiglu")
    model = RaptorModel(config).eval()
    load_research_blocks(model, state)
    with torch.no_grad():
        last = model(hidden_states=trajectory[:, 0].float(), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(last.double(), trajectory[:, -1], rtol=1e-4, atol=1e-4)


def test_unknown_missing_and_misshapen_weights_are_listed():
    state, _, config = oracle("gelu")
    with pytest.raises(ValueError, match=r"unknown names: blocks\.0\.ls3\.gamma, head\.weight"):
        convert_research_state({**state, "head.weight": torch.ones(1), "blocks.0.ls3.gamma": torch.ones(1)})
    model = RaptorModel(config)
    with pytest.raises(ValueError, match=r"missing \['blocks\.2\.layer_scale1\.scale'\]"):
        load_research_blocks(model, {key: value for key, value in state.items() if key != "blocks.2.ls1.gamma"})
    with pytest.raises(ValueError, match=r"too many \['blocks\.3\.norm1\.bias'\]"):
        load_research_blocks(model, {**state, "blocks.3.norm1.bias": torch.ones(32)})
    with pytest.raises(ValueError, match=r"norm1\.bias \(7,\) for \(32,\)"):
        load_research_blocks(model, {**state, "blocks.1.norm1.bias": torch.ones(7)})


@pytest.mark.parametrize("last_layers", [(10, 7), (0, 7), (7, 12)])
def test_last_layers_must_increase(last_layers):
    state, _, _ = oracle("gelu")
    with pytest.raises(ValueError, match=r"must increase and lie within 1\.\.11"):
        research_config(state, last_layers, 12, 4)
