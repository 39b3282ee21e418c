"""Pairs of image and label for dense probes: cropped, flipped, resized and padded together, in one place.

An image is resized to one size (bicubic), its label by the nearest neighbour; the image is then normalised and padded
around to a multiple of the patch, its label is not. [`Frame`] brings what a head makes of the padded grid to labels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import nn

from .data import random_crop_box
from .dense_data import DenseDataset

AUGMENTATIONS = ("none", "crop_flip", "crop_flip_jitter")
ALIGNMENTS = ("padding", "paper")


@dataclass(frozen=True)
class Frame:
    """Where an image of `size` lies in what the backbone sees.

    Attributes:
        size: height and width of the image before it is padded.
        patch_size: the padded sides are multiples of it.
        align: `"padding"` cuts the padding off a prediction; `"paper"` stretches the padded grid over the label, as the
            research code does, up to 5 pixels off.

    Raises:
        ValueError: if a size is not positive or the alignment unknown.
    """

    size: tuple[int, int]
    patch_size: int
    align: str = "padding"

    def __post_init__(self) -> None:
        if min(*self.size, self.patch_size) < 1:
            raise ValueError(f"image_size={self.size}, patch_size={self.patch_size}: all must be positive.")
        if self.align not in ALIGNMENTS:
            raise ValueError(f"align={self.align!r} is unknown; use one of {', '.join(ALIGNMENTS)}.")

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width with the padding."""
        height, width = (-(-side // self.patch_size) * self.patch_size for side in self.size)
        return height, width

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = (side // self.patch_size for side in self.padded)
        return height, width

    @property
    def offset(self) -> tuple[int, int]:
        """Row and column of the image's first pixel."""
        top, left = ((whole - side) // 2 for whole, side in zip(self.padded, self.size, strict=True))
        return top, left

    def pad(self, values: torch.Tensor, value: float) -> torch.Tensor:
        """`(..., height, width)` of `size` to that of `padded`, with `value` around."""
        (top, left), (height, width) = self.offset, self.padded
        bottom, right = height - top - self.size[0], width - left - self.size[1]
        return nn.functional.pad(values, (left, right, top, bottom), value=value)

    def to_labels(self, maps: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Maps `(batch_size, channels, rows, columns)` of the padded image to labels of `size`, bilinear."""
        if self.align == "padding" and self.padded != self.size:
            top, left = self.offset
            maps = _resize(maps, self.padded)[..., top : top + self.size[0], left : left + self.size[1]]
        return _resize(maps, size)


class DensePixels(torch.utils.data.Dataset):
    """Pairs as `{"pixel_values": float (3, padded height, padded width), "label": (height, width)}`.

    Labels are int64 classes or float32 metres; of `frame.size` where there is augmentation or `resize_labels`, else of
    their own. Augmentation is drawn from (seed, epoch, index) alone, whatever the workers and the order.

    Args:
        pairs: what is shown.
        processor: the backbone's image processor, which rescales and normalises.
        frame: size and padding.
        augment: `"none"`, `"crop_flip"` (a random part of the image and a flip), `"crop_flip_jitter"` (brightness,
            contrast and saturation by a fifth and hue by a tenth, too).
        scale: share of the area that a crop keeps; what would exceed the image is drawn again.
        keep_ratio: whether a crop has the ratio of the image, else one in 3/4 .. 4/3.
        resize_labels: see above.
        seed: of the augmentation.

    Raises:
        ValueError: if the augmentation is unknown or the scale not within 0 and 2.
    """

    def __init__(
        self, pairs: DenseDataset, processor: Any, frame: Frame, *, augment: str = "none",
        scale: tuple[float, float] = (0.5, 1.0), keep_ratio: bool = False, resize_labels: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        if augment not in AUGMENTATIONS or not 0 < scale[0] <= min(scale[1], 1) or scale[1] > 2:
            rule = f"use augment {', '.join(AUGMENTATIONS)} and 0 < scale[0] <= 1, scale[0] <= scale[1] <= 2"
            raise ValueError(f"augment={augment!r}, scale={scale}: {rule}.")
        self.pairs, self.processor, self.frame, self.augment = pairs, processor, frame, augment
        self.scale, self.keep_ratio, self.resize_labels, self.seed = scale, keep_ratio, resize_labels, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the augmentation of `epoch`."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pair = self.pairs[index]
        image, label, size = pair["image"], Image.fromarray(pair["label"]), self.frame.size[::-1]
        box, flip = (0, 0, *image.size), False
        if self.augment != "none":
            rng = np.random.default_rng([self.seed, int(self._epoch), range(len(self))[index]])
            box, flip = self._box(image.size, rng), rng.random() < 0.5
            if self.augment == "crop_flip_jitter":
                image = jitter(image, rng)
        image = image.resize(size, Image.Resampling.BICUBIC, box)
        if self.augment != "none" or self.resize_labels:
            label = label.resize(size, Image.Resampling.NEAREST, box)
        if flip:
            image, label = (picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for picture in (image, label))
        options = {"do_resize": False, "do_center_crop": False, "return_tensors": "pt"}
        pixels = self.frame.pad(self.processor(image, **options)["pixel_values"][0], 0.0)
        values = torch.from_numpy(np.array(label))
        return {"pixel_values": pixels, "label": values if values.is_floating_point() else values.long()}

    def _box(self, size: tuple[int, int], rng: np.random.Generator) -> tuple[int, ...]:
        if not self.keep_ratio:
            return random_crop_box(size, rng, (self.scale[0], min(self.scale[1], 1.0)))
        area = rng.uniform(self.scale[0], min(self.scale[1], 1.0))
        width, height = (max(1, round(side * area**0.5)) for side in size)
        left, top = int(rng.integers(size[0] - width + 1)), int(rng.integers(size[1] - height + 1))
        return left, top, left + width, top + height


def jitter(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Image with brightness, contrast and saturation times 0.8 .. 1.2, hue turned by up to a tenth of a circle."""
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(rng.uniform(0.8, 1.2))
    hsv = np.array(image.convert("HSV"))
    hsv[..., 0] += np.uint8(round(rng.uniform(-0.1, 0.1) * 256) % 256)  # on a circle of 256
    return Image.fromarray(hsv, "HSV").convert("RGB")


def collate_dense(batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Items of [`DensePixels`] as `pixel_values (batch_size, 3, height, width)` and a list of `labels`, whose sizes may
    differ.
    """
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in batch]),
        "labels": [item["label"] for item in batch],
    }


def _resize(maps: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if tuple(maps.shape[-2:]) == tuple(size):
        return maps
    return nn.functional.interpolate(maps, tuple(size), mode="bilinear", align_corners=False)
