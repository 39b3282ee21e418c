"""Where the tokens of a Vision Transformer sit, and how layers and states are counted.

This module is the only owner of token positions and of the patch grid: nothing else in the package slices a sequence
by number. It is copied to the Hub with the model, so it imports nothing but torch.

Vocabulary, used everywhere in the package
    batch_size      images in a batch
    seq_length      ``1 + num_register_tokens + num_patches`` tokens of an image, in the order cls, registers, patches
                    (without the 1 in a ViT that has no cls token, such as SigLIP or I-JEPA)
    hidden_size     features of a token
    num_layers      ``L``, the number of layers; layers are counted ``1..L``
    state ``l``     output of layer ``l`` **before** the final LayerNorm; state 0 is the embedding output, so a
                    model has ``L + 1`` states, each of shape ``(batch_size, seq_length, hidden_size)``
    block ``j``     one of the ``k`` weight-tied blocks, numbered from 0; layer ``l`` is made by block
                    ``block_schedule[l - 1]``
    segment         a run of consecutive layers that use the same block; it starts at state ``start_layer`` and ends at
                    state ``end_layer``, ``0 <= start_layer < end_layer <= L``
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

TOKEN_GROUPS = ("cls", "registers", "patch")


class Segment(NamedTuple):
    """A run of layers made by one block: it takes state `start_layer` to state `end_layer`."""

    block: int
    start_layer: int
    end_layer: int

    @property
    def num_layers(self) -> int:
        """Applications of the block in this run."""
        return self.end_layer - self.start_layer


def schedule_segments(block_schedule: Sequence[int]) -> list[Segment]:
    """Runs of equal entries of a block schedule, in order: `[0, 0, 1]` gives `(0, 0, 2), (1, 2, 3)`."""
    segments: list[Segment] = []
    for layer, block in enumerate(block_schedule, start=1):
        if segments and segments[-1].block == block:
            segments[-1] = segments[-1]._replace(end_layer=layer)
        else:
            segments.append(Segment(block, layer - 1, layer))
    return segments


@dataclass(frozen=True)
class TokenLayout:
    """Positions of the cls token, the registers and the patches in a sequence.

    Attributes:
        num_register_tokens (`int`): registers between the cls token and the patches, 0 or more.
        has_cls_token (`bool`): whether the sequence begins with a cls token.

    Raises:
        ValueError: if `num_register_tokens` is negative.
    """

    num_register_tokens: int = 0
    has_cls_token: bool = True

    def __post_init__(self) -> None:
        if self.num_register_tokens < 0:
            raise ValueError(
                f"num_register_tokens={self.num_register_tokens} is negative; use 0 for a ViT without registers."
            )

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the token groups that exist, in their order: what a model lacks is absent."""
        sizes = {"cls": int(self.has_cls_token), "registers": self.num_register_tokens, "patch": 1}
        return tuple(name for name in TOKEN_GROUPS if sizes[name] > 0)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: the cls token and the registers."""
        return int(self.has_cls_token) + self.num_register_tokens

    def span(self, group: str) -> slice:
        """Slice of the sequence dimension that holds `group` (`"cls"`, `"registers"`, `"patch"` or `"all"`).

        Raises:
            ValueError: if `group` is unknown, or the model has none of it.
        """
        slices = {
            "all": slice(None),
            "cls": slice(0, 1),
            "registers": slice(int(self.has_cls_token), self.num_prefix_tokens),
            "patch": slice(self.num_prefix_tokens, None),
        }
        if group not in slices:
            raise ValueError(f"tokens={group!r} is not a token group; use one of {', '.join(map(repr, slices))}.")
        if group not in ("all", *self.groups):
            missing = {"cls": "a cls token", "registers": "register tokens"}[group]
            others = ", ".join(map(repr, self.groups))
            raise ValueError(f"tokens={group!r} asked of a model without {missing}; use {others} or 'all'.")
        return slices[group]

    def select(self, hidden_states: torch.Tensor, group: str) -> torch.Tensor:
        """Tokens of `group` from states of shape `(..., seq_length, hidden_size)`, as a view.

        Raises:
            ValueError: as [`TokenLayout.span`].
        """
        return hidden_states[..., self.span(group), :]

    def pool(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Image feature `[cls, mean patch]` of App. A.4, no registers: `(..., seq_length, D)` to `(..., 2 * D)`; the
        mean patch alone, `(..., D)`, of a model without a cls token.
        """
        mean_patch = self.select(hidden_states, "patch").mean(dim=-2)
        if not self.has_cls_token:
            return mean_patch
        return torch.cat([self.select(hidden_states, "cls").squeeze(-2), mean_patch], dim=-1)


def patch_grid(height: int, width: int, patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches of a `height x width` image, in pixels.

    Raises:
        ValueError: if a side is smaller than the patch or no multiple of it.
    """
    if height < patch_size or width < patch_size or height % patch_size or width % patch_size:
        nearest = f"{_nearest(height, patch_size)} x {_nearest(width, patch_size)}"
        raise ValueError(
            f"image of {height} x {width} pixels: both sides must be multiples of the patch size {patch_size} and at "
            f"least one patch; resize or crop it, for example to {nearest}."
        )
    return height // patch_size, width // patch_size


def _nearest(side: int, patch_size: int) -> int:
    return max(patch_size, patch_size * round(side / patch_size))
