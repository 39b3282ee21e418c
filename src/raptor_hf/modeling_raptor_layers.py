"""The modules of a Raptor in the order of the data: embeddings, depth scale, attention, MLP, block.

A block is owned by this file and not by transformers, so a checkpoint's keys never change with the user's version.
Copied to the Hub with every saved model: imports torch, transformers and flat siblings only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import maybe_autocast

from .configuration_raptor import RaptorConfig
from .tokens import patch_grid

DEPTH_SCALE_WIDTH = 16


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
        # An exported graph has free sizes and no branch; for the native grid its interpolation is the identity.
        if not torch.compiler.is_exporting() and rows == columns == self.grid_size:
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


class RaptorLinear(nn.Linear):
    """A block's projection, with a low-rank change for every application when `config.adapter_rank` is not 0:
    `x W^T + b + x A_i^T B_i^T` in application `i` (after arXiv 2410.20672; beyond the paper).

    Args:
        config: the rank.
        in_features, out_features: of the projection.
        num_applications: how often the block is applied.
    """

    def __init__(self, config: RaptorConfig, in_features: int, out_features: int, num_applications: int) -> None:
        super().__init__(in_features, out_features)
        rank = config.adapter_rank
        self.adapter_down = nn.Parameter(torch.empty(num_applications, rank, in_features)) if rank else None
        self.adapter_up = nn.Parameter(torch.empty(num_applications, out_features, rank)) if rank else None

    def forward(self, input: torch.Tensor, application: torch.Tensor | None = None) -> torch.Tensor:
        """`(batch_size, seq_length, in_features)` to `(batch_size, seq_length, out_features)`; `application` numbers
        the block's applications from 0, int64 `(1,)` or `(batch_size,)`, and `None` without adapters.
        """
        output = super().forward(input)
        if self.adapter_down is None or self.adapter_up is None:
            return output
        hidden = torch.matmul(input, self.adapter_down[application].mT)
        return output + torch.matmul(hidden, self.adapter_up[application].mT)


class RaptorAttention(nn.Module):
    """Multi-head self-attention; queries, keys and values come from one product (`qkv`, rows in that order)."""

    def __init__(self, config: RaptorConfig, num_applications: int) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        self.qkv = RaptorLinear(config, config.hidden_size, 3 * config.hidden_size, num_applications)
        self.proj = RaptorLinear(config, config.hidden_size, config.hidden_size, num_applications)

    def forward(
        self, hidden_states: torch.Tensor, application: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States `(batch_size, seq_length, hidden_size)` to an output of that shape and the weights, eager only."""
        batch_size, seq_length, hidden_size = hidden_states.shape
        qkv = self.qkv(hidden_states, application).view(batch_size, seq_length, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(self, query, key, value, None, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.proj(output.reshape(batch_size, seq_length, hidden_size), application), weights


class RaptorMLP(nn.Module):
    """`fc2(gelu(fc1(x)))`, the exact GELU, or SwiGLU, `fc2(silu(gate) * value)`: `fc1` holds gate, then value rows."""

    def __init__(self, config: RaptorConfig, num_applications: int) -> None:
        super().__init__()
        self.is_gated = config.mlp_type == "swiglu"
        width: Any = config.intermediate_size  # a number: the configuration has resolved the names
        self.fc1 = RaptorLinear(config, config.hidden_size, 2 * width if self.is_gated else width, num_applications)
        self.fc2 = RaptorLinear(config, width, config.hidden_size, num_applications)

    def forward(self, hidden_states: torch.Tensor, application: torch.Tensor | None = None) -> torch.Tensor:
        """States `(batch_size, seq_length, hidden_size)` to the same shape."""
        hidden = self.fc1(hidden_states, application)
        if self.is_gated:
            gate, value = hidden.chunk(2, dim=-1)
            return self.fc2(nn.functional.silu(gate) * value, application)
        return self.fc2(nn.functional.gelu(hidden), application)


class RaptorBlock(GradientCheckpointingLayer):
    """One weight-tied block: a pre-LayerNorm ViT layer with LayerScale and depth scales (arXiv 2512.19941, App. A).

    `x = x + s_attn * LS1(attn(LN1(x)))`, `x = x + s_mlp * LS2(mlp(LN2(x)))`, `out = s_out * x`: the last scale acts
    on the whole stream. Scales are computed in float32 (float64 in a float64 model). In a bfloat16 model a branch's
    scale is rounded as its LayerScale is, and of the stream's scale its difference from 1, since 1.0039 would be 1.

    Args:
        config: sizes and schedule.
        number: the block's number; its applications are the layers that the schedule gives it.
    """

    def __init__(self, config: RaptorConfig, number: int) -> None:
        super().__init__()
        schedule: Any = config.block_schedule
        self.layers = (
            [layer for layer, block in enumerate(schedule, 1) if block == number] if config.adapter_rank else []
        )
        applications = len(self.layers)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = RaptorAttention(config, applications)
        self.layer_scale1 = RaptorLayerScale(config)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = RaptorMLP(config, applications)
        self.layer_scale2 = RaptorLayerScale(config)
        self.depth_scale = DepthScale(config) if config.depth_scale else None

    def forward(self, hidden_states: torch.Tensor, depth: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """States of layer `depth - 1` to states of layer `depth`.

        Args:
            hidden_states: `(batch_size, seq_length, hidden_size)`.
            depth: layer number, float32 (float64 in a float64 model), `()` or, for teacher forcing, `(batch_size,)`.
        """
        scale1, scale2 = self.layer_scale1.scale, self.layer_scale2.scale
        scale_out = None
        if self.depth_scale is not None:
            scale_attention, scale_mlp, scale_out = self.depth_scale(depth)
            scale1, scale2 = scale1 * scale_attention, scale2 * scale_mlp  # one product with the branch instead of two
        application = self.application(depth)
        branch, _ = self.attention(self.norm1(hidden_states), application, **kwargs)
        hidden_states = _add_scaled(hidden_states, branch, scale1)
        hidden_states = _add_scaled(hidden_states, self.mlp(self.norm2(hidden_states), application), scale2)
        return hidden_states if scale_out is None else _scaled(hidden_states, scale_out)

    def application(self, depth: torch.Tensor) -> torch.Tensor | None:
        """Which of its own applications the block makes at `depth`, `()` or `(batch_size,)`: int64, counted from 0, of
        shape `(1,)` or `(batch_size,)`; `None` without adapters. At a layer of another block it is the nearest one.
        """
        if not self.layers:
            return None
        layers = torch.tensor(self.layers, dtype=depth.dtype, device=depth.device)
        return (depth.reshape(-1, 1) - layers).abs().argmin(dim=-1)


def _add_scaled(state: torch.Tensor, branch: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`state + branch * scale` in the dtype of `state`, in one pass where both have it; else (autocast) in float32."""
    if branch.dtype == state.dtype:
        return torch.addcmul(state, branch, scale.to(state.dtype))
    return (state + branch * scale).to(state.dtype)


def _scaled(state: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`state * scale` in the dtype of `state`; not the scale is rounded to it, but its difference from 1."""
    if scale.dtype == state.dtype:
        return state * scale
    return torch.addcmul(state, state, (scale - 1).to(state.dtype))


__all__ = ["RaptorBlock", "RaptorEmbeddings"]
