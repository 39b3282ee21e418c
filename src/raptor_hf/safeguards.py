"""How a training run stops when it cannot go on: with a message, and with everything that was saved still good.

A loss that is no number, a disk without space and SIGTERM end a run here; the same command goes on afterwards from the
last complete checkpoint.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from .checkpoints import last_complete_checkpoint

SIGTERM_EXIT = 128 + signal.SIGTERM


class TrainingStopped(RuntimeError):
    """A run that cannot go on, though its input was right. The message says what is saved and how to go on."""


class FiniteLoss:
    """Notices a loss that is not finite without waiting for the device at every step.

    [`FiniteLoss.update`] only adds to a counter on the device; [`FiniteLoss.is_broken`] reads it, where the Trainer
    reads numbers anyhow: when it logs and when it saves.
    """

    def __init__(self) -> None:
        self._count: torch.Tensor | None = None

    def update(self, loss: torch.Tensor) -> None:
        """Counts a scalar loss."""
        broken = (~torch.isfinite(loss.detach())).float()
        self._count = broken if self._count is None else self._count + broken

    def is_broken(self, reduce: Any, parameters: Any = ()) -> bool:
        """Whether any loss so far, or any of `parameters`, is not finite on any process.

        Args:
            reduce: sums a tensor over the processes, as `accelerator.reduce(tensor, "sum")`.
            parameters: tensors that are looked at too.
        """
        count = self._count
        for parameter in parameters:
            own = parameter.detach()
            own = own.to_local() if hasattr(own, "to_local") else own  # FSDP2's part of this process
            broken = (~torch.isfinite(own)).sum().float()
            count = broken if count is None else count + broken
        return count is not None and float(reduce(count)) > 0


def broken_loss(output_dir: str | Path, step: int, world_size: int = 1) -> TrainingStopped:
    """What to raise when the loss or the weights are not finite at `step` of the run in `output_dir`."""
    return TrainingStopped(
        f"the loss or a weight is not a finite number any more at step {step}; nothing was saved since. "
        f"{_what_is_left(output_dir, world_size)} Lower learning_rate, set max_grad_norm, or train without bf16; "
        "an image that holds NaN does it too."
    )


@contextlib.contextmanager
def saving(output_dir: str | Path, step: int, world_size: int = 1) -> Iterator[None]:
    """Turns what a full disk or a quota makes of a save into one message.

    Raises:
        TrainingStopped: if writing fails inside the block.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, TrainingStopped):
            raise
        why = " ".join(str(error).split())[:300]
        raise TrainingStopped(
            f"what was to be saved at step {step} could not be written: {why}. "
            f"{_what_is_left(output_dir, world_size)} Make room and run the same command again."
        ) from error


class StopOnSigterm(TrainerCallback):
    """SIGTERM, as a scheduler sends it before it kills, saves a checkpoint after the running step and ends the run.

    In one process only: several get the signal at different steps, and would wait for each other; there SIGTERM ends
    the run at once and the last checkpoint is gone on with.

    Attributes:
        received: whether the signal came.
    """

    received = False
    _previous: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Listens from here on."""
        if args.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: Any) -> None:
        self.received = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for a checkpoint and for the end."""
        if self.received:
            control.should_save = control.should_training_stop = True

    def release(self) -> None:
        """Gives the signal back to who had it before."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


def _what_is_left(output_dir: str | Path, world_size: int) -> str:
    folder = last_complete_checkpoint(output_dir, world_size, clean=False)
    if folder is None:
        return "There is no complete checkpoint of this stage yet."
    return f"The last good checkpoint is {Path(folder).name}."
