"""Metrics of dense predictions as streaming sums: mean intersection over union, and errors of depth maps.

Sums are float64 or int64, so that a set of images can be split over batches and processes in any way: `state()` and
`load_state()` exchange them, and the result is that of one pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

EIGEN_CROP = (slice(45, 471), slice(41, 601))  # rows and columns of a 480 x 640 picture (Eigen et al., arXiv 1406.2283)
EIGEN_SIZE = (480, 640)
CROPS = ("none", "eigen")
DEPTH_METRICS = ("rmse", "abs_rel", "log10", "silog", "delta1", "delta2", "delta3")


class SegmentationScores:
    """Confusion matrix of a segmentation, and what follows from it.

    A pixel whose label is `ignore_index` never counts, whatever was predicted there. A class that is in neither labels
    nor predictions has no IoU (`None`) and is left out of the mean; one that is only predicted has IoU 0.

    Args:
        num_classes: classes, numbered from 0.
        ignore_index: label of pixels that are not scored; outside of the classes.

    Attributes:
        confusion: int64 `(num_classes, num_classes)`, labels by predictions.
        num_images: images scored.

    Raises:
        ValueError: if there is no class, or `ignore_index` is one.
    """

    def __init__(self, num_classes: int, ignore_index: int = 255) -> None:
        if num_classes < 1 or 0 <= ignore_index < num_classes:
            raise ValueError(
                f"num_classes={num_classes}, ignore_index={ignore_index}: give at least one class, and an index to "
                f"ignore outside of 0 .. {num_classes - 1}."
            )
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.num_images = 0

    def update(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Adds images.

        Args:
            predictions, references: integers `(batch_size, height, width)`, or of one image without the first axis.

        Raises:
            ValueError: if the shapes differ, or a number is no class.
        """
        predicted, labelled = (_batched(values).cpu() for values in (predictions, references))
        if predicted.shape != labelled.shape:
            raise ValueError(
                f"predictions of shape {tuple(predicted.shape)} for labels of {tuple(labelled.shape)}; resize the "
                "logits to the labels' size."
            )
        self.num_images += len(labelled)
        scored = labelled != self.ignore_index
        predicted, labelled = predicted[scored].long(), labelled[scored].long()
        for name, values in (("labels", labelled), ("predictions", predicted)):
            wrong = values[(values < 0) | (values >= self.num_classes)]
            if wrong.numel():
                raise ValueError(
                    f"{name} hold {wrong[0].item()}, which is none of the classes 0 .. {self.num_classes - 1} (and "
                    f"labels of {self.ignore_index} are ignored); labels may have to be mapped first."
                )
        counts = torch.bincount(labelled * self.num_classes + predicted, minlength=self.num_classes**2)
        self.confusion += counts.view(self.num_classes, self.num_classes)

    def state(self) -> torch.Tensor:
        """The sums as one int64 vector, which may be added up over processes."""
        return torch.cat([self.confusion.flatten(), torch.tensor([self.num_images])])

    def load_state(self, state: torch.Tensor) -> None:
        """Takes sums, such as those of all processes, in place of its own."""
        self.confusion, self.num_images = state[:-1].reshape_as(self.confusion).cpu(), int(state[-1])

    def compute(self) -> dict[str, Any]:
        """`mean_iou`, `pixel_accuracy` and `iou` by class, `None` where a class is absent; `num_images`, `num_pixels`.

        Raises:
            ValueError: if no pixel was scored.
        """
        total = int(self.confusion.sum())
        if total == 0:
            raise ValueError(f"none of {self.num_images} images has a pixel to score; check labels and ignore_index.")
        hits = self.confusion.diagonal().double()
        union = self.confusion.sum(0) + self.confusion.sum(1) - self.confusion.diagonal()
        iou = hits / union  # 0 / 0 of an absent class is NaN
        return {
            "mean_iou": float(iou[union > 0].mean()),
            "pixel_accuracy": float(hits.sum() / total),
            "iou": [float(value) if size else None for value, size in zip(iou, union.tolist(), strict=True)],
            "num_images": self.num_images,
            "num_pixels": total,
        }


@dataclass(frozen=True)
class DepthRange:
    """Which pixels of a depth map are scored: finite labels with `minimum < depth < maximum` metres, within `crop`.

    Attributes:
        minimum, maximum: metres; predictions are clamped to them.
        crop: `"eigen"` scores rows 45 .. 470 and columns 41 .. 600 of 480 x 640 pixels, `"none"` all.

    Raises:
        ValueError: if the range is empty or not positive, or the crop unknown.
    """

    minimum: float = 1e-3
    maximum: float = 10.0
    crop: str = "eigen"

    def __post_init__(self) -> None:
        if not 0 < self.minimum < self.maximum:
            raise ValueError(f"minimum={self.minimum}, maximum={self.maximum}: give 0 < minimum < maximum, in metres.")
        if self.crop not in CROPS:
            raise ValueError(f"crop={self.crop!r} is unknown; use one of {', '.join(CROPS)}.")

    def mask(self, references: torch.Tensor) -> torch.Tensor:
        """Boolean mask of labels `(..., height, width)` in metres.

        Raises:
            ValueError: if the Eigen crop is asked of another size than 480 x 640.
        """
        mask = references.isfinite() & (references > self.minimum) & (references < self.maximum)
        if self.crop == "none":
            return mask
        if tuple(references.shape[-2:]) != EIGEN_SIZE:
            height, width = references.shape[-2:]
            raise ValueError(
                f"the Eigen crop is defined for 480 x 640 pixels, not for {height} x {width}; keep the labels' native "
                "size, or take crop='none'."
            )
        inside = torch.zeros_like(mask)
        inside[..., EIGEN_CROP[0], EIGEN_CROP[1]] = True
        return mask & inside


class DepthScores:
    """Errors of depth maps in metres, each in two kinds: pooled over all pixels, and the mean of the images' values.

    With prediction `p` and label `d` of a pixel, `e = ln p - ln d`: `rmse` is the root of the mean of `(p - d)^2`,
    `abs_rel` the mean of `|p - d| / d`, `log10` that of `|log10 p - log10 d|`, `silog` 100 times the standard deviation
    of `e`, `delta1`, `2`, `3` the shares of pixels with `max(p / d, d / p) < 1.25`, `1.25^2`, `1.25^3`. The pooled RMSE
    is that of the research code of arXiv 2512.19941, the mean over images is usual elsewhere.

    Args:
        valid: which pixels are scored.

    Attributes:
        num_images, num_empty: images with a pixel to score, and without one, which count for nothing.

    Raises:
        ValueError: as [`DepthRange`].
    """

    def __init__(self, valid: DepthRange | None = None) -> None:
        self.valid = valid or DepthRange()
        self.num_images = self.num_empty = 0
        self._pooled = torch.zeros(9, dtype=torch.float64)
        self._images = torch.zeros(len(DEPTH_METRICS), dtype=torch.float64)

    def update(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Adds depth maps `(batch_size, height, width)` in metres, or one without the first axis.

        Raises:
            ValueError: if the shapes differ, or a prediction is not finite.
        """
        predicted, labelled = (_batched(values).cpu().double() for values in (predictions, references))
        if predicted.shape != labelled.shape:
            raise ValueError(
                f"predictions of shape {tuple(predicted.shape)} for labels of {tuple(labelled.shape)}; resize the "
                "predictions to the labels' native size."
            )
        if not predicted.isfinite().all():
            raise ValueError("a predicted depth is not a finite number; the head or its input has overflowed.")
        masks = self.valid.mask(labelled)
        for prediction, label, mask in zip(predicted, labelled, masks, strict=True):
            if not mask.any():
                self.num_empty += 1
                continue
            sums = _depth_sums(prediction[mask].clamp(self.valid.minimum, self.valid.maximum), label[mask])
            self._pooled += sums
            self._images += _depth_values(sums)
            self.num_images += 1

    def state(self) -> torch.Tensor:
        """The sums as one float64 vector, which may be added up over processes."""
        counts = torch.tensor([self.num_images, self.num_empty], dtype=torch.float64)
        return torch.cat([self._pooled, self._images, counts])

    def load_state(self, state: torch.Tensor) -> None:
        """Takes sums, such as those of all processes, in place of its own."""
        parts = state.cpu().split([len(self._pooled), len(self._images), 2])
        self._pooled, self._images = parts[0], parts[1]
        self.num_images, self.num_empty = (int(count) for count in parts[2])

    def compute(self) -> dict[str, float | int]:
        """Every metric pooled, under its name, and as a mean over images, with `_per_image`; `num_images`,
        `num_empty`, `num_pixels`.

        Raises:
            ValueError: if no pixel was scored.
        """
        if self.num_images == 0:
            raise ValueError(
                f"none of {self.num_empty} images has a depth between {self.valid.minimum} and {self.valid.maximum} m "
                "to score; check the labels' unit, metres."
            )
        pooled, images = _depth_values(self._pooled).tolist(), (self._images / self.num_images).tolist()
        per_image = (f"{name}_per_image" for name in DEPTH_METRICS)
        return {
            **dict(zip(DEPTH_METRICS, pooled, strict=True)),
            **dict(zip(per_image, images, strict=True)),
            "num_images": self.num_images,
            "num_empty": self.num_empty,
            "num_pixels": int(self._pooled[0]),
        }


def map_labels(labels: torch.Tensor, mapping: Sequence[int]) -> torch.Tensor:
    """Labels under other numbers, all at once and on a copy: `mapping[old]` is the new one.

    Args:
        labels: integers `>= 0` of any shape.
        mapping: the new number of `0, 1, ...`.

    Raises:
        ValueError: if a label has no new number.
    """
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < len(mapping):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise ValueError(f"label {int(wrong)} is outside of the mapping of 0 .. {len(mapping) - 1}.")
    return torch.as_tensor(mapping, dtype=torch.int64)[labels.long()]


def _batched(values: torch.Tensor) -> torch.Tensor:
    if values.ndim not in (2, 3):
        raise ValueError(f"maps of shape {tuple(values.shape)}; give (height, width) or (batch_size, height, width).")
    return values if values.ndim == 3 else values[None]


def _depth_sums(predicted: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
    """Pixels, and sums of squared error, relative error, |log10|, e, e^2, and the three deltas."""
    difference, log = predicted - labelled, predicted.log() - labelled.log()
    ratio = log.abs()
    sums = [
        difference.square(), difference.abs() / labelled, ratio / math.log(10), log, log.square(),
        *(ratio < power * math.log(1.25) for power in (1, 2, 3)),
    ]  # fmt: skip
    return torch.stack(
        [torch.tensor(float(len(labelled)), dtype=torch.float64), *(part.sum().double() for part in sums)]
    )


def _depth_values(sums: torch.Tensor) -> torch.Tensor:
    """The metrics, in the order of `DEPTH_METRICS`."""
    square, relative, log10, log, log_square, *deltas = sums[1:] / sums[0]
    variance = (log_square - log.square()).clamp(min=0)
    return torch.stack([square.sqrt(), relative, log10, 100 * variance.sqrt(), *deltas])
