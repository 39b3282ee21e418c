"""The teacher: a pretrained ViT of the `transformers` library, seen as states, a token layout and weights in our names.

This is the only file that knows how `transformers` names the inside of its ViTs. Weights are taken from the
instantiated model, never from a checkpoint's file, whose names differ between versions. A new family is one entry of
`FAMILIES`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PreTrainedConfig, PreTrainedModel

from .tokens import TokenLayout

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
        layers: path of the list of layers inside the model.
        block_names: a layer's modules or parameters (regular expressions) to a Raptor block's; a trailing number is the
            part's place in a fused projection.
        antialias: whether positions are interpolated with antialiasing.
        load_kwargs: arguments of `from_pretrained`.
        forward_kwargs: arguments of the forward pass.
    """

    layers: str
    block_names: Mapping[str, str]
    antialias: bool = False
    load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    forward_kwargs: Mapping[str, Any] = field(default_factory=dict)


_VIT = ViTFamily(
    "layers", _VIT_BLOCK, load_kwargs={"add_pooling_layer": False}, forward_kwargs={"interpolate_pos_encoding": True}
)
FAMILIES: dict[str, ViTFamily] = {
    "dinov2_with_registers": ViTFamily("encoder.layer", _DINOV2_BLOCK, antialias=True),
    "dinov2": ViTFamily("encoder.layer", _DINOV2_BLOCK),
    "vit": _VIT,
    "deit": _VIT,
}


class Teacher:
    """A frozen pretrained ViT: states `a_0 .. a_L`, token layout, final norm, and weights under Raptor's names.

    Attributes:
        model: the `transformers` model, without its head if it has one, in evaluation mode, without gradients.
        image_processor: the teacher's own image processor, or `None` if it has none.
        layout: positions of cls, registers and patches. DeiT's distillation token counts as one register.
        name_or_path, revision: where it came from.
    """

    def __init__(self, model: PreTrainedModel, image_processor: Any = None, revision: str | None = None) -> None:
        self.family = _family(model.config)
        _check_supported(model.config)
        self.model: Any = model.base_model.eval().requires_grad_(False)
        self.image_processor = image_processor
        self.name_or_path = model.config._name_or_path or model.config.model_type
        self.revision = revision
        num_registers = getattr(model.config, "num_register_tokens", 0) + int(self._has_distillation_token)
        self.layout = TokenLayout(num_registers)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, revision: str | None = None, **kwargs: Any) -> "Teacher":
        """Loads a teacher from the Hub or a folder; checkpoints with a head give their backbone.

        Args:
            name_or_path: Hub id or folder of a `dinov2_with_registers`, `dinov2`, `vit` or `deit` checkpoint.
            revision: branch, tag or commit on the Hub.
            kwargs: passed to `AutoModel.from_pretrained`: `dtype`, `attn_implementation`, `token`, `device_map`, ...

        Raises:
            ValueError: if the architecture is not one of these, or is configured in a way a Raptor block cannot be
                (another activation than the exact GELU, a position table that is not square).
            OSError: if there is no such checkpoint.
        """
        hub: dict[str, Any] = {
            name: kwargs[name] for name in ("token", "cache_dir", "local_files_only") if name in kwargs
        }
        config = _checked_config(name_or_path, revision, hub)
        load_kwargs = FAMILIES[config.model_type].load_kwargs
        model = AutoModel.from_pretrained(name_or_path, revision=revision, **{**load_kwargs, **kwargs})
        return cls(model, _image_processor(name_or_path, config, revision, hub), revision)

    @classmethod
    def untrained(cls, name_or_path: str | Path, *, revision: str | None = None, **kwargs: Any) -> "Teacher":
        """A teacher of the same sizes with random weights: reads the configuration and the image processor alone.

        Args:
            name_or_path, revision: as in [`Teacher.from_pretrained`].
            kwargs: passed to `AutoModel.from_config`: `dtype`, `attn_implementation`.

        Raises:
            ValueError, OSError: as [`Teacher.from_pretrained`].
        """
        config = _checked_config(name_or_path, revision, {})
        config._name_or_path = str(name_or_path)
        model = AutoModel.from_config(config, **{**FAMILIES[config.model_type].load_kwargs, **kwargs})
        return cls(model, _image_processor(name_or_path, config, revision, {}), revision)

    @property
    def num_layers(self) -> int:
        """`L`, the teacher's layers."""
        return self.model.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Features of a token."""
        return self.model.config.hidden_size

    @property
    def device(self) -> torch.device:
        """Where the teacher's weights are."""
        return self.model.device

    @torch.no_grad()
    def hidden_states(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """States `a_0 .. a_L` of images `(batch_size, num_channels, height, width)`: `L + 1` tensors of shape
        `(batch_size, seq_length, hidden_size)`, the last one **before** the final LayerNorm.

        Calls the model as a whole, so that what `accelerate` wrapped around its forward (autocast) is used.
        """
        self.model.eval()
        outputs = self.model(pixel_values, output_hidden_states=True, **self.family.forward_kwargs)
        return outputs.hidden_states

    @torch.no_grad()
    def last_hidden_state(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """The final LayerNorm's output `(batch_size, seq_length, hidden_size)`; no other state is kept."""
        self.model.eval()
        return self.model(pixel_values, **self.family.forward_kwargs).last_hidden_state

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

    def iter_hidden_states(self, images: Iterable[Any], batch_size: int = 32) -> "HiddenStates":
        """States of many images, batch by batch, to be passed to [`~raptor_hf.layer_similarity`].

        Args:
            images: PIL images; or dicts with `"pixel_values"` (a processed image `(channels, height, width)`) or
                `"image"` (a PIL image, put through the teacher's processor).
            batch_size: images in a forward pass.

        Returns:
            an iterable of tuples as [`Teacher.hidden_states`] gives, with the token `layout` as an attribute; it can be
            iterated as often as `images` can.

        Raises:
            ValueError: if a batch size below 1 is asked for, or PIL images are given and the teacher has no processor.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        return HiddenStates(self, images, batch_size)

    def pixel_values(self, images: Sequence[Any]) -> torch.Tensor:
        """Images, as [`Teacher.iter_hidden_states`] takes them, to one batch on the teacher's device.

        Raises:
            ValueError: if PIL images are given and the teacher has no processor.
        """
        items = [item if isinstance(item, Mapping) else {"image": item} for item in images]
        if "pixel_values" in items[0]:
            batch = torch.stack([item["pixel_values"] for item in items])
        elif self.image_processor is None:
            raise ValueError(
                f"teacher {self.name_or_path!r} has no image processor; give processed images as "
                "{'pixel_values': tensor}, or a folder with a preprocessor_config.json."
            )
        else:
            batch = self.image_processor([item["image"] for item in items], return_tensors="pt")["pixel_values"]
        return batch.to(self.device)

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
        layers: Any = self.model.get_submodule(self.family.layers)
        return layers[layer - 1]

    @property
    def _has_distillation_token(self) -> bool:
        return hasattr(self.model.embeddings, "distillation_token")


class HiddenStates:
    """Iterable over a teacher's states, batch by batch; see [`Teacher.iter_hidden_states`]."""

    def __init__(self, teacher: Teacher, images: Iterable[Any], batch_size: int) -> None:
        self.teacher, self.images, self.batch_size = teacher, images, batch_size

    @property
    def layout(self) -> TokenLayout:
        """Positions of cls, registers and patches in the states."""
        return self.teacher.layout

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        batch: list[Any] = []
        for image in self.images:
            batch.append(image)
            if len(batch) == self.batch_size:
                yield self.teacher.hidden_states(self.teacher.pixel_values(batch))
                batch = []
        if batch:
            yield self.teacher.hidden_states(self.teacher.pixel_values(batch))


def public_name(name_or_path: str) -> str:
    """A Hub id as it is; of a path only the last part, since reports and models are shared and paths are private."""
    path = Path(name_or_path).expanduser()
    is_path = path.exists() or name_or_path.startswith((".", "/", "~")) or len(path.parts) > 2 or "\\" in name_or_path
    return path.resolve().name if is_path else name_or_path


def _checked_config(name_or_path: str | Path, revision: str | None, hub: Mapping[str, Any]) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(name_or_path, revision=revision, **hub)
    _family(config)
    _check_supported(config)
    return config


def _image_processor(
    name_or_path: str | Path, config: PreTrainedConfig, revision: str | None, hub: Mapping[str, Any]
) -> Any:
    """The checkpoint's own image processor; DINOv2's for one that comes without, `None` for other families."""
    try:
        processor = AutoImageProcessor.from_pretrained(name_or_path, revision=revision, **hub)
    except OSError:  # a checkpoint without preprocessor_config.json
        processor = None
    if processor is None and config.model_type.startswith("dinov2"):
        from .data import dinov2_processor

        processor = dinov2_processor()
    return processor


def _family(config: PreTrainedConfig) -> ViTFamily:
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"teacher of type {config.model_type!r} is not supported; use a checkpoint of one of {', '.join(FAMILIES)}."
        )
    return FAMILIES[config.model_type]


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
