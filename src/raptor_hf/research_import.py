"""Checkpoints of the paper's research code, as blocks of a [`RaptorModel`].

Every name is mapped explicitly: a weight that has no place here, or a place that gets no weight, is an error that lists
it. The research blocks keep torch's LayerNorm eps of 1e-5 and, for SwiGLU, the width `4 * hidden_size`.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .configuration_raptor import RaptorConfig
from .modeling_raptor import RaptorModel

RESEARCH_LAYER_NORM_EPS = 1e-5
RESEARCH_NAMES = {
    "norm1.weight": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "attn.in_proj_weight": "attention.qkv.weight",
    "attn.in_proj_bias": "attention.qkv.bias",
    "attn.out_proj.weight": "attention.proj.weight",
    "attn.out_proj.bias": "attention.proj.bias",
    "ls1.gamma": "layer_scale1.scale",
    "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias",
    "mlp.0.weight": "mlp.fc1.weight",
    "mlp.0.bias": "mlp.fc1.bias",
    "mlp.2.weight": "mlp.fc2.weight",
    "mlp.2.bias": "mlp.fc2.bias",
    "ls2.gamma": "layer_scale2.scale",
    "t_proj.0.weight": "depth_scale.linear1.weight",
    "t_proj.0.bias": "depth_scale.linear1.bias",
    "t_proj.2.weight": "depth_scale.linear2.weight",
    "t_proj.2.bias": "depth_scale.linear2.bias",
}

# Splits of DINOv2-B (arXiv 2512.19941, Table 3), by number of blocks and layers.
PUBLISHED_LAST_LAYERS = {(2, 12): (7,), (3, 12): (7, 10), (4, 12): (4, 7, 10)}
_WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")


def research_state(checkpoint: Any) -> dict[str, torch.Tensor]:
    """The blocks' weights in what a research file holds: a state dict, one inside a larger mapping, or a module.

    Prefixes of wrappers (`module.`, `_orig_mod.`, `model.`) are taken off.

    Raises:
        ValueError: if there are no weights of blocks in it.
    """
    if isinstance(checkpoint, torch.nn.Module):
        checkpoint = checkpoint.state_dict()
    for key in _WRAPPERS:
        if isinstance(checkpoint, Mapping) and isinstance(checkpoint.get(key), Mapping):
            checkpoint = checkpoint[key]
    state = {}
    for name, value in checkpoint.items() if isinstance(checkpoint, Mapping) else ():
        while name.startswith(_PREFIXES):
            name = name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))
        if isinstance(value, torch.Tensor):
            state[name] = value
    if not any(name.startswith("blocks.") for name in state):
        raise ValueError(
            "the checkpoint has no weights called blocks.N.*; give the state dict of a Raptor of the paper."
        )
    return state


def convert_research_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames `blocks.{j}.*` of the research code to `blocks.{j}.*` of [`RaptorModel`]; tensors are not changed.

    Raises:
        ValueError: listing every name that is not one of the research code's blocks.
    """
    converted, unmapped = {}, []
    for name, value in state.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        if match is None or match[2] not in RESEARCH_NAMES:
            unmapped.append(name)
        else:
            converted[f"blocks.{match[1]}.{RESEARCH_NAMES[match[2]]}"] = value
    if unmapped:
        raise ValueError(
            f"research checkpoint with unknown names: {', '.join(sorted(unmapped))}; only blocks.N.* of the published "
            "block are understood."
        )
    return converted


def research_config(
    state: Mapping[str, torch.Tensor], last_layers: Sequence[int], num_layers: int, num_heads: int, **fields: Any
) -> RaptorConfig:
    """Configuration of a research checkpoint: sizes and MLP type read off its weights, LayerNorm eps 1e-5.

    Args:
        state: research names to tensors.
        last_layers: last layer of every block but the final one, `(7, 10)` for 7 | 3 | 2.
        num_layers, num_heads: the teacher's, which the weights do not tell.
        fields: further fields of [`RaptorConfig`], such as the teacher's image and patch size.

    Raises:
        ValueError: if the last layers do not increase within `1..num_layers - 1`, or names are unknown.
    """
    bounds = [0, *last_layers, num_layers]
    repeats = [end - start for start, end in itertools.pairwise(bounds)]
    if min(repeats) < 1:
        raise ValueError(f"last_layers={tuple(last_layers)} must increase and lie within 1..{num_layers - 1}.")
    weights = convert_research_state(state)
    fc1, fc2 = weights["blocks.0.mlp.fc1.weight"], weights["blocks.0.mlp.fc2.weight"]
    return RaptorConfig.from_repeats(
        repeats,
        hidden_size=fc2.shape[0],
        num_attention_heads=num_heads,
        intermediate_size=fc2.shape[1],
        mlp_type="swiglu" if fc1.shape[0] == 2 * fc2.shape[1] else "gelu",
        layer_norm_eps=RESEARCH_LAYER_NORM_EPS,
        depth_scale_init="normal",
        **fields,
    )


def load_research_blocks(model: RaptorModel, state: Mapping[str, torch.Tensor]) -> None:
    """Loads a research checkpoint into the blocks of `model`, in its dtype; embeddings and norm stay as they are.

    Raises:
        ValueError: listing the weights that are missing, unknown or of another shape.
    """
    converted = convert_research_state(state)
    own = {f"blocks.{name}": value for name, value in model.blocks.state_dict().items()}
    missing = sorted(set(own) - set(converted))
    extra = sorted(set(converted) - set(own))
    shapes = [
        f"{name} {tuple(converted[name].shape)} for {tuple(own[name].shape)}"
        for name in sorted(set(own) & set(converted))
        if own[name].shape != converted[name].shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            f"research checkpoint does not fit this model: missing {missing}, too many {extra}, shapes {shapes}; make "
            "the model with research_config(state, ...)."
        )
    model.blocks.load_state_dict({name.removeprefix("blocks."): value for name, value in converted.items()})
