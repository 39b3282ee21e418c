"""Mean intersection over union of label maps, as an `evaluate.Metric` that works offline.

For maps that are already collected: evaluate stores every one of them. While maps are produced,
`raptor_hf.dense_metrics.SegmentationScores` does the same sums without storing anything.
"""

from typing import Any

import datasets
import evaluate
import torch

from raptor_hf.dense_metrics import SegmentationScores

_CITATION = ""
_DESCRIPTION = "Intersection over union of predicted and labelled classes, by class and as a mean."
_INPUTS = """
Args:
    predictions (sequence of integer maps): predicted class of every pixel, (height, width) each.
    references (sequence of integer maps): labelled class, of the same sizes.
    num_classes (int): number of classes.
    ignore_index (int): label of pixels that are not scored, 255 by default.
Returns:
    mean_iou (float): over the classes that are labelled or predicted.
    pixel_accuracy (float): share of the scored pixels.
    iou (list of float or None): by class, None where it is neither labelled nor predicted.
    num_images, num_pixels (int): images, and pixels scored.
Raises:
    ValueError: if a number is no class, a map's size differs from its label's, or nothing is left to score.
"""


class RaptorMeanIoU(evaluate.Metric):
    """Mean IoU of label maps; use it as any `evaluate` metric, see `inputs_description`."""

    def _info(self) -> evaluate.MetricInfo:
        maps = datasets.Sequence(datasets.Sequence(datasets.Value("int64")))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": maps, "references": maps}),
        )

    def _compute(
        self, *, predictions: Any = None, references: Any = None, num_classes: int = 0, ignore_index: int = 255
    ) -> dict[str, Any]:
        scores = SegmentationScores(num_classes, ignore_index)
        for predicted, labelled in zip(predictions, references, strict=True):
            scores.update(torch.as_tensor(predicted), torch.as_tensor(labelled))
        return scores.compute()
