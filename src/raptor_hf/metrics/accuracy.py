"""Top-1 accuracy of class ids, as an `evaluate.Metric` that works offline.

Own code rather than `evaluate.load("accuracy")`, which fetches its script from the Hub. The file stands alone, so
that `evaluate.load(path)` can copy it elsewhere.
"""

from typing import Any

import datasets
import evaluate
import numpy as np

_CITATION = ""
_DESCRIPTION = "Share of images whose predicted class is the labelled one (top-1 accuracy)."
_INPUTS = """
Args:
    predictions (sequence of int): predicted class ids, for example `logits.argmax(-1)`.
    references (sequence of int): labelled class ids.
    ignore_label (int, *optional*): references with this value have no label and are left out, for example -1.
Returns:
    accuracy (float): in 0..1.
    num_samples (int): images given.
    n_scored (int): images the accuracy is a mean over: those given less those with `ignore_label`.
Raises:
    ValueError: if an id is no integer, or nothing is left to score.
"""


class RaptorAccuracy(evaluate.Metric):
    """Top-1 accuracy and how many images are behind it; use it as any `evaluate` metric, see `inputs_description`."""

    def _info(self) -> evaluate.MetricInfo:
        # float64 holds every id; an integer feature would cut a probability of 0.9 to class 0 in silence
        ids = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(
        self, *, predictions: Any = None, references: Any = None, ignore_label: int | None = None
    ) -> dict[str, float | int]:
        predicted, labelled = np.asarray(predictions, dtype=float), np.asarray(references, dtype=float)
        for name, ids in (("predictions", predicted), ("references", labelled)):
            wrong = ids[ids != np.floor(ids)]
            if wrong.size:
                raise ValueError(f"{name} hold {wrong[0]}, which is no class id; pass logits.argmax(-1), not scores.")
        scored = labelled != ignore_label if ignore_label is not None else np.ones(len(labelled), dtype=bool)
        if not scored.any():
            raise ValueError(
                f"none of {len(labelled)} images has a label to score (ignore_label={ignore_label}); check the labels."
            )
        accuracy = float((predicted == labelled)[scored].mean())
        return {"accuracy": accuracy, "num_samples": len(labelled), "n_scored": int(scored.sum())}
