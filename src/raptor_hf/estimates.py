"""What a distillation will take, before it is run: steps, time, memory, disk.

What can be measured is measured: a step of each stage is made by the real trainer, of a few random images, and scaled
to the batch. Of the weights only the sizes matter, so that [`Teacher.untrained`] serves as the teacher.
"""

import contextlib
import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .activations import STATES
from .arguments import DistillationArguments
from .modeling_raptor import RaptorModel
from .teachers import Teacher
from .trainer import RaptorDistillationTrainer

_REPEATS = 3  # timed after one that is not
_TIMED_IMAGES = {"cpu": 2, "cuda": 16}  # in a step that is timed; other devices as the CPU
_LAST_STEP = 10**9  # of a run whose teacher forcing has ended


@dataclass(frozen=True)
class StageEstimate:
    """What one stage takes; sizes in bytes, times in seconds on this machine.

    Attributes:
        stage: `"blocks"` or `"end_to_end"`.
        steps: optimiser steps.
        images: images shown, by all processes together.
        seconds_per_step: teacher, forward, backward and optimiser, as the stage's mean; reading images comes beside it.
        memory: of one process: weights, gradients, optimiser, the teacher, its states, and what the backward pass
            needs. The allocator's own overhead and the data loader are not in it.
        disk: checkpoints that lie side by side while the last one is written, and the stage's model.
    """

    stage: str
    steps: int
    images: int
    seconds_per_step: float
    memory: int
    disk: int

    @property
    def seconds(self) -> float:
        """Of the whole stage."""
        return self.steps * self.seconds_per_step


def num_steps(args: DistillationArguments, num_images: int | None) -> int:
    """Optimiser steps of a stage over `num_images`, as the Trainer counts them.

    Raises:
        ValueError: if there is neither a number of images nor of steps, or less than one batch of images.
    """
    if args.max_steps > 0:
        return args.max_steps
    if num_images is None:
        raise ValueError("the number of images is not known; give the number of steps (--max_steps).")
    batch = (args.per_device_train_batch_size or 1) * args.world_size
    batches = num_images // batch if args.dataloader_drop_last else math.ceil(num_images / batch)
    if batches == 0:
        raise ValueError(
            f"{num_images} training images are fewer than one batch of {batch}; lower per_device_train_batch_size."
        )
    return math.ceil((args.num_train_epochs or 1) * math.ceil(batches / args.gradient_accumulation_steps))


def estimate_stages(
    teacher: Teacher,
    student: RaptorModel,
    args: DistillationArguments,
    *,
    num_images: int | None,
    image_size: tuple[int, int],
    blocks: Sequence[int] | None = None,
    cached: bool = False,
) -> list[StageEstimate]:
    """What each stage of a run takes. The student's weights change, the teacher's do not.

    Args:
        teacher, student, args, blocks: as for [`RaptorDistillationTrainer`].
        num_images: training images; `None` for a stream, which needs `max_steps`.
        image_size: height and width in pixels.
        cached: whether the teacher's states are read from an [`~raptor_hf.activations.ActivationCache`].

    Raises:
        ValueError: as [`num_steps`].
    """
    stages = args.stage_arguments() if args.stage == "both" else {args.stage: args}
    steps = {stage: num_steps(own, num_images) for stage, own in stages.items()}
    estimates = []
    for stage, own in stages.items():
        with tempfile.TemporaryDirectory() as folder:
            quiet = copy.copy(own)
            quiet.output_dir, quiet.report_to, quiet.push_to_hub = folder, [], False
            trainer = RaptorDistillationTrainer(student, teacher, quiet, blocks=blocks)
            pixels = torch.randn(2, student.config.num_channels, *image_size, device=teacher.device)
            estimates.append(_estimate(trainer, pixels, steps[stage], cached))
    return estimates


def _estimate(trainer: RaptorDistillationTrainer, pixels: torch.Tensor, steps: int, cached: bool) -> StageEstimate:
    args, device = trainer.args, trainer.args.device
    batch = args.per_device_train_batch_size or 1
    trainer.model.to(device).train()
    trainer.create_optimizer()
    trainer.state.logging_steps = trainer.state.max_steps = _LAST_STEP
    states = torch.stack(trainer.teacher.hidden_states(pixels), dim=1).to(device, trainer.raptor.dtype)
    kept = _kept_for_backward(trainer, states, batch)
    count = min(batch, _TIMED_IMAGES.get(device.type, _TIMED_IMAGES["cpu"]))
    numbers = [index % 2 for index in range(count)]
    inputs = {STATES: states[numbers].bfloat16()} if cached else {"pixel_values": pixels[numbers]}
    forced, own = (_seconds(partial(_backward, trainer, inputs, step), device) for step in (0, _LAST_STEP))
    optimizer_seconds = _seconds(trainer.optimizer.step, device)
    share = args.teacher_forcing_share or 0.0 if trainer.stage == "blocks" else 0.0
    seconds = (share * forced + (1 - share) * own) / count * batch * args.gradient_accumulation_steps

    optimizer = _num_bytes(value for state in trainer.optimizer.state.values() for value in state.values())
    weights = _num_bytes(trainer.model.state_dict().values())
    gradients = _num_bytes(value for value in trainer.model.parameters() if value.requires_grad)
    teacher = _num_bytes(trainer.teacher.model.state_dict().values())
    return StageEstimate(
        stage=trainer.stage,
        steps=steps,
        images=steps * batch * args.world_size * args.gradient_accumulation_steps,
        seconds_per_step=seconds + optimizer_seconds,
        memory=teacher + weights + gradients + optimizer + states[0].nbytes * batch + kept,
        disk=_num_checkpoints(args, steps) * (weights + optimizer) + weights,
    )


def _backward(trainer: RaptorDistillationTrainer, inputs: dict[str, torch.Tensor], step: int) -> None:
    """Gradients of one micro-batch, at the first step (with teacher forcing, if there is any) or after it."""
    trainer.state.global_step = step
    trainer.model.zero_grad()
    with _checkpointing(trainer), trainer.accelerator.autocast():
        loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()  # type: ignore[union-attr]


@contextlib.contextmanager
def _checkpointing(trainer: RaptorDistillationTrainer) -> Iterator[None]:
    """Activation checkpointing for as long as a loss is computed, if the run has it."""
    if trainer.args.activation_checkpointing:
        trainer.raptor.activation_checkpointing_enable(dict(trainer.args.activation_checkpointing_kwargs or {}))
    try:
        yield
    finally:
        if trainer.args.activation_checkpointing:
            trainer.raptor.activation_checkpointing_disable()


def _kept_for_backward(trainer: RaptorDistillationTrainer, states: torch.Tensor, batch: int) -> int:
    """Bytes that autograd keeps for a batch: counted for one image and for two, and gone on with in a straight line.

    The step that is counted is one with teacher forcing, if there is any. With checkpointing, one application of a
    block is kept whole while its part of the backward pass runs.
    """

    def loss_of(count: int) -> Callable[[], Any]:
        """The first step's loss on `count` images, not yet computed."""
        trainer.state.global_step = 0
        return lambda: trainer.compute_loss(trainer.model, {STATES: states[:count]})

    with _checkpointing(trainer):
        one, two = (_saved_bytes(trainer, loss_of(count), states) for count in (1, 2))
    kept = one + (two - one) * (batch - 1)
    if trainer.args.activation_checkpointing:
        block = trainer.model.trained_blocks[0]
        kept += batch * _saved_bytes(trainer, lambda: trainer.raptor.apply_block(block, states[:1, 0], 1), states)
    return kept


def _saved_bytes(trainer: RaptorDistillationTrainer, compute: Callable[[], Any], given: torch.Tensor) -> int:
    """Bytes of the tensors that autograd keeps of what is computed, without weights and what was given."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*trainer.model.parameters(), given)}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        """Notes a tensor that autograd keeps, and hands it on."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), trainer.accelerator.autocast():
        result = compute()
    del result  # kept until here: what is freed could give its place to another
    return sum(saved.values())


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Median time of `work`, after it was done once."""
    times = []
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _num_checkpoints(args: DistillationArguments, steps: int) -> int:
    """Checkpoints that lie side by side, the one being written among them."""
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "steps":
        return 0
    interval = max(1, math.ceil(args.save_steps * steps) if args.save_steps < 1 else int(args.save_steps))
    made = math.ceil(steps / interval)  # the last step is saved too
    return made if args.save_total_limit is None else min(made, args.save_total_limit + 1)


def _num_bytes(values: Any) -> int:
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor | nn.Parameter))
