"""The evaluating half of a distillation: fidelity of the whole student, every image counted once on any number of
processes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .fidelity import Fidelity, FidelityAccumulator
from .saving import StudentSavingTrainer
from .teachers import Teacher


class FidelityTrainer(StudentSavingTrainer):
    """The evaluating half of [`RaptorDistillationTrainer`], whose `teacher` the student is compared with.

    Attributes:
        fidelity: [`Fidelity`] of the last evaluation.
    """

    teacher: Teacher
    fidelity: Fidelity | None = None
    _accumulator: FidelityAccumulator | None = None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """As the Trainer's, with the fidelity of the whole student run from state 0, in both stages.

        Adds `eval_r2` (mean over layers, all tokens), `eval_r2_last`, `eval_cosine` and per layer
        `eval_r2_layer_{l}`; the full [`Fidelity`] is kept in `self.fidelity`.
        """
        config = self.raptor.config
        self._accumulator = FidelityAccumulator(
            config.num_hidden_layers, self.teacher.layout, hidden_size=config.hidden_size
        )
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            self._accumulator.reduce(self._sum_over_processes)
            self.fidelity = fidelity = self._accumulator.compute()
        finally:
            self._accumulator = None
        cosine = fidelity.cosine["all"]
        metrics = {"r2": fidelity.mean_r2(), "r2_last": fidelity.last_r2(), "cosine": sum(cosine) / len(cosine)}
        metrics.update({f"r2_layer_{layer}": value for layer, value in enumerate(fidelity.r2["all"], start=1)})
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def prediction_step(
        self, model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """As the Trainer's, without the images that were repeated so that every process has a full batch.

        The Trainer drops what such images return, but a loss is a mean over its batch and a sum over states is ours.
        """
        size = len(next(iter(inputs.values())))
        count = self._num_own_images(size)
        own = {name: value[: max(1, count)] for name, value in inputs.items()}  # a batch without image has no mean
        accumulator = self._accumulator
        if count == 0:
            self._accumulator = None
        try:
            loss, logits, labels = super().prediction_step(model, own, prediction_loss_only, ignore_keys)
        finally:
            self._accumulator = accumulator
        return loss, _padded(logits, size), _padded(labels, size)

    def _num_own_images(self, size: int) -> int:
        """Images of this process's batch of `size` that no other batch of the evaluation holds."""
        state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(size, max(0, state.remainder - self.args.process_index * size))

    def _sum_over_processes(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over all processes; one whose images were all repeated ones adds 0."""
        if self.args.world_size == 1:
            return sums
        return self.accelerator.reduce(sums.to(self.accelerator.device), reduction="sum")


def _padded(value: Any, size: int) -> Any:
    """Tensor, or tuple of them, whose first axis is filled up to `size` with its last entry."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_padded(item, size) for item in value)
    if len(value) == size:
        return value
    return torch.cat([value, value[-1:].expand(size - len(value), *value.shape[1:])])
