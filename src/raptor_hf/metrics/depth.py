"""Errors of depth maps, as an `evaluate.Metric` that works offline.

For maps that are already collected: evaluate stores every one of them. While maps are produced,
`raptor_hf.dense_metrics.DepthScores` does the same sums without storing anything.
"""

from typing import Any

import datasets
import evaluate
import torch

from raptor_hf.dense_metrics import DepthRange, DepthScores

_CITATION = (
    "Eigen et al., Depth Map Prediction from a Single Image using a Multi-Scale Deep Network, arXiv 1406.2283, 2014"
)
_DESCRIPTION = "RMSE, relative and logarithmic errors of predicted depths in metres, pooled and as means over images."
_INPUTS = """
Args:
    predictions (sequence of float maps): predicted depth of every pixel in metres, (height, width) each.
    references (sequence of float maps): labelled depth in metres; 0 and what is not finite is not scored.
    minimum, maximum (float): depths that are scored lie between them; predictions are clamped to them.
    crop (str): "eigen" (of 480 x 640 pixels, the default) or "none".
Returns:
    rmse, abs_rel, log10, silog, delta1, delta2, delta3 (float): over all pixels, and with "_per_image" their means over
        images.
    num_images, num_empty, num_pixels (int): images scored and left out for want of a valid pixel, pixels scored.
Raises:
    ValueError: if a prediction is not finite, a map's size differs from its label's, or nothing is left to score.
"""


class RaptorDepth(evaluate.Metric):
    """Errors of depth maps; use it as any `evaluate` metric, see `inputs_description`."""

    def _info(self) -> evaluate.MetricInfo:
        maps = datasets.Sequence(datasets.Sequence(datasets.Value("float64")))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": maps, "references": maps}),
        )

    def _compute(
        self,
        *,
        predictions: Any = None,
        references: Any = None,
        minimum: float = 1e-3,
        maximum: float = 10.0,
        crop: str = "eigen",
    ) -> dict[str, float | int]:
        scores = DepthScores(DepthRange(minimum, maximum, crop))
        for predicted, labelled in zip(predictions, references, strict=True):
            scores.update(*(torch.as_tensor(values, dtype=torch.float64) for values in (predicted, labelled)))
        return scores.compute()
