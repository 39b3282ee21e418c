"""The tied model: its formula, its contract over all variants, its files, and how it starts from a teacher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.testing import CompileCounter

import raptor_hf.modeling_raptor as modeling
from raptor_hf import RaptorConfig, RaptorForImageClassification, RaptorModel

SCHEDULES = {1: [0, 0, 0, 0], 2: [0, 1, 0, 0], 3: [0, 1, 1, 2], 4: [0, 1, 2, 3]}
VARIANTS = [
    pytest.param(
        {
            "block_schedule": schedule,
            "depth_scale": depth_scale,
            "num_register_tokens": registers,
            "mlp_type": mlp_type,
        },
        id=f"k{k}-{'scaled' if depth_scale else 'plain'}-{registers}reg-{mlp_type}",
    )
    for k, schedule in SCHEDULES.items()
    for depth_scale in (True, False)
    for registers in (0, 4)
    for mlp_type in ("gelu", "swiglu")
]
GOLDEN_BLOCK = [
    "attention.proj.bias",
    "attention.proj.weight",
    "attention.qkv.bias",
    "attention.qkv.weight",
    "depth_scale.linear1.bias",
    "depth_scale.linear1.weight",
    "depth_scale.linear2.bias",
    "depth_scale.linear2.weight",
    "layer_scale1.scale",
    "layer_scale2.scale",
    "mlp.fc1.bias",
    "mlp.fc1.weight",
    "mlp.fc2.bias",
    "mlp.fc2.weight",
    "norm1.bias",
    "norm1.weight",
    "norm2.bias",
    "norm2.weight",
]
GOLDEN_REST = [
    "embeddings.cls_token",
    "embeddings.patch_embeddings.projection.bias",
    "embeddings.patch_embeddings.projection.weight",
    "embeddings.position_embeddings",
    "embeddings.register_tokens",
    "layernorm.bias",
    "layernorm.weight",
]


def states_of(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, output_hidden_states=True, **kwargs).hidden_states


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for number, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(own, other), f"entry {number}"


def reference_states(model, pixel_values):
    """The paper's formulas (App. A, A.3) written a second time, from the weights' names alone."""
    weights, config = dict(model.named_parameters()), model.config

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + config.layer_norm_eps).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attention(name, x):
        heads = []
        query, key, value = linear(f"{name}.qkv", x).chunk(3, dim=-1)
        size = config.hidden_size // config.num_attention_heads
        for q, k, v in zip(query.split(size, -1), key.split(size, -1), value.split(size, -1), strict=True):
            heads.append(torch.softmax(q @ k.transpose(1, 2) / size**0.5, dim=-1) @ v)
        return linear(f"{name}.proj", torch.cat(heads, dim=-1))

    def mlp(name, x):
        hidden = linear(f"{name}.fc1", x)
        if config.mlp_type == "gelu":
            return linear(f"{name}.fc2", 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5)))
        gate, up = hidden.chunk(2, dim=-1)
        return linear(f"{name}.fc2", gate * torch.sigmoid(gate) * up)

    patches = pixel_values.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
    kernel = weights["embeddings.patch_embeddings.projection.weight"].flatten(1)
    patches = patches @ kernel.T + weights["embeddings.patch_embeddings.projection.bias"]
    positions = weights["embeddings.position_embeddings"]
    cls_token = (weights["embeddings.cls_token"] + positions[:, :1]).repeat(len(patches), 1, 1)
    registers = weights["embeddings.register_tokens"].repeat(len(patches), 1, 1)
    x = torch.cat([cls_token, registers, patches + positions[:, 1:]], dim=1)
    states = [x]
    for layer, number in enumerate(config.block_schedule, start=1):
        block = f"blocks.{number}"
        scales = torch.ones(3, config.hidden_size, dtype=x.dtype)
        if config.depth_scale:
            hidden = linear(f"{block}.depth_scale.linear1", torch.tensor([float(layer)], dtype=x.dtype))
            scales = 1 + linear(f"{block}.depth_scale.linear2", hidden * torch.sigmoid(hidden)).view(3, -1)
        branch = attention(f"{block}.attention", norm(f"{block}.norm1", x))
        x = x + scales[0] * weights[f"{block}.layer_scale1.scale"] * branch
        branch = mlp(f"{block}.mlp", norm(f"{block}.norm2", x))
        x = scales[2] * (x + scales[1] * weights[f"{block}.layer_scale2.scale"] * branch)
        states.append(x)
    return states, norm("layernorm", x)


# Contract, over all variants


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_follow_the_formula(variant, make_model, pixels):
    model, pixels = make_model(**variant).double(), pixels.double()
    with torch.no_grad():
        outputs = model(pixels, output_hidden_states=True)
        states, last = reference_states(model, pixels)
    assert len(outputs.hidden_states) == len(states) == len(variant["block_schedule"]) + 1
    for own, other in zip(outputs.hidden_states, states, strict=True):
        assert own.shape == (2, 17 + variant["num_register_tokens"], 32)
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(outputs.last_hidden_state, last, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_last_state_is_before_the_norm_and_runs_compose(variant, make_model, pixels):
    model = make_model(**variant)
    with torch.no_grad():
        outputs = model(pixels, output_hidden_states=True)
        states = outputs.hidden_states
        assert torch.equal(model.layernorm(states[-1]), outputs.last_hidden_state)
        assert not torch.allclose(states[-1], outputs.last_hidden_state, atol=0.1)
        assert torch.equal(outputs.pooler_output, outputs.last_hidden_state[:, 0])
        for layer in range(1, 5):
            assert torch.equal(model.apply_layer(states[layer - 1], layer), states[layer])
            assert (states[layer] - states[layer - 1]).norm() > 0.05 * states[layer].norm()
    for cut in range(1, 4):
        assert_same(states_of(model, pixels, end_layer=cut), states[: cut + 1])
        assert_same(states_of(model, hidden_states=states[cut], start_layer=cut), states[cut:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_model_holds_each_block_once(variant, make_model, pixels, tmp_path):
    model = make_model(**variant)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    blocks = {int(name.split(".")[1]) for name in stored if name.startswith("blocks.")}
    assert blocks == set(variant["block_schedule"])
    assert sorted(stored) == sorted(model.state_dict())
    assert model.num_parameters() == sum(value.numel() for value in stored.values())
    loaded = RaptorModel.from_pretrained(tmp_path)
    assert not loaded.training
    assert_same(states_of(loaded, pixels), states_of(model, pixels))


def test_every_start_and_end(make_model, pixels):
    model = make_model(block_schedule=[0, 1, 0, 2, 2])
    states = states_of(model, pixels)
    for start in range(5):
        for end in range(start + 1, 6):
            with torch.no_grad():
                run = model(hidden_states=states[start], start_layer=start, end_layer=end, output_hidden_states=True)
                assert torch.equal(run.last_hidden_state, model.layernorm(states[end]))
            assert_same(run.hidden_states, states[start : end + 1])


def test_depth_of_each_sample(make_model, pixels):
    """Teacher forcing stacks samples of several layers in one batch; each gets its own layer's scales."""
    model = make_model(block_schedule=[0, 0, 0]).double()
    states = states_of(model, pixels.double())
    stacked = torch.cat(states[:3])
    with torch.no_grad():
        for depth in ([1, 1, 2, 2, 3, 3], torch.tensor([1, 1, 2, 2, 3, 3])):
            torch.testing.assert_close(model.apply_block(0, stacked, depth), torch.cat(states[1:]), rtol=0, atol=1e-12)
        one_depth = model.apply_block(0, stacked, 2)
    assert (one_depth - torch.cat(states[1:])).abs().max() > 1e-2


def test_selected_states_and_tuples(tiny_model, pixels):
    states = states_of(tiny_model, pixels)
    with torch.no_grad():
        some = tiny_model(pixels, output_hidden_states=[0, -1]).hidden_states
        plain = tiny_model(pixels, return_dict=False)
    assert [state is not None for state in some] == [True, False, False, True]
    assert torch.equal(some[-1], states[-1])
    assert torch.equal(plain[0], tiny_model.layernorm(states[-1]))
    assert tiny_model(pixels).hidden_states is None


# Names, files, loading


def test_golden_parameter_names(tiny_model):
    names = [f"blocks.{block}.{name}" for block in (0, 1) for name in GOLDEN_BLOCK] + GOLDEN_REST
    assert sorted(tiny_model.state_dict()) == sorted(names)
    assert list(tiny_model.named_buffers()) == []
    shapes = {name: tuple(value.shape) for name, value in tiny_model.state_dict().items()}
    assert shapes["blocks.0.attention.qkv.weight"] == (96, 32)
    assert shapes["blocks.0.mlp.fc1.weight"] == (128, 32)
    assert shapes["blocks.0.depth_scale.linear1.weight"] == (16, 1)
    assert shapes["blocks.0.depth_scale.linear2.weight"] == (96, 16)
    assert shapes["embeddings.position_embeddings"] == (1, 17, 32)
    assert shapes["embeddings.register_tokens"] == (1, 4, 32)


@pytest.mark.parametrize(("width", "number"), [("research", 128), ("dinov2", 88), (48, 48)])
def test_swiglu_shapes(width, number, make_model):
    model = make_model(mlp_type="swiglu", intermediate_size=width)
    assert model.blocks[1].mlp.fc1.weight.shape == (2 * number, 32)
    assert model.blocks[1].mlp.fc1.bias.shape == (2 * number,)
    assert model.blocks[1].mlp.fc2.weight.shape == (32, number)


def test_without_depth_scale_nothing_of_it_is_left(make_model):
    names = make_model(depth_scale=False).state_dict()
    assert sorted(names) == sorted(
        [f"blocks.{j}.{name}" for j in (0, 1) for name in GOLDEN_BLOCK if "depth_scale" not in name] + GOLDEN_REST
    )


def test_sharding_and_wrapping_units():
    assert RaptorModel._no_split_modules == ["RaptorEmbeddings", "RaptorBlock"]
    assert set(RaptorConfig.base_model_fsdp_plan) == {"blocks.*", "layernorm"}


def test_edited_block_changes_all_its_applications_and_nothing_else(make_model, pixels, tmp_path):
    make_model(block_schedule=[1, 0, 1, 0]).save_pretrained(tmp_path)
    model = RaptorModel.from_pretrained(tmp_path)
    states = states_of(model, pixels)
    with torch.no_grad():
        model.blocks[0].mlp.fc2.bias.add_(0.1)
        changed = states_of(model, pixels)
        assert_same(changed[:2], states[:2])
        for layer, block in enumerate([1, 0, 1, 0], start=1):
            again = model.apply_layer(states[layer - 1], layer)
            assert torch.equal(again, states[layer]) is (block == 1), layer
        assert not any(torch.equal(old, new) for old, new in zip(states[2:], changed[2:], strict=True))


def test_layer_scale_survives(make_model, tmp_path):
    model = make_model()
    nn.init.constant_(model.blocks[1].layer_scale1.scale, 7.0)
    model.save_pretrained(tmp_path)
    loaded, info = RaptorModel.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(loaded.blocks[1].layer_scale1.scale, torch.full((32,), 7.0))
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


EXPECTED_START = {
    "layer_scale1.scale": lambda value, _: torch.equal(value, torch.full_like(value, 0.25)),
    "norm1.weight": lambda value, _: torch.equal(value, torch.ones_like(value)),
    "attention.qkv.bias": lambda value, _: not value.any(),
    "attention.proj.weight": lambda value, _: 0.015 < value.std() < 0.025,
    "depth_scale.linear1.weight": lambda value, _: 0.3 < value.std() < 0.9 and value.abs().max() <= 1,
    "depth_scale.linear1.bias": lambda value, _: 0.3 < value.std() < 0.9 and value.abs().max() <= 1,
    "depth_scale.linear2.weight": lambda value, start: (
        not value.any() if start == "zeros" else 0.8e-4 < value.std() < 1.2e-4
    ),
    "depth_scale.linear2.bias": lambda value, start: (
        not value.any() if start == "zeros" else 0.8e-4 < value.std() < 1.2e-4
    ),
    "register_tokens": lambda value, _: not value.any(),
    "cls_token": lambda value, _: 0.01 < value.std() < 0.03,
    "position_embeddings": lambda value, _: 0.015 < value.std() < 0.025,
}


@pytest.mark.parametrize("start", ["zeros", "normal"])
@pytest.mark.parametrize(
    "lacking",
    [
        "layer_scale1.scale",
        "attention.qkv.bias",
        "attention.proj.weight",
        "norm1.weight",
        "depth_scale.linear2.bias",
        "depth_scale.linear1.weight",
        "depth_scale.",
        "register_tokens",
        "position_embeddings",
        "cls_token",
    ],
)
def test_checkpoint_that_lacks_tensors(lacking, start, make_model, tmp_path):
    """What the file has is loaded untouched; what it lacks, and only that, gets its documented start value."""
    make_model(depth_scale_init=start, layerscale_value=0.25).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in stored.items() if lacking not in name or name.startswith("blocks.1.")}
    removed = set(stored) - set(kept)
    assert removed
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = RaptorModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == removed
    assert not info["unexpected_keys"]
    own = loaded.state_dict()
    for name, value in kept.items():
        assert torch.equal(own[name], value), name
    for name in removed:
        start_value = next(check for ending, check in EXPECTED_START.items() if name.endswith(ending))
        assert start_value(own[name], start), name


@pytest.mark.parametrize("start", ["zeros", "normal"])
def test_start_values(start, make_model):
    model = make_model(jittered=False, depth_scale_init=start, layerscale_value=0.25)
    for name, value in model.state_dict().items():
        for ending, check in EXPECTED_START.items():
            assert check(value, start) or not name.endswith(ending), name
    scales = torch.stack(model.blocks[0].depth_scale(torch.tensor(12.0)))
    moved = (scales - 1).abs().max().item()
    assert moved == 0 if start == "zeros" else 0 < moved < 0.005  # App. A.3: up to 0.004 at layer 12


def test_model_needs_no_teacher_to_be_loaded(make_model, tmp_path):
    make_model(teacher_name_or_path="org/gone", teacher_revision="abc").save_pretrained(tmp_path)
    assert RaptorModel.from_pretrained(tmp_path).config.teacher_name_or_path == "org/gone"


def test_meta_device(tiny_config, tiny_model):
    with torch.device("meta"):
        model = RaptorModel(tiny_config)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert list(model.state_dict()) == list(tiny_model.state_dict())


FRESH_PROCESS = """
import sys, torch
from transformers import AutoModel
import raptor_hf
expected = torch.load(sys.argv[1] + "/expected.pt")
model = AutoModel.from_pretrained(sys.argv[1])
with torch.no_grad():
    states = model(expected["pixels"], output_hidden_states=True).hidden_states
assert list(model.named_buffers()) == []
assert len(states) == len(expected["states"])
assert all(torch.equal(own, other) for own, other in zip(states, expected["states"]))
heavy = {"datasets", "evaluate", "matplotlib", "sklearn", "transformers.trainer", "raptor_hf.teachers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_identical_in_a_fresh_process_that_imports_nothing_heavy(make_model, pixels, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    torch.save({"pixels": pixels, "states": states_of(model, pixels)}, tmp_path / "expected.pt")
    command = [sys.executable, "-c", "import torch; torch.set_num_threads(1)" + FRESH_PROCESS, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(modeling.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


# Attention maps


def test_attention_maps_one_per_application(tiny_model, pixels):
    with pytest.raises(
        ValueError, match=r"output_attentions=True needs the eager attention, not 'sdpa'; call model\.set_"
    ):
        tiny_model(pixels, output_attentions=True)
    assert tiny_model(pixels, output_attentions=False).attentions is None
    states = states_of(tiny_model, pixels)
    tiny_model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = tiny_model(pixels, output_attentions=True, output_hidden_states=True)
    assert len(outputs.attentions) == 3
    for weights in outputs.attentions:
        assert weights.shape == (2, 2, 21, 21)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 21))
    assert not torch.allclose(outputs.attentions[0], outputs.attentions[1], atol=1e-3)  # the same block, twice
    for own, other in zip(outputs.hidden_states, states, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_attentions_asked_by_the_configuration(tiny_model, pixels):
    tiny_model.set_attn_implementation("eager")
    tiny_model.config.output_attentions = True
    assert len(tiny_model(pixels).attentions) == 3
    tiny_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="needs the eager attention"):
        tiny_model(pixels)


# Gradients


def gradients(model, pixel_values):
    model.zero_grad()
    states = model(pixel_values, output_hidden_states=True).hidden_states
    sum(state.square().mean() for state in states[1:]).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def test_tied_gradient_is_the_sum_over_applications(make_model, pixels):
    schedule = [0, 1, 0, 0]
    tied = make_model(block_schedule=schedule).double()
    untied = make_model(block_schedule=[0, 1, 2, 3]).double()
    untied.embeddings.load_state_dict(tied.embeddings.state_dict())
    for layer, block in enumerate(schedule):
        untied.blocks[layer].load_state_dict(tied.blocks[block].state_dict())
    ours, parts = gradients(tied, pixels.double()), gradients(untied, pixels.double())
    for name in GOLDEN_BLOCK:
        for block in (0, 1):
            layers = [layer for layer, made_by in enumerate(schedule) if made_by == block]
            total = sum(parts[f"blocks.{layer}.{name}"] for layer in layers)
            assert total.abs().max() > 0
            torch.testing.assert_close(ours[f"blocks.{block}.{name}"], total, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing_kwargs": {"preserve_rng_state": False}}])
def test_activation_checkpointing_behind_frozen_embeddings(options, make_model, pixels):
    model = make_model().train()
    model.freeze_embeddings()
    applications = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda *_: applications.append(1))
    plain = gradients(model, pixels)
    assert len(applications) == 3
    model.activation_checkpointing_enable(**options)
    recomputed = gradients(model, pixels)
    assert len(applications) == 3 + 6  # every application once more in the backward pass
    assert set(plain) == {name for name, _ in model.named_parameters() if name.startswith("blocks.")}
    assert set(recomputed) == set(plain)
    for name, value in plain.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(recomputed[name], value)


@pytest.mark.parametrize("model_class", [RaptorModel, RaptorForImageClassification])
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_reentrant_checkpointing_is_refused(model_class, make_model):
    model = make_model(model_class)
    message = "use_reentrant=True gives weight-tied blocks wrong or no gradients; use False, which is the default"
    with pytest.raises(ValueError, match=message):
        model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=message):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    model.gradient_checkpointing_enable()
    assert all(block.gradient_checkpointing for block in model.base_model.blocks)


# Number formats


def test_bfloat16_is_saved_and_loaded_as_such(make_model, tmp_path):
    make_model().bfloat16().save_pretrained(tmp_path)
    loaded = RaptorModel.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.config.dtype == torch.bfloat16
    upcast = RaptorModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in upcast.parameters()} == {torch.float32}
    assert torch.equal(upcast.layernorm.weight, loaded.layernorm.weight.float())


def test_shards_and_device_map(make_model, pixels, tmp_path):
    """Saved in several files, loaded by a map of the modules and in another dtype, with the same outputs."""
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert not (tmp_path / "model.safetensors").exists()
    mapped = {"embeddings": "cpu", "blocks": "cpu", "layernorm": "cpu"}
    for device_map in ("cpu", "auto", mapped):
        loaded, report = RaptorModel.from_pretrained(tmp_path, device_map=device_map, output_loading_info=True)
        assert not report["missing_keys"]
        with torch.no_grad():
            assert torch.equal(
                loaded(pixels.to(loaded.device)).last_hidden_state.cpu(), model(pixels).last_hidden_state
            )
    half = RaptorModel.from_pretrained(tmp_path, dtype="bfloat16")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    half.save_pretrained(tmp_path / "half")
    assert RaptorModel.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert not list(tmp_path.rglob("*.bin"))


def test_float32_inputs_into_a_bfloat16_model(make_model):
    model, pixels = make_model(), torch.randn(2, 3, 84, 56)
    states = states_of(model, pixels)
    half = model.bfloat16()
    for own, other in zip(states_of(half, pixels), states, strict=True):
        assert own.dtype == torch.bfloat16
        assert own.shape == (2, 5 + 24, 32)
        assert (own.float() - other).norm() < 0.02 * other.norm()
    assert half(hidden_states=states[1], start_layer=1).last_hidden_state.dtype == torch.bfloat16


def test_positions_are_interpolated_in_float32(tiny_model):
    half = tiny_model.bfloat16().embeddings.interpolate_positions(6, 4)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, tiny_model.float().embeddings.interpolate_positions(6, 4).bfloat16())


def test_float64(make_model, pixels, tmp_path):
    model = make_model()
    states = states_of(model, pixels)
    model.save_pretrained(tmp_path)
    double = RaptorModel.from_pretrained(tmp_path, dtype=torch.float64)
    for own, other in zip(states_of(double, pixels), states, strict=True):
        assert own.dtype == torch.float64
        torch.testing.assert_close(own, other.double(), rtol=1e-5, atol=1e-5)
        assert not torch.equal(own, own.float().double())
    for scale in double.blocks[0].depth_scale(torch.tensor(3.0, dtype=torch.float64)):
        assert scale.dtype == torch.float64


@pytest.mark.parametrize("scale", ["attention", "mlp", "out"])
def test_small_depth_scale_acts_in_bfloat16(scale, make_model):
    """1.0039 is 1 in bfloat16: of the stream's scale its difference from 1 is rounded, of a branch's the scale."""
    model = make_model(block_schedule=[0]).bfloat16()
    block = model.blocks[0]
    start = 32 * ["attention", "mlp", "out"].index(scale)
    with torch.no_grad():
        for parameter in [*block.depth_scale.parameters(), *block.attention.proj.parameters(), *block.mlp.parameters()]:
            parameter.zero_()
        block.layer_scale1.scale.fill_(1.0)
        block.layer_scale2.scale.fill_(1.0)
        states = torch.randn(1, 5, 32).bfloat16()
        if scale != "out":  # a branch of 1 on a state of -1: nothing but the scale is left
            {"attention": block.attention.proj, "mlp": block.mlp.fc2}[scale].bias.fill_(1.0)
            states = torch.full_like(states, -1.0)
        unscaled = model.apply_layer(states, 1)
        block.depth_scale.linear2.bias[start : start + 32] = 0.0039
        if scale != "out":
            block.depth_scale.linear2.bias[start : start + 32] = 0.0079  # the first that bfloat16 can tell from 1
        scaled = model.apply_layer(states, 1)
    factor = 1 + block.depth_scale.linear2.bias[start].float()
    assert scale != "out" or factor.bfloat16() == 1
    expected = states.float() * factor if scale == "out" else states.float() + factor.bfloat16()
    assert scaled.dtype == torch.bfloat16
    assert torch.equal(scaled, expected.bfloat16())
    assert not torch.equal(scaled, unscaled)


def test_depth_scales_stay_float32_in_bfloat16_and_under_autocast(make_model, pixels):
    model, depth = make_model(), torch.tensor([1.0, 3.0])
    plain = model.blocks[0].depth_scale(depth)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        mixed = model.blocks[0].depth_scale(depth)
        states = states_of(model, pixels)
    assert_same(mixed, plain)
    for own, other in zip(states, states_of(model, pixels), strict=True):
        assert own.dtype == torch.float32  # the residual stream is not rounded
        assert 0 < (own - other).norm() < 0.02 * other.norm()
    for own, other in zip(model.bfloat16().blocks[0].depth_scale(depth), plain, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, other, rtol=0, atol=0.02)
        assert not torch.equal(own, own.bfloat16().float())


# Wrong input


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"pixel_values": (2, 3, 60, 75)},
            "image of 60 x 75 pixels: both sides must be multiples of the patch size 14",
        ),
        ({"pixel_values": (2, 3, 13, 13)}, "image of 13 x 13 pixels.*for example to 14 x 14"),
        ({"pixel_values": (2, 1, 56, 56)}, r"pixel_values of shape \(2, 1, 56, 56\): expected \(batch_size, 3, height"),
        ({"pixel_values": (3, 56, 56)}, r"pixel_values of shape \(3, 56, 56\): expected"),
        ({}, "give exactly one of pixel_values"),
        ({"pixel_values": (2, 3, 56, 56), "hidden_states": (2, 21, 32)}, "give exactly one of pixel_values"),
        (
            {"hidden_states": (2, 21, 31)},
            r"hidden_states of shape \(2, 21, 31\): expected \(batch_size, seq_length, 32\)",
        ),
        ({"hidden_states": (21, 32)}, r"hidden_states of shape \(21, 32\): expected"),
        (
            {"pixel_values": (2, 3, 56, 56), "start_layer": 1},
            "start_layer=1 needs hidden_states; images enter at state 0",
        ),
        (
            {"hidden_states": (2, 21, 32), "start_layer": 3},
            r"start_layer=3, end_layer=3: states are numbered 0 \(embed",
        ),
        ({"hidden_states": (2, 21, 32), "start_layer": -1}, r"start_layer=-1, end_layer=3: states are numbered 0"),
        ({"hidden_states": (2, 21, 32), "start_layer": 2, "end_layer": 1}, "a run needs start_layer < end_layer"),
        ({"pixel_values": (2, 3, 56, 56), "end_layer": 4}, r"end_layer=4: states are numbered 0 \(embeddings\) to 3"),
        ({"pixel_values": (2, 3, 56, 56), "end_layer": 0}, "start_layer=0, end_layer=0"),
    ],
)
def test_input_errors(inputs, message, tiny_model):
    inputs = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in inputs.items()}
    with pytest.raises(ValueError, match=message):
        tiny_model(**inputs)


# From a teacher

NONCONTIGUOUS = [0, 1, 0, 1, 0]
SOURCES = {
    ("first", "contiguous"): [[1], [5]],
    ("middle", "contiguous"): [[2], [5]],
    ("last", "contiguous"): [[4], [5]],
    ("mean", "contiguous"): [[1, 2, 3, 4], [5]],
    ("first", "noncontiguous"): [[1], [2]],
    ("middle", "noncontiguous"): [[3], [2]],
    ("last", "noncontiguous"): [[5], [4]],
    ("mean", "noncontiguous"): [[1, 3, 5], [2, 4]],
}


class Given:
    """Anything with a block schedule stands for phases."""

    def __init__(self, block_schedule):
        self.block_schedule = block_schedule


@pytest.mark.parametrize(("case", "sources"), SOURCES.items(), ids=map("-".join, SOURCES))
def test_blocks_start_from_the_documented_layers(case, sources, make_teacher):
    init, kind = case
    teacher = make_teacher(num_hidden_layers=5)
    phases = (4, 1) if kind == "contiguous" else Given(NONCONTIGUOUS)
    model = RaptorModel.from_teacher(teacher, phases, init=init)
    for block, layers in zip(model.blocks, sources, strict=True):
        states = [teacher.block_state(layer) for layer in layers]
        own = block.state_dict()
        assert set(own) - set(states[0]) == {name for name in own if name.startswith("depth_scale.")}
        for name in states[0]:
            torch.testing.assert_close(
                own[name], sum(state[name] for state in states) / len(states), rtol=1e-6, atol=1e-7
            )
        assert not block.depth_scale.linear2.weight.any()


def test_middle_is_the_default_init(make_teacher):
    teacher = make_teacher(num_hidden_layers=5)
    own, named = (RaptorModel.from_teacher(teacher, (4, 1), **keywords) for keywords in ({}, {"init": "middle"}))
    for name, value in named.blocks.state_dict().items():
        assert torch.equal(own.blocks.state_dict()[name], value) or "linear1" in name, name


def test_random_init_is_the_papers(make_teacher):
    teacher = make_teacher()
    model = RaptorModel.from_teacher(teacher, (2, 1), init="random")
    assert model.config.layerscale_value == 1e-5
    for block in model.blocks:
        for scale in (block.layer_scale1.scale, block.layer_scale2.scale):
            assert torch.equal(scale, torch.full((32,), 1e-5))
        assert 0.015 < block.mlp.fc1.weight.std() < 0.025
        assert not block.mlp.fc1.bias.any()
        assert torch.equal(block.norm1.weight, torch.ones(32))
    assert RaptorModel.from_teacher(teacher, (2, 1), init="random", layerscale_value=0.1).config.layerscale_value == 0.1


@pytest.mark.parametrize("init", ["middle", "random"])
def test_embeddings_and_final_norm_are_the_teachers_and_frozen(init, make_teacher):
    teacher = make_teacher()
    model = RaptorModel.from_teacher(teacher, (2, 1), init=init)
    for name, value in teacher.embedding_state().items():
        assert torch.equal(model.state_dict()[name], value), name
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is name.startswith("blocks."), name
    with torch.no_grad():
        model.embeddings.cls_token.add_(1)  # a copy, not the teacher's own tensor
    assert not torch.equal(model.embeddings.cls_token, teacher.model.embeddings.cls_token)


@pytest.mark.parametrize(
    ("fields", "rows"), [({"intermediate_size": "dinov2"}, 176), ({"intermediate_size": "research"}, 256), ({}, 256)]
)
def test_other_mlp_starts_at_random_and_says_so(fields, rows, make_teacher, monkeypatch):
    messages = []
    monkeypatch.setattr("raptor_hf.modeling_raptor_init.logger.warning", messages.append)
    teacher = make_teacher()
    model = RaptorModel.from_teacher(teacher, (2, 1), init="first", mlp_type="swiglu", **fields)
    assert model.config.mlp_type == "swiglu"
    assert model.blocks[0].mlp.fc1.weight.shape == (rows, 32)
    assert 0.015 < model.blocks[0].mlp.fc1.weight.std() < 0.025
    assert len(messages) == 1
    assert "swiglu MLP, unlike the teacher's, starts at random" in messages[0]
    own, source = model.blocks[0].state_dict(), teacher.block_state(1)
    for name in source:
        assert name.startswith("mlp.") or torch.equal(own[name], source[name]), name
    RaptorModel.from_teacher(teacher, (2, 1))
    assert len(messages) == 1


def test_fields_that_differ_from_the_teacher(make_teacher):
    model = RaptorModel.from_teacher(make_teacher(), (2, 1), depth_scale=False)
    assert model.blocks[0].depth_scale is None
    model = RaptorModel.from_teacher(make_teacher(), (2, 1), depth_scale_init="normal", attn_implementation="eager")
    assert model.blocks[0].depth_scale.linear2.weight.any()
    assert model.config._attn_implementation == "eager"
    assert RaptorModel.from_teacher(make_teacher(), (2, 1), dtype="bfloat16").dtype == torch.bfloat16


def test_from_teacher_errors(make_teacher):
    teacher = make_teacher()
    with pytest.raises(ValueError, match="init='median' is unknown; use one of first, middle, last, mean, random"):
        RaptorModel.from_teacher(teacher, (2, 1), init="median")
    with pytest.raises(ValueError, match="phases of 12 layers for a teacher of 3"):
        RaptorModel.from_teacher(teacher, (7, 3, 2))
    state = teacher.embedding_state()
    state["embeddings.class_token"] = state.pop("embeddings.cls_token")
    teacher.embedding_state = lambda: state
    with pytest.raises(
        ValueError, match=r"lacks \['embeddings\.cls_token'\] and has unknown \['embeddings\.class_token'\]"
    ):
        RaptorModel.from_teacher(teacher, (2, 1))


# Compilation and export


def test_compiled_without_graph_breaks(tiny_model, pixels):
    """One graph for all layers, and none is made again by a second call."""
    states = states_of(tiny_model, pixels)
    counter = CompileCounter()
    compiled = torch.compile(tiny_model, fullgraph=True, backend=counter)
    for _ in range(2):
        assert_same(states_of(compiled, pixels), states)
    assert counter.frame_count == 1


def test_export_with_a_free_batch(tiny_model, pixels):
    program = torch.export.export(
        tiny_model, (pixels,), dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch")}}
    )
    three = torch.randn(3, 3, 56, 56)
    with torch.no_grad():
        expected = tiny_model(three)
        outputs = program.module()(three)
    torch.testing.assert_close(outputs["last_hidden_state"], expected.last_hidden_state)
    torch.testing.assert_close(outputs["pooler_output"], expected.pooler_output)
