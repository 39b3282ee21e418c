"""The Raptor model: a Vision Transformer whose layers are a few weight-tied blocks applied again and again.

Classes run in the order of the data: embeddings, depth scale, attention, MLP, block, model. A block is owned by this
file and not by transformers, so a checkpoint's keys never change with the user's version. Copied to the Hub with
every saved model: imports torch, transformers and flat siblings only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_raptor import RaptorConfig, check_config
from .tokens import patch_grid

logger = logging.get_logger(__name__)

DEPTH_SCALE_WIDTH = 16
DEPTH_SCALE_STD = 1e-4
RANDOM_LAYERSCALE = 1e-5
INITS = ("first", "middle", "last", "mean", "random")


class RaptorPatchEmbeddings(nn.Module):
    """Pixels `(batch_size, num_channels, height, width)` to patch tokens `(batch_size, num_patches, hidden_size)`."""

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Casts pixels to the model's dtype and projects them."""
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)


class RaptorEmbeddings(nn.Module):
    """The teacher's embeddings, whose output is state 0: cls token, registers (without position), patches.

    Positions are interpolated as the teacher does it, with or without antialiasing; the native grid is taken as it is.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.num_channels = config.num_channels
        self.grid_size = config.image_size // config.patch_size
        self.antialias = config.interpolate_antialias
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.hidden_size))
        self.register_tokens = nn.Parameter(torch.empty(1, config.num_register_tokens, config.hidden_size))
        self.position_embeddings = nn.Parameter(torch.empty(1, 1 + self.grid_size**2, config.hidden_size))
        self.patch_embeddings = RaptorPatchEmbeddings(config)

    def interpolate_positions(self, rows: int, columns: int) -> torch.Tensor:
        """Positions of a `rows x columns` grid of patches, `(1, rows * columns, hidden_size)`, in the model's dtype."""
        positions = self.position_embeddings[:, 1:]
        if rows == columns == self.grid_size:
            return positions
        grid = positions.unflatten(1, (self.grid_size, self.grid_size)).permute(0, 3, 1, 2)
        grid = grid.to(torch.promote_types(grid.dtype, torch.float32))  # bicubic in half precision shifts the states
        grid = nn.functional.interpolate(grid, (rows, columns), mode="bicubic", antialias=self.antialias)
        return grid.to(positions.dtype).flatten(2).transpose(1, 2)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Pixels `(batch_size, num_channels, height, width)` to state 0 `(batch_size, seq_length, hidden_size)`.

        Raises:
            ValueError: if the channels are not the model's, or a side is no multiple of the patch or smaller than it.
        """
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values of shape {tuple(pixel_values.shape)}: expected (batch_size, {self.num_channels}, "
                "height, width); process the images with the saved image processor."
            )
        rows, columns = patch_grid(pixel_values.shape[2], pixel_values.shape[3], self.patch_size)
        patches = self.patch_embeddings(pixel_values) + self.interpolate_positions(rows, columns)
        prefix = torch.cat([self.cls_token + self.position_embeddings[:, :1], self.register_tokens], dim=1)
        return torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)


class RaptorLayerScale(nn.Module):
    """Per-channel scale of a residual branch; its product with the depth scale is taken in [`RaptorBlock`]."""

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(config.hidden_size))


class DepthLinear(nn.Linear):
    """Linear layer that computes in the dtype of its input, so that a bfloat16 model has float32 depth scales."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`, in the input's dtype."""
        # A copy, since a CPU rounds matrix times vector by the matrix's address: a loaded weight would give other bits.
        return nn.functional.linear(input, self.weight.to(input.dtype, copy=True), self.bias.to(input.dtype))


class DepthScale(nn.Module):
    """A block's scales of attention branch, MLP branch and whole stream at layer `l` (arXiv 2512.19941, App. A.3):
    `1 + Linear(16, 3 * hidden_size)(SiLU(Linear(1, 16)(l)))`, of the raw one-based `l`, as in the research code.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__()
        self.linear1 = DepthLinear(1, DEPTH_SCALE_WIDTH)
        self.linear2 = DepthLinear(DEPTH_SCALE_WIDTH, 3 * config.hidden_size)

    def forward(self, depth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Depth of shape `()` or `(batch_size,)`, float32 or float64, to three scales of the same dtype and of shape
        `(1 or batch_size, 1, hidden_size)`, also under autocast.
        """
        with maybe_autocast(depth.device.type, enabled=False):
            hidden = nn.functional.silu(self.linear1(depth.reshape(-1, 1)))
            scales = 1 + self.linear2(hidden)
        attention, mlp, output = scales.unsqueeze(1).chunk(3, dim=-1)
        return attention, mlp, output


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The implementation `"eager"`, which alone returns its weights.

    Args:
        query, key, value: `(batch_size, num_heads, seq_length, head_dim)`; `scaling` multiplies the logits.

    Returns:
        the output `(batch_size, seq_length, num_heads, head_dim)` and the weights, one square map per head.
    """
    logits = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = nn.functional.softmax(logits, dim=-1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class RaptorAttention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one product (`qkv`, rows in that order)."""

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States `(batch_size, seq_length, hidden_size)` to an output of that shape and the weights, eager only."""
        batch_size, seq_length, hidden_size = hidden_states.shape
        qkv = self.qkv(hidden_states).view(batch_size, seq_length, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(self, query, key, value, None, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.proj(output.reshape(batch_size, seq_length, hidden_size)), weights


class RaptorMLP(nn.Module):
    """`fc2(gelu(fc1(x)))`, the exact GELU, or SwiGLU, `fc2(silu(gate) * value)`: `fc1` holds gate, then value rows."""

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__()
        self.is_gated = config.mlp_type == "swiglu"
        width: Any = config.intermediate_size  # a number: the configuration has resolved the names
        self.fc1 = nn.Linear(config.hidden_size, 2 * width if self.is_gated else width)
        self.fc2 = nn.Linear(width, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """States `(batch_size, seq_length, hidden_size)` to the same shape."""
        hidden = self.fc1(hidden_states)
        if self.is_gated:
            gate, value = hidden.chunk(2, dim=-1)
            return self.fc2(nn.functional.silu(gate) * value)
        return self.fc2(nn.functional.gelu(hidden))


class RaptorBlock(GradientCheckpointingLayer):
    """One weight-tied block: a pre-LayerNorm ViT layer with LayerScale and depth scales (arXiv 2512.19941, App. A).

    `x = x + s_attn * LS1(attn(LN1(x)))`, `x = x + s_mlp * LS2(mlp(LN2(x)))`, `out = s_out * x`: the last scale acts
    on the whole stream. Scales are computed and multiplied in float32 (float64 in a float64 model) and the product is
    cast, since a scale of 1.0039 is 1 in bfloat16.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = RaptorAttention(config)
        self.layer_scale1 = RaptorLayerScale(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = RaptorMLP(config)
        self.layer_scale2 = RaptorLayerScale(config)
        self.depth_scale = DepthScale(config) if config.depth_scale else None

    def forward(self, hidden_states: torch.Tensor, depth: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """States of layer `depth - 1` to states of layer `depth`.

        Args:
            hidden_states: `(batch_size, seq_length, hidden_size)`.
            depth: layer number, float32 (float64 in a float64 model), `()` or, for teacher forcing, `(batch_size,)`.
        """
        dtype = hidden_states.dtype
        scale1, scale2 = self.layer_scale1.scale, self.layer_scale2.scale
        scale_out = None
        if self.depth_scale is not None:
            scale_attention, scale_mlp, scale_out = self.depth_scale(depth)
            scale1, scale2 = scale1 * scale_attention, scale2 * scale_mlp  # one product with the branch instead of two
        branch, _ = self.attention(self.norm1(hidden_states), **kwargs)
        hidden_states = (hidden_states + branch * scale1).to(dtype)
        hidden_states = hidden_states + self.mlp(self.norm2(hidden_states)) * scale2
        if scale_out is not None:
            hidden_states = hidden_states * scale_out
        return hidden_states.to(dtype)


class RaptorPreTrainedModel(PreTrainedModel):
    """What every Raptor model shares: configuration, weight initialisation, loading and saving."""

    config: RaptorConfig
    base_model_prefix = "raptor"
    main_input_name = "pixel_values"
    input_modalities = ["image"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["RaptorEmbeddings", "RaptorBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": RaptorBlock, "attentions": RaptorAttention}
    _input_embed_layer = "patch_embeddings"

    def __init__(self, config: RaptorConfig, *args: Any, **kwargs: Any) -> None:
        check_config(config)  # overrides given to from_pretrained are set after the configuration's own checks
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets what a checkpoint lacks; the guarded `init` functions leave loaded tensors alone."""
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, RaptorEmbeddings):
            init.trunc_normal_(module.cls_token, std=std)
            init.trunc_normal_(module.position_embeddings, std=std)
            init.zeros_(module.register_tokens)
        elif isinstance(module, RaptorLayerScale):
            init.constant_(module.scale, self.config.layerscale_value)
        elif isinstance(module, DepthLinear):
            # Asked of the module that owns the parameters: custom code is not asked for one that owns none.
            for parameter in (module.weight, module.bias):
                if module.in_features == 1:
                    init.uniform_(parameter, -1.0, 1.0)  # torch's own default for one input feature
                elif self.config.depth_scale_init == "normal":
                    init.normal_(parameter, std=DEPTH_SCALE_STD)
                else:
                    init.zeros_(parameter)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Recomputes block applications in the backward pass instead of keeping their activations.

        Raises:
            ValueError: for `use_reentrant=True`, which gives blocks behind frozen embeddings no gradient, silently.
        """
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            raise ValueError(
                "use_reentrant=True gives weight-tied blocks wrong or no gradients; use False, which is the default."
            )
        super().activation_checkpointing_enable(options, every_n_layers, offload)


class RaptorModel(RaptorPreTrainedModel):
    """A Vision Transformer whose `L` layers are made by `k` weight-tied blocks (arXiv 2512.19941, Def. 1), between the
    teacher's embeddings and final LayerNorm. `config.block_schedule[l - 1]` is the block of layer `l`.
    """

    def __init__(self, config: RaptorConfig) -> None:
        super().__init__(config)
        self.embeddings = RaptorEmbeddings(config)
        self.blocks = nn.ModuleList([RaptorBlock(config) for _ in range(config.num_blocks)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def apply_layer(self, hidden_states: torch.Tensor, layer: int, **kwargs: Any) -> torch.Tensor:
        """Makes state `layer`, counted from 1, from state `layer - 1`, both `(batch_size, seq_length, hidden_size)`."""
        schedule: Any = self.config.block_schedule
        return self.apply_block(schedule[layer - 1], hidden_states, layer, **kwargs)

    def apply_block(
        self, block: int, hidden_states: torch.Tensor, depth: int | Sequence[int] | torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Applies one block to states `(batch_size, seq_length, hidden_size)`, at a layer or at one per sample."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        depth = torch.as_tensor(depth, dtype=dtype, device=hidden_states.device)
        return self.blocks[block](hidden_states, depth, **kwargs)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        start_layer: int = 0,
        end_layer: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Runs the layers `start_layer + 1 .. end_layer`.

        Args:
            pixel_values: images `(batch_size, num_channels, height, width)`, sides multiples of the patch size. The run
                then starts at state 0.
            hidden_states: states `(batch_size, seq_length, hidden_size)` of layer `start_layer`, instead of images.
                Both inputs are cast to the model's dtype.
            start_layer: state the run starts from.
            end_layer: state it stops at, `start_layer < end_layer <= L`; the last one by default.
            kwargs: `output_hidden_states` (`True`, or the indices wanted), `output_attentions` (implementation
                `"eager"` only), `return_dict`.

        Returns:
            `last_hidden_state`: the final LayerNorm of the last state computed, wherever the run stops;
            `pooler_output`: its cls token; `hidden_states`: `end_layer - start_layer + 1` states **before** that norm,
            the first one the run's input; `attentions`: one map per application.

        Raises:
            ValueError: if not exactly one input is given, the layers are out of range or do not fit it, the image's
                size does not fit the patch, or attentions are asked of another implementation.
        """
        end_layer = self.config.num_hidden_layers if end_layer is None else end_layer
        self._check_inputs(pixel_values, hidden_states, start_layer, end_layer)
        if kwargs.get("output_attentions", self.config.output_attentions):
            self._check_attentions()
        hidden_states = self.embeddings(pixel_values) if hidden_states is None else hidden_states.to(self.dtype)
        for layer in range(start_layer + 1, end_layer + 1):
            hidden_states = self.apply_layer(hidden_states, layer, **kwargs)
        last_hidden_state = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(
            last_hidden_state=last_hidden_state,
            pooler_output=self.config.token_layout.select(last_hidden_state, "cls").squeeze(-2),
        )

    def _check_inputs(
        self, pixel_values: torch.Tensor | None, hidden_states: torch.Tensor | None, start_layer: int, end_layer: int
    ) -> None:
        if (pixel_values is None) == (hidden_states is None):
            raise ValueError("give exactly one of pixel_values (images) and hidden_states (states of start_layer).")
        if not 0 <= start_layer < end_layer <= self.config.num_hidden_layers:
            raise ValueError(
                f"start_layer={start_layer}, end_layer={end_layer}: states are numbered 0 (embeddings) to "
                f"{self.config.num_hidden_layers}, and a run needs start_layer < end_layer."
            )
        if pixel_values is not None and start_layer:
            raise ValueError(f"start_layer={start_layer} needs hidden_states; images enter at state 0.")
        shape = None if hidden_states is None else tuple(hidden_states.shape)
        if shape is not None and (len(shape) != 3 or shape[-1] != self.config.hidden_size):
            raise ValueError(
                f"hidden_states of shape {shape}: expected (batch_size, seq_length, {self.config.hidden_size})."
            )

    def _check_attentions(self) -> None:
        if self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs the eager attention, not {self.config._attn_implementation!r}; call "
                "model.set_attn_implementation('eager') first."
            )

    @classmethod
    def from_teacher(cls, teacher: Any, phases: Any, *, init: str = "middle", **config_fields: Any) -> "RaptorModel":
        """A student for `teacher`, ready to be distilled: its embeddings and final norm copied and frozen.

        Args:
            teacher: a [`~raptor_hf.Teacher`], or anything with `config_fields()` (a dict of [`RaptorConfig`] fields),
                `embedding_state()` (our names to tensors) and `block_state(layer)` (the same for layer `1..L`).
            phases: what [`~raptor_hf.find_phases`] returns, anything with a `block_schedule`, or repeats `(7, 3, 2)`.
            init: the layer a block starts from: the `"first"`, `"middle"` or `"last"` one it makes, their `"mean"`, or
                `"random"`, the paper's, with LayerScale 1e-5 as in the research code.
            config_fields: fields of [`RaptorConfig`] that shall differ from the teacher's: `mlp_type`,
                `intermediate_size` (then the MLP alone starts at random), `depth_scale`, `depth_scale_init`,
                `layerscale_value`, `dtype`.

        Raises:
            ValueError: if `init` is unknown, the numbers of layers differ, or embeddings do not have our names.
        """
        if init not in INITS:
            raise ValueError(f"init={init!r} is unknown; use one of {', '.join(INITS)}.")
        if init == "random":
            config_fields.setdefault("layerscale_value", RANDOM_LAYERSCALE)
        model = cls._from_config(RaptorConfig.from_teacher(teacher, phases, **config_fields))  # in config.dtype
        report = model.load_state_dict(teacher.embedding_state(), strict=False)
        missing = [name for name in report.missing_keys if not name.startswith("blocks.")]
        if missing or report.unexpected_keys:
            raise ValueError(
                f"the teacher's embedding_state() lacks {missing} and has unknown {report.unexpected_keys}; give the "
                "embeddings and the final layernorm in Raptor's names."
            )
        model.freeze_embeddings()
        if init != "random":
            model._init_blocks(teacher, init)
        return model

    def freeze_embeddings(self) -> None:
        """Freezes what is the teacher's own: patch embedding, tokens, positions and the final LayerNorm."""
        self.embeddings.requires_grad_(False)
        self.layernorm.requires_grad_(False)

    def _init_blocks(self, teacher: Any, how: str) -> None:
        schedule: Any = self.config.block_schedule
        for number, block in enumerate(self.blocks):
            layers = [layer for layer, made_by in enumerate(schedule, 1) if made_by == number]
            source, own = _block_source(teacher, layers, how), block.state_dict()
            fitting = {name: value for name, value in source.items() if name in own and own[name].shape == value.shape}
            block.load_state_dict(fitting, strict=False)
            skipped = sorted(set(source) - set(fitting))
            if skipped and not number:
                logger.warning(f"The {self.config.mlp_type} MLP, unlike the teacher's, starts at random: {skipped}.")


def _block_source(teacher: Any, layers: Sequence[int], how: str) -> Mapping[str, torch.Tensor]:
    if how == "mean":
        states = [teacher.block_state(layer) for layer in layers]
        return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    position = {"first": 0, "middle": (len(layers) - 1) // 2, "last": -1}[how]
    return teacher.block_state(layers[position])


__all__ = ["RaptorModel", "RaptorPreTrainedModel"]
