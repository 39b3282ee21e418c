"""Distillation on top of the Hugging Face Trainer: stages, teacher, logging, evaluation, checkpoints that survive.

The loss itself is in [`RaptorForDistillation`]; this file only feeds it. Two things differ from a plain Trainer:
`stage="both"` is two runs in sub-folders, and what is saved for use is the inner [`RaptorModel`], not the wrapper that
checkpoints hold.
"""

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.trainer_utils import TrainOutput, has_length
from transformers.utils import logging

from .activations import STATES, ActivationCache, collate_states
from .arguments import DistillationArguments
from .checkpoints import last_complete_checkpoint
from .data import ImageDataset, PixelDataset
from .distillation import RaptorForDistillation
from .evaluation import FidelityTrainer
from .losses import layer_variances
from .modeling_raptor import RaptorModel
from .optimizers import MuonAdamW, block_parameter_groups
from .results import read_json, write_json
from .safeguards import SIGTERM_EXIT, StopOnSigterm
from .saving import STREAM_FILE
from .streams import ImageStream, PixelStream
from .teachers import Teacher

logger = logging.get_logger(__name__)

STAGE_FILE = "stage.json"
SCALE_FILE = "loss_scale.json"
_COMPONENTS = ("tf", "ar", "cls", "reg", "patch")


class RaptorDistillationTrainer(FidelityTrainer):
    """Distils a teacher into a [`RaptorModel`] (arXiv 2512.19941, Sec. 3).

    Args:
        model: the student; [`RaptorModel.from_teacher`] makes it.
        teacher: a [`Teacher`]. It is never part of the student, of a checkpoint or of the optimiser.
        args: a [`DistillationArguments`].
        train_dataset, eval_dataset: datasets of `{"pixel_values": (channels, height, width)}`, or [`ImageDataset`]s,
            which go through `processing_class`. Or an [`~raptor_hf.activations.ActivationCache`] of this teacher, whose
            states are read and not computed.
        processing_class: image processor, saved with the model; the teacher's by default.
        blocks: blocks that learn in stage `"blocks"`; all by default.
        kwargs: further arguments of `Trainer`.

    Attributes:
        raptor: the student.
        fidelity: [`Fidelity`] of the last evaluation.
        history: log entries of all stages, each with its `"stage"`, steps counted through.

    Raises:
        ValueError: if the student does not fit the teacher, the training set is smaller than one batch or holds states
            of another teacher, or more than one GPU would be used without a launcher.
    """

    loss_is_scaled_for_ga = False  # the loss is a mean over the micro-batch

    def __init__(
        self,
        model: RaptorModel,
        teacher: Teacher,
        args: DistillationArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        blocks: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or DistillationArguments(output_dir="raptor")
        _check_fit(model, teacher)
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs in one process; start one per GPU: accelerate launch -m raptor_hf distill."
            )
        if train_dataset is not None and not has_length(train_dataset) and args.max_steps <= 0:
            raise ValueError("a training set without a length needs a number of steps; set max_steps (--max_steps).")
        if args.fast_resume and args.dataloader_num_workers:
            raise ValueError("fast_resume needs dataloader_num_workers=0: with workers the stream's state is in them.")
        for dataset in (train_dataset, eval_dataset):
            if isinstance(dataset, ActivationCache):
                dataset.check_teacher(teacher)
        self.stage = "end_to_end" if args.stage == "both" else args.stage
        self.raptor, self.teacher, self.blocks, self.callbacks = model, teacher, blocks, kwargs.get("callbacks")
        wrapper = RaptorForDistillation(
            model.config, model, args.objective_for(self.stage), blocks if self.stage == "blocks" else None
        )
        processor = teacher.image_processor if processing_class is None else processing_class
        super().__init__(
            model=wrapper,
            args=args,
            data_collator=kwargs.pop("data_collator", None) or collate_states,
            train_dataset=_as_pixels(train_dataset, processor, args.seed),
            eval_dataset=_as_pixels(eval_dataset, processor, args.seed, repeat=False),
            processing_class=processor,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = False
        self.can_return_loss = True  # evaluation has a loss without labels
        if not getattr(teacher.model, "_is_accelerate_prepared", False):
            self.accelerator.prepare_model(teacher.model, device_placement=True, evaluation_mode=True)
            self.accelerator._models.remove(teacher.model)  # what is listed there is taken for the prepared student
            teacher.model._is_accelerate_prepared = True
        self.history: list[dict[str, Any]] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._num_summed = 0
        self._micro_step = 0
        self._sigterm = StopOnSigterm()
        self.add_callback(self._sigterm)

    # ---- Training ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Runs the stage, or both of them, each in its own folder of `args.output_dir`.

        Args:
            resume_from_checkpoint: `True` goes on from the newest complete checkpoint, if there is one, and skips a
                finished stage; a path goes on from that checkpoint.
            kwargs: as `Trainer.train`.

        Returns:
            steps and mean loss; of both stages together with `stage="both"`.

        Raises:
            ValueError: if there is no training set, or it is smaller than one batch over all processes.
            TrainingStopped: if the loss is not finite any more, or the disk is full.
            SystemExit: with code 143 after SIGTERM, a checkpoint being saved (one process only).
        """
        self._check_train_dataset()
        if self.args.stage == "both":
            return self._train_both(bool(resume_from_checkpoint), **kwargs)
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_checkpoint()
        self._set_loss_scale(keep=bool(resume_from_checkpoint))
        self._resume_stream(resume_from_checkpoint)
        self._unprepare()
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)
        finally:
            self._sigterm.release()
            self._close_progress()
        if self._sigterm.received:
            logger.warning(f"Stopped by SIGTERM after step {self.state.global_step}, which is saved.")
            raise SystemExit(SIGTERM_EXIT)
        self._stop_if_broken(list(self.raptor.blocks.parameters()))
        self.history = [{"stage": self.stage, **entry} for entry in self.state.log_history]
        return result

    def _resume_stream(self, checkpoint: str | bool | None) -> None:
        """With `fast_resume` a stream goes on where the checkpoint says; else the Trainer reads past what was seen."""
        self.args.ignore_data_skip = False
        path = Path(str(checkpoint)) / STREAM_FILE
        if self.args.fast_resume and checkpoint and path.is_file():
            self.train_dataset.load_state_dict(read_json(path))
            self.args.ignore_data_skip = True

    def _close_progress(self) -> None:
        """Ends the line of a progress bar that an error left open: the message then has a line to itself."""
        for callback in self.callback_handler.callbacks:
            for name in ("training_bar", "prediction_bar"):
                bar = getattr(callback, name, None)
                if bar is not None and hasattr(bar, "close"):
                    bar.close()

    def _last_checkpoint(self) -> str | None:
        """Newest complete checkpoint; the main process alone deletes half-written ones."""
        found = last_complete_checkpoint(
            str(self.args.output_dir), self.args.world_size, clean=self.is_world_process_zero()
        )
        self.accelerator.wait_for_everyone()
        return found

    def _train_both(self, resume: bool, **kwargs: Any) -> TrainOutput:
        steps, losses, metrics = 0, [], {}
        self.history = []
        self._set_loss_scale(keep=resume)
        for stage, args in self.args.stage_arguments().items():
            trainer = type(self)(
                self.raptor, self.teacher, args, self.train_dataset, self.eval_dataset, self.processing_class,
                data_collator=self.data_collator, callbacks=copy.copy(self.callbacks),
            )  # fmt: skip
            trainer.model.loss_scale = self.model.loss_scale
            record = trainer._finished() if resume else None
            if record is None:
                (Path(str(args.output_dir)) / STAGE_FILE).unlink(
                    missing_ok=True
                )  # left by a run that is not gone on with
                result = trainer.train(resume_from_checkpoint=resume, **kwargs)
                record = {"steps": result.global_step, "loss": result.training_loss, "history": trainer.history}
                trainer._finish(record)
            for entry in record["history"]:
                self.history.append({**entry, "step": entry["step"] + steps})
            steps += record["steps"]
            losses.append(record["loss"])
            metrics.update({f"{stage}_loss": record["loss"], f"{stage}_steps": record["steps"]})
        self.state.log_history, self.state.global_step = self.history, steps
        return TrainOutput(steps, losses[-1], metrics)

    def _finish(self, record: dict[str, Any]) -> None:
        """Leaves what a finished stage is known by: its model, then the record of it."""
        output_dir = Path(self.args.output_dir)
        self.save_model(str(output_dir / "model"))
        if self.args.should_save:
            write_json(output_dir / STAGE_FILE, record)
        self.accelerator.wait_for_everyone()

    def _finished(self) -> dict[str, Any] | None:
        """Record of this stage if an earlier run finished it; the student then gets the weights it ended with."""
        path = Path(self.args.output_dir) / STAGE_FILE
        if not path.is_file():
            return None
        logger.warning(f"Stage {self.stage} is finished already; its model is used.")
        trained = RaptorModel.from_pretrained(path.parent / "model", dtype=self.raptor.dtype)
        self.raptor.load_state_dict(trained.state_dict())
        return read_json(path)

    def _check_train_dataset(self) -> None:
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset; give one to the trainer.")
        batch = self.args.per_device_train_batch_size * self.args.world_size
        size = len(self.train_dataset) if has_length(self.train_dataset) else None
        if size is not None and size < batch and self.args.dataloader_drop_last:
            raise ValueError(
                f"{size} training images are fewer than one batch of {batch} (per_device_train_batch_size="
                f"{self.args.per_device_train_batch_size}, {self.args.world_size} processes); lower the batch size."
            )

    def _set_loss_scale(self, keep: bool) -> None:
        """Variances of the teacher's states from a seeded choice of training images: computed once by rank 0, stored
        with the run and the same from then on; `keep` takes the stored ones of a run that is gone on with.
        """
        if self.args.loss_scale == "none" or self.model.loss_scale is not None:
            return
        path = Path(self.args.output_dir) / SCALE_FILE
        if self.is_world_process_zero() and not (keep and path.is_file()):
            write_json(path, layer_variances(self._loss_scale_states(), self.teacher.layout))
        self.accelerator.wait_for_everyone()
        variances = read_json(path)
        shared = self.args.loss_scale == "shared_variance"
        self.model.loss_scale = dict.fromkeys(variances, variances["all"]) if shared else variances

    def _loss_scale_states(self) -> Iterable[tuple[torch.Tensor, ...]]:
        """States of a seeded choice of training images; of a stream the first ones."""
        count, dataset = self.args.loss_scale_images, self.train_dataset
        if not has_length(dataset):
            items: Iterable[Any] = itertools.islice(dataset, count)
        else:
            order = np.random.default_rng(self.args.seed).permutation(len(dataset))[:count]
            items = (dataset[int(index)] for index in order)
            if STATES in dataset[0]:
                return (item[STATES].to(self.raptor.dtype).unsqueeze(1).unbind() for item in items)
        return self.teacher.iter_hidden_states(items, self.args.per_device_train_batch_size)

    def _unprepare(self) -> None:
        """An evaluation before training marks the student as prepared without wrapping it: DDP would be left out."""
        if self.args.world_size > 1 and self.model_wrapped is self.model:
            self.accelerator.free_memory()
            self.model._is_accelerate_prepared = False

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        """`dataloader_drop_last` is about training alone: an evaluation counts every image."""
        drop_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = drop_last and is_training
        try:
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weight decay acts on the blocks' matrices: not on norms, biases, LayerScale, tokens or depth scales."""
        return [
            name
            for name, parameter in model.named_parameters()
            if "blocks." in name and parameter.ndim >= 2 and "depth_scale" not in name
        ]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own, or with `block_optimizer="muon"` a [`MuonAdamW`].

        Raises:
            ValueError: if Muon shall run where parameters are sharded: it needs whole matrices.
        """
        args, made = self.args, getattr(self, "optimizer", None)
        if made is None and args.block_optimizer == "muon":
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError(
                    "block_optimizer='muon' needs whole matrices, but FSDP and DeepSpeed shard them; use 'adamw' there."
                )
            student = self.model if model is None else model
            groups = block_parameter_groups(student, self.get_decay_parameter_names(student), args.weight_decay)
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MuonAdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
        return super().create_optimizer(model)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Teacher's states of the batch, computed or read, then one pass of the wrapped student.

        Args:
            model: the wrapped student, as the Trainer hands it over.
            inputs: a batch with `pixel_values`, or with `hidden_states (batch_size, L + 1, seq_length, hidden_size)`;
                labels are not used.
            return_outputs: also return `{"loss", "pooled"}`, the student's image features
                `(batch_size, 2 * hidden_size)`.
            num_items_in_batch: not used, the loss is a mean.
        """
        if STATES in inputs:
            states = inputs[STATES].to(self.args.device, self.raptor.dtype).unbind(1)
        else:
            states = self.teacher.hidden_states(inputs["pixel_values"].to(self.teacher.device))
        if model.training:
            loss = self._training_loss(model, states)
            return (loss, {"loss": loss}) if return_outputs else loss
        outputs: Any = model(states, rollout=True)  # a DistillationOutput, as below
        if self._accumulator is not None:
            self._accumulator.update(outputs.student_states, states)
        if not return_outputs:
            return outputs.loss
        with torch.no_grad():
            pooled = self.teacher.layout.pool(self.raptor.layernorm(outputs.student_states[-1]))
        return outputs.loss, {"loss": outputs.loss, "pooled": pooled}

    def _training_loss(self, model: nn.Module, states: Sequence[torch.Tensor]) -> torch.Tensor:
        step = self.state.global_step
        weight = self.args.teacher_forcing_weight(self.stage, step, self.state.max_steps)
        next_step = step + 1
        logs = next_step % max(1, int(self.state.logging_steps)) == 0 or (self.args.logging_first_step and step == 0)
        outputs: Any = model(states, teacher_forcing_weight=weight, noise_seed=self._noise_seed(), return_states=logs)
        self._finite_loss.update(outputs.loss)
        values = {name: getattr(outputs, name) for name in _COMPONENTS if getattr(outputs, name) is not None}
        values["lambda"] = torch.tensor(weight, device=outputs.loss.device)
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._num_summed += 1
        if logs:
            self._sums.update(_batch_r2(outputs.student_states, states))
        return outputs.loss

    def _noise_seed(self) -> int:
        """Seed of the input noise of this micro-step, from the step and not from a generator that a resume shifts."""
        self._micro_step = (self._micro_step + 1) % self.args.gradient_accumulation_steps
        key = (self.args.seed, self.state.global_step, self._micro_step, self.args.process_index)
        return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Stage `"blocks"` clips every block on its own, which equals training the blocks apart."""
        if self.stage != "blocks":
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        norms = [
            nn.utils.clip_grad_norm_(block.parameters(), self.args.max_grad_norm)
            for number, block in enumerate(self.raptor.blocks)
            if number in self.model.trained_blocks
        ]
        return torch.linalg.vector_norm(torch.stack(norms))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the loss's components, averaged since the last log, and the R2 per layer of the last batch."""
        if "loss" in logs and self._num_summed:
            self._stop_if_broken()
            for name, value in self._sums.items():
                count = 1 if name.startswith("r2_layer_") else self._num_summed
                logs[name] = float(self.accelerator.reduce(value / count, reduction="mean"))
            self._sums, self._num_summed = {}, 0
        super().log(logs, start_time)


def _check_fit(model: RaptorModel, teacher: Teacher) -> None:
    fields = teacher.config_fields()
    for name in ("num_hidden_layers", "hidden_size", "num_register_tokens", "patch_size", "image_size"):
        if getattr(model.config, name) != fields[name]:
            raise ValueError(
                f"student with {name}={getattr(model.config, name)} for a teacher with {fields[name]}; make the "
                "student with RaptorModel.from_teacher(teacher, phases)."
            )


def _as_pixels(dataset: Any, processor: Any, seed: int, repeat: bool = True) -> Any:
    if isinstance(dataset, PixelStream) and dataset.repeat and not repeat:
        raise ValueError("an evaluation on a stream that never ends; make its PixelStream with repeat=False.")
    if not isinstance(dataset, (ImageDataset, ImageStream)):
        return dataset
    if processor is None:
        raise ValueError("a dataset of images needs a processing_class; this teacher has no image processor.")
    if isinstance(dataset, ImageStream):
        return PixelStream(dataset, processor, seed=seed, repeat=repeat)
    return PixelDataset(dataset, processor, seed=seed)


@torch.no_grad()
def _batch_r2(student: Sequence[torch.Tensor | None], teacher: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """R2 per layer on one batch, all tokens, without moving a number to the host."""
    values = {}
    for layer, (own, target) in enumerate(zip(student, teacher, strict=True)):
        if layer == 0 or own is None:
            continue
        target = target.float()
        total = (target - target.mean(dim=(0, 1))).square().sum()
        values[f"r2_layer_{layer}"] = 1 - (own.float() - target).square().sum() / total
    return values
