"""What dense heads read and what they are taught by: features of patches, logits at the size of labels, bins of depth.

The heads of `modeling_raptor` and the probes share these functions, so a probe's weights mean the same in a model.
Copied to the Hub with every saved model: imports torch and flat siblings only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .tokens import TokenLayout

IGNORE_INDEX = 255
NO_BIN = -100
UPSAMPLING = 4  # of the grid of patches, before depths are read off
SILOG_WEIGHT = 0.85  # of the squared mean of the log error
_SILOG_EPSILON = 1e-3

Resize = Callable[[torch.Tensor, tuple[int, int]], torch.Tensor]


def resize(maps: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Maps `(batch_size, channels, rows, columns)` at `size` pixels, bilinear."""
    return nn.functional.interpolate(maps, size, mode="bilinear", align_corners=False)


def patch_features(hidden_states: torch.Tensor, layout: TokenLayout, grid: tuple[int, int]) -> torch.Tensor:
    """Patch tokens as a picture, `(batch_size, hidden_size, rows, columns)`: no cls token, no registers."""
    return layout.select(hidden_states, "patch").unflatten(1, grid).permute(0, 3, 1, 2)


def patch_and_cls_features(hidden_states: torch.Tensor, layout: TokenLayout, grid: tuple[int, int]) -> torch.Tensor:
    """Each patch with the cls token behind it, `(batch_size, 2 * hidden_size, rows, columns)`."""
    patches = patch_features(hidden_states, layout, grid)
    cls_token = layout.select(hidden_states, "cls").transpose(1, 2).unsqueeze(-1)
    return torch.cat([patches, cls_token.expand_as(patches)], dim=1)


def segmentation_loss(
    logits: torch.Tensor, labels: torch.Tensor, *, resize: Resize = resize, ignore_index: int = IGNORE_INDEX
) -> torch.Tensor:
    """Cross entropy of the logits at the labels' size, without pixels of label `ignore_index`; 0 if there is no other.

    Logits of 150 classes at 518 x 518 pixels are 160 MB an image: they are made image by image, and again for the
    gradient, so that no more than one image's are there at a time.

    Args:
        logits: floats `(batch_size, num_classes, rows, columns)`; the loss is float32 at least.
        labels: int64 `(batch_size, height, width)`.
        resize: brings maps to the labels' size.
        ignore_index: label of pixels that do not count.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    num_pixels = (labels != ignore_index).sum()
    if num_pixels == 0:
        return 0.0 * logits.sum()

    def error(own: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Sum over the pixels of one image."""
        resized = resize(own[None], (label.shape[0], label.shape[1]))
        return nn.functional.cross_entropy(resized, label[None], ignore_index=ignore_index, reduction="sum")

    sums = [checkpoint(error, own, label, use_reentrant=False) for own, label in zip(logits, labels, strict=True)]
    return torch.stack(sums).sum() / num_pixels


@dataclass(frozen=True)
class DepthBins:
    """Equal bins of a range of depths, whose classification a depth head learns (arXiv 2512.19941, App. A.4).

    Attributes:
        number: bins.
        minimum, maximum: the range in metres; a depth outside of it has no bin.
    """

    number: int = 256
    minimum: float = 1e-3
    maximum: float = 10.0

    def centres(self, device: torch.device | None = None) -> torch.Tensor:
        """Middles of the bins in metres, float32 `(number,)`."""
        width = (self.maximum - self.minimum) / self.number
        return self.minimum + width * (torch.arange(self.number, device=device) + 0.5)

    def numbers(self, depths: torch.Tensor) -> torch.Tensor:
        """Bin of each depth in metres, int64 `0 .. number - 1`; -100, which no loss counts, outside of the range."""
        inside = depths.isfinite() & (depths >= self.minimum) & (depths <= self.maximum)
        share = (torch.where(inside, depths, self.maximum) - self.minimum) / (self.maximum - self.minimum)
        return torch.where(inside, (share * self.number).long().clamp(0, self.number - 1), NO_BIN)

    def depths(self, logits: torch.Tensor) -> torch.Tensor:
        """Depth in metres `(batch_size, 1, 4 rows, 4 columns)` of logits `(batch_size, number, rows, columns)`: the
        bins' middles, weighted by the softmax of the logits, which are resized to four times the grid first (a linear
        head commutes with it).
        """
        weights = _upsampled(logits).softmax(dim=1)
        return torch.einsum("bkhw,k->bhw", weights, self.centres(logits.device)).unsqueeze(1)


def depth_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    bins: DepthBins,
    *,
    resize: Resize = resize,
    pad: Callable[[torch.Tensor], torch.Tensor] | None = None,
    silog_root: bool = True,
) -> torch.Tensor:
    """`10 * SILog + CE`: scale-invariant error (weight 0.85 of the mean) of the depths, and cross entropy of the bins
    with labels of the grid's size, nearest; pixels without a depth in the range are in neither. 0 if all are.

    Args:
        logits: floats `(batch_size, number of bins, rows, columns)`; the loss is float32 at least.
        labels: metres `(batch_size, height, width)`.
        bins: what the logits classify.
        resize: brings maps to the labels' size.
        pad: brings labels to the shape of what the backbone saw, with 0 around; by default they have it.
        silog_root: whether the scale-invariant error is a root, as AdaBins defines it; the research code takes none.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = bins.numbers(labels) != NO_BIN
    if not valid.any():
        return 0.0 * logits.sum()
    predicted = resize(bins.depths(logits), (labels.shape[1], labels.shape[2])).squeeze(1)
    error = (predicted[valid] + _SILOG_EPSILON).log() - (labels[valid] + _SILOG_EPSILON).log()
    silog = error.square().mean() - SILOG_WEIGHT * error.mean().square()
    if silog_root:
        silog = silog.clamp(min=1e-12).sqrt()  # the root of 0 has no gradient
    fine = _upsampled(logits)
    padded = (labels if pad is None else pad(labels)).unsqueeze(1)
    nearest = nn.functional.interpolate(padded, (fine.shape[2], fine.shape[3]), mode="nearest-exact")
    targets = bins.numbers(nearest).squeeze(1)
    if not (targets != NO_BIN).any():
        return 10 * silog
    return 10 * silog + nn.functional.cross_entropy(fine, targets, ignore_index=NO_BIN)


def _upsampled(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.interpolate(logits, scale_factor=UPSAMPLING, mode="bilinear", align_corners=False)
