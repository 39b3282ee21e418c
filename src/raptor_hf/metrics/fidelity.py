"""R2 and cosine between two sets of token vectors, as an `evaluate.Metric` that works offline.

For vectors that are already collected, such as pooled features of a small set: evaluate stores every one of them. While
states are produced, `raptor_hf.fidelity.FidelityAccumulator` does the same sums without storing anything.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
import torch

from raptor_hf.fidelity import cosine_from_sums, r2_from_sums, token_sums

_CITATION = "Jacobs et al., Block-Recurrent Dynamics in Vision Transformers, arXiv 2512.19941, 2025"
_DESCRIPTION = "Coefficient of determination and mean cosine of student token vectors against the teacher's."
_INPUTS = """
Args:
    predictions (sequence of float vectors): the student's tokens, (num_tokens, hidden_size).
    references (sequence of float vectors): the teacher's, in the same order.
    definition (str): which R2, one of `raptor_hf.fidelity.R2_DEFINITIONS`, "variance_weighted" by default.
Returns:
    r2 (float or None): at most 1; None where it has no value, as for a single token.
    cosine (float or None): mean over the tokens.
    n_scored (int): number of tokens.
Raises:
    ValueError: if the vectors differ in length, there is none, or the definition is unknown.
"""


class RaptorFidelity(evaluate.Metric):
    """R2 and cosine of token vectors; use it as any `evaluate` metric, see `inputs_description`."""

    def _info(self) -> evaluate.MetricInfo:
        vectors = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": vectors, "references": vectors}),
        )

    def _compute(
        self, *, predictions: Any = None, references: Any = None, definition: str = "variance_weighted"
    ) -> dict[str, float | int | None]:
        sizes = {len(vector) for vector in [*predictions, *references]}
        if len(sizes) != 1:
            raise ValueError(f"vectors of {sorted(sizes)} features; pass one or more, all of one length.")
        student, teacher = (
            torch.from_numpy(np.asarray(vectors, dtype=np.float64)).unsqueeze(1)
            for vectors in (predictions, references)
        )
        sums = token_sums(student, teacher, with_ols=definition == "ols")
        r2, cosine = r2_from_sums(sums, definition), cosine_from_sums(sums)
        return {"r2": _number(r2), "cosine": _number(cosine), "n_scored": len(student)}


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
