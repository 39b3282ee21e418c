"""The parts of the paper's complexity claims for a teacher and its Raptors (arXiv 2512.19941, Def. 1, Claims 1, 2)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..complexity import block_recurrence_error, description_length, runtime_ratio
from ..interventions import Batch, Model
from ..interventions.runs import unpacked
from ..teachers import Teacher


def study_complexity(
    teacher: Teacher,
    models: Mapping[str, Model],
    batches: Iterable[Batch],
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    num_pairs: int = 9,
) -> dict[str, Any]:
    """Measures eps, description lengths and running time of models beside those of their teacher.

    Args:
        teacher (`Teacher`): what the models stand for.
        models (mapping of name to `RaptorModel`): of the teacher's layers, features and tokens.
        batches (`Iterable`): as for [`~raptor_hf.interventions.measure_swaps`]; iterated once per model, and the first
            for the running time.
        dtypes (`Sequence[str]`): precisions of [`~raptor_hf.complexity.description_length`].
        num_pairs (`int`): of [`~raptor_hf.complexity.runtime_ratio`]; 0 for no timing.

    Returns:
        `dict`: `"teacher"` with `"lengths"` by precision, and `"models"` by name, each with `"lengths"`, `"error"`,
        `"delta_flops"` (operations relative to the teacher's, less 1) and `"runtime"` or `None`; plain values for
        strict JSON.

    Raises:
        ValueError: as the functions it calls, or if there is no image.
    """
    pixel_values, _ = next(unpacked(batches, needs_labels=False))
    size = (pixel_values.shape[-2], pixel_values.shape[-1])
    own = {dtype: description_length(teacher, size, dtype).to_dict() for dtype in dtypes}
    records = {}
    for name, model in models.items():
        lengths = {dtype: description_length(model, size, dtype).to_dict() for dtype in dtypes}
        error = block_recurrence_error(teacher, model, batches)
        runtime = runtime_ratio(teacher, model, pixel_values, num_pairs) if num_pairs > 0 else None
        records[name] = {
            "lengths": lengths,
            "error": error.to_dict(),
            "delta_flops": lengths[dtypes[0]]["flops"] / own[dtypes[0]]["flops"] - 1,
            "runtime": runtime.to_dict() if runtime is not None else None,
        }
    return {"teacher": {"lengths": own}, "models": records}
