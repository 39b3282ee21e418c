"""Any ViT of the `transformers` library, seen as states `a_0 .. a_L` and a token layout: enough to measure one.

The states are read by hooks on the list of layers, whatever a family names it and whatever it returns beside them, so
that a new family needs no line here. What can also be distilled, because its weights are known by name, is a
[`~raptor_hf.Teacher`].
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from .tokens import TokenLayout, patch_grid

_HUB_KWARGS = ("token", "cache_dir", "local_files_only")
_CLS_TOKENS = ("cls_token", "class_embedding")
_REGISTERS = ("distillation_token",)  # beside config.num_register_tokens


class VisionModel:
    """A frozen pretrained ViT: its states and where its tokens sit.

    States are those between the layers: state 0 is what the first layer takes (of CLIP after its `pre_layrnorm`), state
    `L` what the last one makes, before any final norm.

    Attributes:
        model: the vision tower of the `transformers` model, in evaluation mode, without gradients. ViT-MAE sees every
            patch, in order.
        image_processor: the model's own image processor, or `None` if it has none.
        layout: positions of cls, registers and patches. DeiT's distillation token counts as one register; SigLIP and
            I-JEPA have no cls token.
        layers: the model's list of layers.
        name_or_path, revision: where it came from.

    Raises:
        ValueError: if the model has no list of `num_hidden_layers` layers, or needs more than pixels (a text, sizes).
    """

    def __init__(self, model: PreTrainedModel, image_processor: Any = None, revision: str | None = None) -> None:
        self.name_or_path = model.config._name_or_path or model.config.model_type
        self.model: Any = _vision_tower(model).eval().requires_grad_(False)
        self.image_processor = image_processor
        self.revision = revision
        names = {name.rsplit(".", 1)[-1] for name, _ in self.model.named_parameters()}
        num_registers = (getattr(self.model.config, "num_register_tokens", None) or 0) + len(names & {*_REGISTERS})
        self.layout = TokenLayout(num_registers, has_cls_token=bool(names & {*_CLS_TOKENS}))
        self.layers = _layers(self.model)
        self._parameters = _forward_parameters(self.model)
        if hasattr(self.model.config, "mask_ratio"):
            self.model.config.mask_ratio = 0.0

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, *, revision: str | None = None, **kwargs: Any) -> Self:
        """Loads a ViT from the Hub or a folder; of a model of images and texts its vision tower.

        Args:
            name_or_path: Hub id or folder.
            revision: branch, tag or commit on the Hub.
            kwargs: passed to `AutoModel.from_pretrained`: `dtype`, `attn_implementation`, `token`, `device_map`, ...

        Raises:
            ValueError: as the class; if `transformers` has no such model.
            OSError: if there is no such checkpoint.
        """
        hub: dict[str, Any] = {
            name: kwargs[name] for name in ("token", "cache_dir", "local_files_only") if name in kwargs
        }
        config = AutoConfig.from_pretrained(name_or_path, revision=revision, **hub)
        cls.check_config(config)
        model = AutoModel.from_pretrained(name_or_path, revision=revision, **{**without_pooler(config), **kwargs})
        return cls(model, own_image_processor(name_or_path, config, revision, hub), revision)

    @classmethod
    def check_config(cls, config: PreTrainedConfig) -> None:
        """Called before weights are loaded; raises a ValueError for what the class cannot hold."""

    @property
    def num_layers(self) -> int:
        """`L`, the model's layers."""
        return self.model.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Features of a token."""
        return self.model.config.hidden_size

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return self.model.device

    @torch.no_grad()
    def hidden_states(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """States `a_0 .. a_L` of images `(batch_size, num_channels, height, width)`: `L + 1` tensors of shape
        `(batch_size, seq_length, hidden_size)`, the last one **before** the final LayerNorm.

        Calls the model as a whole, so that what `accelerate` wrapped around its forward (autocast) is used.

        Raises:
            ValueError: if the states are no sequence of prefix tokens and patches of one width, as in hierarchical
                models and in those with further tokens.
        """
        self.model.eval()
        grid = self._grid(pixel_values)
        with _Recorder(self.layers) as recorder:
            self.model(pixel_values, **self.forward_kwargs(pixel_values))
        expected = (len(pixel_values), self.layout.num_prefix_tokens + grid[0] * grid[1], self.hidden_size)
        shapes = {tuple(state.shape) for state in recorder.states}
        if shapes != {expected}:
            tokens = " and ".join(self.layout.groups)
            raise ValueError(
                f"model {self.name_or_path!r} has states of shapes {sorted(shapes)}, while {tokens} tokens of "
                f"{grid[0]} x {grid[1]} patches are {expected}; only plain ViTs can be measured, whose layers all "
                "keep one sequence of such tokens."
            )
        return tuple(recorder.states)

    def forward_kwargs(self, pixel_values: torch.Tensor) -> dict[str, Any]:
        """Arguments of the forward pass beside `pixel_values`, so that any image size works and every patch is seen in
        order.
        """
        kwargs: dict[str, Any] = {}
        if "interpolate_pos_encoding" in self._parameters:
            kwargs["interpolate_pos_encoding"] = True
        if "noise" in self._parameters:  # ViT-MAE shuffles by it
            height, width = self._grid(pixel_values)
            kwargs["noise"] = torch.arange(height * width, device=pixel_values.device).expand(len(pixel_values), -1)
        return kwargs

    def _grid(self, pixel_values: torch.Tensor) -> tuple[int, int]:
        height, width = pixel_values.shape[-2:]
        return patch_grid(height, width, _side(self.model.config.patch_size))

    def iter_hidden_states(self, images: Iterable[Any], batch_size: int = 32) -> "HiddenStates":
        """States of many images, batch by batch, to be passed to [`~raptor_hf.layer_similarity`].

        Args:
            images: PIL images; or dicts with `"pixel_values"` (a processed image `(channels, height, width)`) or
                `"image"` (a PIL image, put through the model's processor).
            batch_size: images in a forward pass.

        Returns:
            an iterable of tuples as `hidden_states` gives, with the token `layout` as an attribute; it can be iterated
            as often as `images` can.

        Raises:
            ValueError: if a batch size below 1 is asked for, or PIL images are given and the model has no processor.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        return HiddenStates(self, images, batch_size)

    def pixel_values(self, images: Sequence[Any]) -> torch.Tensor:
        """Images, as `iter_hidden_states` takes them, to one batch on the model's device.

        Raises:
            ValueError: if PIL images are given and the model has no processor.
        """
        items = [item if isinstance(item, Mapping) else {"image": item} for item in images]
        if "pixel_values" in items[0]:
            batch = torch.stack([item["pixel_values"] for item in items])
        elif self.image_processor is None:
            raise ValueError(
                f"model {self.name_or_path!r} has no image processor; give processed images as "
                "{'pixel_values': tensor}, or a folder with a preprocessor_config.json."
            )
        else:
            batch = self.image_processor([item["image"] for item in items], return_tensors="pt")["pixel_values"]
        return batch.to(self.device)


class HiddenStates:
    """Iterable over a model's states, batch by batch; see [`VisionModel.iter_hidden_states`]."""

    def __init__(self, model: VisionModel, images: Iterable[Any], batch_size: int) -> None:
        self.model, self.images, self.batch_size = model, images, batch_size

    @property
    def layout(self) -> TokenLayout:
        """Positions of cls, registers and patches in the states."""
        return self.model.layout

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        batch: list[Any] = []
        for image in self.images:
            batch.append(image)
            if len(batch) == self.batch_size:
                yield self.model.hidden_states(self.model.pixel_values(batch))
                batch = []
        if batch:
            yield self.model.hidden_states(self.model.pixel_values(batch))


def public_name(name_or_path: str) -> str:
    """A Hub id as it is; of a path only the last part, since reports and models are shared and paths are private."""
    path = Path(name_or_path).expanduser()
    is_path = path.exists() or name_or_path.startswith((".", "/", "~")) or len(path.parts) > 2 or "\\" in name_or_path
    return path.resolve().name if is_path else name_or_path


def own_image_processor(
    name_or_path: str | Path, config: PreTrainedConfig, revision: str | None, hub: Mapping[str, Any]
) -> Any:
    """The checkpoint's own image processor; DINOv2's for one that comes without, `None` for other families.

    Args:
        name_or_path, revision: the checkpoint.
        config: its configuration.
        hub: `token`, `cache_dir`, `local_files_only`.
    """
    try:
        processor = AutoImageProcessor.from_pretrained(name_or_path, revision=revision, **hub)
    except OSError:  # a checkpoint without preprocessor_config.json
        processor = None
    if processor is None and config.model_type.startswith("dinov2"):
        from .data import dinov2_processor

        processor = dinov2_processor()
    return processor


class _Recorder:
    """Within its context, `states` are what the layers of the last forward pass took and made."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.layers, self.states = layers, list[torch.Tensor]()
        self.handles: list[Any] = []

    def __enter__(self) -> "_Recorder":
        self.handles = [layer.register_forward_hook(self._after) for layer in self.layers]
        self.handles.append(self.layers[0].register_forward_pre_hook(self._before, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.states = [args[0] if args else kwargs["hidden_states"]]

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.states.append(output if isinstance(output, torch.Tensor) else output[0])


def _vision_tower(model: Any) -> Any:
    """The part of a model that makes states of pixels: without its head, without its tower of texts."""
    base = getattr(model.base_model, "vision_model", model.base_model)
    return base if "pixel_values" in inspect.signature(base.forward).parameters else model


def _layers(model: Any) -> nn.ModuleList:
    depth = getattr(model.config, "num_hidden_layers", None)
    for module in model.modules() if not hasattr(model.config, "depths") else ():  # of hierarchical models
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(
        f"model of type {model.config.model_type!r} is no list of layers that all keep one sequence of tokens; only "
        "plain ViTs can be measured."
    )


def _forward_parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    parameters = inspect.signature(model.forward).parameters
    required = [
        name
        for name, parameter in parameters.items()
        if name != "pixel_values" and parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
    ]
    if required or "pixel_values" not in parameters:
        needs = f"needs {', '.join(required)}" if required else "takes no pixel_values"
        raise ValueError(
            f"model of type {model.config.model_type!r} {needs}; only ViTs that take nothing but pixel_values can be "
            "measured."
        )
    return parameters


def without_pooler(config: PreTrainedConfig) -> dict[str, bool]:
    """Arguments that leave out a ViT's pooler, which nothing here reads and many checkpoints lack."""
    model_class = MODEL_MAPPING.get(type(config), None)
    takes = model_class is not None and "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if takes else {}


def _side(patch_size: int | Sequence[int]) -> int:
    return patch_size if isinstance(patch_size, int) else patch_size[0]
