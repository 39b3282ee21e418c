"""Teachers of our own: a ViT of any sizes learns to classify from random weights, and is kept at chosen epochs.

The quickstart's teacher comes from here, and the teachers of the controlled studies (arXiv 2512.19941, Fig. 4, 13).
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    BitImageProcessorPil,
    Dinov2WithRegistersConfig,
    PreTrainedConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from .checkpoints import last_complete_checkpoint
from .data import ImageDataset, PixelDataset, collate_pixels

DIGITS_IMAGE_SIZE = 16
_FINISHED = "preprocessor_config.json"  # saved last
Batch = dict[str, torch.Tensor]


@dataclass
class ViTTrainingArguments:
    """How a ViT learns to classify from random weights. The defaults suit the digits, in seconds on two cores.

    Attributes:
        num_epochs, batch_size: passes over the images, images per step.
        learning_rate, warmup_steps, schedule: peak, steps or share of them over which it is reached, and what follows
            (a name of `transformers`, such as `"cosine"` or `"constant_with_warmup"`).
        weight_decay, label_smoothing: of AdamW, of the cross entropy.
        seed: of weights, order of the images and augmentation.
        num_workers: processes that read images.
        use_cpu: whether to leave an accelerator alone.
        snapshots: epochs after which the model is saved; 0 are the random weights.

    Raises:
        ValueError: if a number is out of range.
    """

    num_epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: float = 0.1
    schedule: str = "cosine"
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    seed: int = 0
    num_workers: int = 0
    use_cpu: bool = False
    snapshots: Sequence[int] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for name, low in {"num_epochs": 1, "batch_size": 1, "weight_decay": 0, "seed": 0, "num_workers": 0}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0.")
        wrong = [epoch for epoch in self.snapshots if not 0 <= epoch <= self.num_epochs]
        if wrong:
            raise ValueError(f"snapshots={list(self.snapshots)}: epochs are 0 to num_epochs={self.num_epochs}.")


class KeptPixels(PixelDataset):
    """Keeps every processed image in memory, for small sets that are read many times."""

    def __init__(self, images: ImageDataset, processor: Any) -> None:
        super().__init__(images, processor)
        self._kept: dict[int, dict[str, Any]] = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self._kept:
            self._kept[index] = super().__getitem__(index)
        return dict(self._kept[index])


def digits_processor() -> BitImageProcessorPil:
    """Image processor of the digits teacher: the whole image at 16 x 16 pixels, black at -1, white at 7 / 3."""
    return BitImageProcessorPil(
        do_resize=True,
        size={"height": DIGITS_IMAGE_SIZE, "width": DIGITS_IMAGE_SIZE},
        resample=2,
        do_center_crop=False,
        image_mean=[0.3] * 3,
        image_std=[0.3] * 3,
    )


def digits_config(**options: Any) -> Dinov2WithRegistersConfig:
    """Sizes of the digits teacher: twelve layers of width 64 with four heads, registers and stochastic depth of 0.1.

    Args:
        options: fields that differ.
    """
    return Dinov2WithRegistersConfig(**{
        "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "mlp_ratio": 2,
        "image_size": DIGITS_IMAGE_SIZE, "patch_size": 4, "num_register_tokens": 4,
        "drop_path_rate": 0.1, "layerscale_value": 0.1, "initializer_range": 0.1, "num_labels": 10, **options,
    })  # fmt: skip


def jitter(batch: Batch) -> Batch:
    """Turns, scales and shifts each digit a little: up to 10 degrees, 10 % and a quarter of the half-width.

    Args:
        batch: `pixel_values` `(batch_size, channels, height, width)`, changed; labels pass through. Drawn from torch's
            global generator.
    """
    pixels = batch["pixel_values"]
    angle, scale, right, down = ((torch.rand(4, len(pixels)) * 2 - 1) * _JITTER[:, None]).unbind()
    cos, sin, scale = angle.cos(), angle.sin(), 1 + scale
    rows = [
        torch.stack([cos / scale, -sin / scale, right], dim=1),
        torch.stack([sin / scale, cos / scale, down], dim=1),
    ]
    grid = nn.functional.affine_grid(torch.stack(rows, dim=1), list(pixels.shape), align_corners=False)
    moved = nn.functional.grid_sample(pixels - _BLACK, grid, padding_mode="zeros", align_corners=False)
    return {**batch, "pixel_values": moved + _BLACK}


_JITTER = torch.tensor([10 * math.pi / 180, 0.1, 0.25, 0.25])
_BLACK = -1.0  # a black pixel after the processor


def train_vit(
    config: PreTrainedConfig,
    processor: Any,
    images: PixelDataset,
    folder: str | Path,
    args: ViTTrainingArguments,
    *,
    start: str | Path | None = None,
    transform: Callable[[Batch], Batch] | None = None,
    resumable: bool = True,
) -> None:
    """Trains a ViT to classify and saves it, its head and its image processor in `folder`; what is there already is
    not done again.

    Args:
        config (`PreTrainedConfig`): of the ViT; for `start` it is not used.
        processor: image processor that is saved with it.
        images (`PixelDataset`): with labels.
        folder: gets the model, and `epochN/` for each of `args.snapshots`.
        args (`ViTTrainingArguments`): how it learns.
        start (*optional*): folder of a ViT whose weights are gone on from.
        transform (`Callable`, *optional*): changes each collated training batch, such as [`jitter`].
        resumable (`bool`): writes a checkpoint after each epoch, from which an interrupted training goes on.

    Raises:
        ValueError: if the images have no labels, or `transformers` has no classifier of that type.
    """
    folder = Path(folder)
    if is_saved(folder):
        return
    if images.images.labels is None:
        raise ValueError(f"{images.images.name} has no labels, from which a ViT could learn; name a labelled dataset.")
    set_seed(args.seed)
    if start is None:
        model = AutoModelForImageClassification.from_config(config)
    else:
        model = AutoModelForImageClassification.from_pretrained(start)
    has_bf16 = not args.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    training = TrainingArguments(
        output_dir=str(folder), num_train_epochs=args.num_epochs, per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate, weight_decay=args.weight_decay, warmup_steps=args.warmup_steps,
        lr_scheduler_type=args.schedule, label_smoothing_factor=args.label_smoothing, dataloader_drop_last=True,
        save_strategy="epoch" if resumable else "no", save_total_limit=1, report_to="none", logging_strategy="no",
        seed=args.seed, use_cpu=args.use_cpu, dataloader_num_workers=args.num_workers, bf16=has_bf16,
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = _ViTTrainer(
        model,
        training,
        train_dataset=images,
        data_collator=_Collator(transform),
        callbacks=[_Snapshots(folder, processor, args.snapshots)],
    )
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder) if resumable else None)
    _save(model, processor, folder)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def snapshot_folder(folder: str | Path, epoch: int) -> Path:
    """Where [`train_vit`] keeps the model of an epoch."""
    return Path(folder) / f"epoch{epoch}"


def is_saved(folder: str | Path) -> bool:
    """Whether a folder holds a ViT that [`train_vit`] finished."""
    return (Path(folder) / _FINISHED).is_file()


class _Collator:
    """Batches as a Trainer takes them; a class, because worker processes get a copy."""

    def __init__(self, transform: Callable[[Batch], Batch] | None) -> None:
        self.transform = transform

    def __call__(self, items: list[dict[str, Any]]) -> Batch:
        batch = collate_pixels(items)
        return batch if self.transform is None else self.transform(batch)


class _ViTTrainer(Trainer):
    """Loads a checkpoint as `from_pretrained` does: `save_pretrained` writes the weights of some ViTs under names of
    older versions, which the Trainer's own way leaves out with a warning, and training would go on from random weights.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        saved = AutoModelForImageClassification.from_pretrained(resume_from_checkpoint)
        model.load_state_dict(saved.state_dict())


class _Snapshots(TrainerCallback):
    """Saves the model after chosen epochs, before the checkpoint of that epoch: none is missing after an interruption.

    Epoch 0 is saved unless training goes on from a checkpoint, by which time it has been.
    """

    def __init__(self, folder: Path, processor: Any, epochs: Sequence[int]) -> None:
        self.folder, self.processor, self.epochs = folder, processor, set(epochs)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._keep(0, kwargs["model"])

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._keep(round(state.epoch or 0), kwargs["model"])

    def _keep(self, epoch: int, model: Any) -> None:
        if epoch in self.epochs:
            _save(model, self.processor, snapshot_folder(self.folder, epoch))


def _save(model: Any, processor: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
