"""The teacher: a pretrained ViT of the `transformers` library, seen as states, a token layout and weights in our names.

This is the only file that knows how `transformers` names the inside of its ViTs. Weights are taken from the
instantiated model, never from a checkpoint's file, whose names differ between versions. A new family is one entry of
`FAMILIES`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from .vision_models import VisionModel, own_image_processor, public_name, without_pooler

_ATTENTION = {
    r"attention\.q_proj": "attention.qkv.0",
    r"attention\.k_proj": "attention.qkv.1",
    r"attention\.v_proj": "attention.qkv.2",
    r"attention\.o_proj": "attention.proj",
}
_MLP = {r"mlp\.fc1": "mlp.fc1", r"mlp\.fc2": "mlp.fc2"}
_DINOV2_BLOCK = {
    **_ATTENTION,
    **_MLP,
    r"norm1": "norm1",
    r"norm2": "norm2",
    r"layer_scale1\.lambda1": "layer_scale1.scale",
    r"layer_scale2\.lambda1": "layer_scale2.scale",
    r"mlp\.gate_proj": "mlp.fc1.0",
    r"mlp\.up_proj": "mlp.fc1.1",
    r"mlp\.down_proj": "mlp.fc2",
}
_VIT_BLOCK = {**_ATTENTION, **_MLP, r"layernorm_before": "norm1", r"layernorm_after": "norm2"}


@dataclass(frozen=True)
class ViTFamily:
    """What differs between the ViT families of `transformers`.

    Attributes:
        block_names: a layer's modules or parameters (regular expressions) to a Raptor block's; a trailing number is the
            part's place in a fused projection.
        antialias: whether positions are interpolated with antialiasing.
    """

    block_names: Mapping[str, str]
    antialias: bool = False


_VIT = ViTFamily(_VIT_BLOCK)
FAMILIES: dict[str, ViTFamily] = {
    "dinov2_with_registers": ViTFamily(_DINOV2_BLOCK, antialias=True),
    "dinov2": ViTFamily(_DINOV2_BLOCK),
    "vit": _VIT,
    "deit": _VIT,
    "vit_mae": _VIT,
}


class Teacher(VisionModel):
    """A frozen pretrained ViT whose weights a Raptor can take: states `a_0 .. a_L`, token layout, final norm, and
    weights under Raptor's names.

    Attributes:
        model, image_processor, layout, name_or_path, revision: as of [`~raptor_hf.vision_models.VisionModel`]; the
            model comes without its head if it has one.
        family (`ViTFamily`): how its layers are named.

    Raises:
        ValueError: if the architecture is none of `FAMILIES`, or is configured in a way a Raptor block cannot be
            (another activation than the exact GELU, a position table that is not square).
    """

    def __init__(self, model: PreTrainedModel, image_processor: Any = None, revision: str | None = None) -> None:
        self.check_config(model.config)
        self.family = FAMILIES[model.config.model_type]
        super().__init__(model, image_processor, revision)

    @classmethod
    def check_config(cls, config: PreTrainedConfig) -> None:
        """Refuses what no Raptor block can be; errors as the class."""
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"teacher of type {config.model_type!r} is not supported; use a checkpoint of one of "
                f"{', '.join(FAMILIES)}."
            )
        _check_supported(config)

    @classmethod
    def untrained(cls, name_or_path: str | Path, *, revision: str | None = None, **kwargs: Any) -> "Teacher":
        """A teacher of the same sizes with random weights: reads the configuration and the image processor alone.

        Args:
            name_or_path, revision: as in [`Teacher.from_pretrained`].
            kwargs: passed to `AutoModel.from_config`: `dtype`, `attn_implementation`.

        Raises:
            ValueError, OSError: as [`Teacher.from_pretrained`].
        """
        config = AutoConfig.from_pretrained(name_or_path, revision=revision)
        cls.check_config(config)
        config._name_or_path = str(name_or_path)
        model = AutoModel.from_config(config, **{**without_pooler(config), **kwargs})
        return cls(model, own_image_processor(name_or_path, config, revision, {}), revision)

    @torch.no_grad()
    def hidden_states(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """States `a_0 .. a_L` of images `(batch_size, num_channels, height, width)`: `L + 1` tensors of shape
        `(batch_size, seq_length, hidden_size)`, the last one **before** the final LayerNorm.

        Calls the model as a whole, so that what `accelerate` wrapped around its forward (autocast) is used.
        """
        self.model.eval()
        outputs = self.model(pixel_values, output_hidden_states=True, **self.forward_kwargs(pixel_values))
        return outputs.hidden_states

    @torch.no_grad()
    def last_hidden_state(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The final LayerNorm's output `(batch_size, seq_length, hidden_size)`; no other state is kept."""
        self.model.eval()
        return self.model(pixel_values, **self.forward_kwargs(pixel_values)).last_hidden_state

    @torch.no_grad()
    def final_norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The teacher's final LayerNorm on states `(..., hidden_size)`."""
        return self.model.layernorm(hidden_states)

    @torch.no_grad()
    def apply_layer(self, hidden_states: torch.Tensor, layer: int) -> torch.Tensor:
        """Makes state `layer`, counted from 1, from state `layer - 1`, both `(batch_size, seq_length, hidden_size)`, as
        [`RaptorModel.apply_layer`] does. Any layer takes any state: what an intervention needs.

        Raises:
            ValueError: if the layer does not exist.
        """
        self.model.eval()
        return self._layer_module(layer)(hidden_states)

    def config_fields(self) -> dict[str, Any]:
        """The fields of [`RaptorConfig`] that a student shares with this teacher."""
        config = self.model.config
        weights = self.block_state(1)
        gated = "swiglu" if weights["mlp.fc1.weight"].shape[0] != weights["mlp.fc2.weight"].shape[1] else "gelu"
        return {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": weights["mlp.fc2.weight"].shape[1],
            "mlp_type": gated,
            "layer_norm_eps": config.layer_norm_eps,
            "image_size": _square(config, "image_size"),
            "patch_size": _square(config, "patch_size"),
            "num_channels": config.num_channels,
            "num_register_tokens": self.layout.num_register_tokens,
            "interpolate_antialias": self.family.antialias,
            "initializer_range": config.initializer_range,
            "teacher_name_or_path": public_name(self.name_or_path),
            "teacher_revision": self.revision,
        }

    def embedding_state(self) -> dict[str, torch.Tensor]:
        """Embeddings and final norm under the names of [`RaptorModel`], detached.

        DeiT adds a position to its distillation token; the register that stands for it is their sum.
        """
        own = self.model.embeddings
        positions, registers = own.position_embeddings, getattr(own, "register_tokens", None)
        if self._has_distillation_token:
            registers = own.distillation_token + positions[:, 1:2]
            positions = torch.cat([positions[:, :1], positions[:, 2:]], dim=1)
        if registers is None:
            registers = positions.new_zeros(1, 0, self.hidden_size)
        state = {
            "embeddings.cls_token": own.cls_token,
            "embeddings.register_tokens": registers,
            "embeddings.position_embeddings": positions,
            "layernorm.weight": self.model.layernorm.weight,
            "layernorm.bias": self.model.layernorm.bias,
        }
        for name, value in own.patch_embeddings.projection.state_dict().items():
            state[f"embeddings.patch_embeddings.projection.{name}"] = value
        return {name: value.detach() for name, value in state.items()}

    def block_state(self, layer: int) -> dict[str, torch.Tensor]:
        """Weights of layer `layer`, counted from 1, under the names of a Raptor block (without depth scales), detached.

        A missing LayerScale is 1, a missing bias 0.

        Raises:
            ValueError: if the layer does not exist, or has a weight that no name of ours stands for.
        """
        return _rename_block(self._layer_module(layer), self.family.block_names, self.hidden_size)

    def _layer_module(self, layer: int) -> nn.Module:
        if not 1 <= layer <= self.num_layers:
            raise ValueError(f"layer={layer}: this teacher has layers 1 to {self.num_layers}.")
        return self.layers[layer - 1]

    @property
    def _has_distillation_token(self) -> bool:
        return hasattr(self.model.embeddings, "distillation_token")


def _check_supported(config: PreTrainedConfig) -> None:
    if config.hidden_act != "gelu" and not getattr(config, "use_swiglu_ffn", False):
        raise ValueError(
            f"teacher with hidden_act={config.hidden_act!r}: a Raptor block has the exact GELU or SwiGLU; such a "
            "teacher cannot be copied into it."
        )
    for name in ("image_size", "patch_size"):
        _square(config, name)


def _square(config: PreTrainedConfig, name: str) -> int:
    value = getattr(config, name)
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) != 1:
        raise ValueError(f"teacher with {name}={value}: only square ones are supported.")
    return sides.pop()


def _rename_block(module: nn.Module, names: Mapping[str, str], hidden_size: int) -> dict[str, torch.Tensor]:
    parts: dict[str, dict[int, torch.Tensor]] = {}
    unmapped = []
    for name, value in module.state_dict().items():
        target = _rename(name, names)
        if target is None:
            unmapped.append(name)
            continue
        fused = re.fullmatch(r"(.*)\.(\d)(\.\w+)", target)
        key, index = (fused[1] + fused[3], int(fused[2])) if fused else (target, 0)
        parts.setdefault(key, {})[index] = value
    if unmapped:
        raise ValueError(f"the teacher's layer has weights that a Raptor block cannot hold: {', '.join(unmapped)}.")
    state = {key: torch.cat([value[i] for i in sorted(value)]) for key, value in parts.items()}
    for name in ("layer_scale1.scale", "layer_scale2.scale"):
        state.setdefault(name, state["norm1.weight"].new_ones(hidden_size))
    state.setdefault("attention.qkv.bias", state["attention.qkv.weight"].new_zeros(3 * hidden_size))
    return state


def _rename(name: str, names: Mapping[str, str]) -> str | None:
    for pattern, target in names.items():
        match = re.fullmatch(rf"{pattern}(\.\w+)?", name)
        if match:
            return target + (match[1] or "")
    return None
