"""Arguments of a distillation and the presets that fill them.

A preset has two halves. The training half is [`DistillationArguments`]: a field that a preset governs has the default
`None` and is filled in on construction, inherited fields of `TrainingArguments` too, so that what a user sets always
wins. The model half (`MODEL_PRESETS`) are keyword arguments of [`RaptorModel.from_teacher`].
"""

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from .distillation import END_TO_END_WEIGHTS, LAST_BLOCK_WEIGHTS, OBJECTIVES, STAGES, DistillationObjective
from .losses import ERRORS, LAYER_REDUCTIONS
from .optimizers import BLOCK_OPTIMIZERS
from .tokens import TOKEN_GROUPS

LOSS_SCALES = ("none", "layer_variance", "shared_variance")

_PAPER: dict[str, Any] = {
    "learning_rate": 1e-4,
    "weight_decay": 1e-4,
    "warmup_steps": 0.025,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 1e-6},
    "max_grad_norm": 0.0,
    "num_train_epochs": 40.0,
    "per_device_train_batch_size": 64,
    "blocks_share": 0.5,
    "objective": "hybrid",
    "error": "squared",
    "layer_reduction": "sum",
    "loss_scale": "none",
    "direction_weight": 0.0,
    "block_optimizer": "adamw",
    "teacher_forcing_start": 0.5,
    "teacher_forcing_share": 0.25,
    "last_block_weights": list(LAST_BLOCK_WEIGHTS.values()),
    "end_to_end_weights": list(END_TO_END_WEIGHTS.values()),
}
TRAINING_PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    "research": {
        **_PAPER,
        "learning_rate": 3e-4,
        "warmup_steps": 0.032,
        "max_grad_norm": 1.0,
        "error": "mse",
        "layer_reduction": "mean",
        "teacher_forcing_start": 1.0,
    },
    "recommended": {
        **_PAPER,
        "learning_rate": 1e-3,
        "warmup_steps": 0.05,
        "max_grad_norm": 1.0,
        "blocks_share": 0.25,
        "error": "mse",
        "layer_reduction": "mean",
        "loss_scale": "shared_variance",
        "block_optimizer": "muon",
        "last_block_weights": [0.2, 0.1, 0.7],
        "end_to_end_weights": [0.2, 0.1, 0.7],
    },
}
MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"init": "random", "mlp_type": "gelu", "depth_scale_init": "normal"},
    "research": {"init": "random", "mlp_type": "swiglu", "intermediate_size": "research", "depth_scale_init": "normal"},
    "recommended": {"init": "middle", "mlp_type": None, "depth_scale_init": "zeros"},
}


@dataclass
class DistillationArguments(TrainingArguments):
    """Arguments of [`RaptorDistillationTrainer`]; every field of `TrainingArguments` is there too.

    The length of the run (`max_steps`, or `num_train_epochs`) is that of both stages together and is divided by
    `blocks_share`. Sources of the defaults: arXiv 2512.19941, Sec. 3 and App. A (`preset="paper"`), and the research
    code (`"research"`); the two differ in learning rate, clipping, error and the start of teacher forcing.
    `"recommended"` is what trials on a real teacher picked (`benchmarks/recipe.py`, LOG.md).

    Raises:
        ValueError: if a value is out of its range or unknown.
    """

    _argument_group_name = "Distillation"

    preset: Literal["recommended", "paper", "research"] = field(
        default="recommended", metadata={"help": "Fills every field that is not set."}
    )
    stage: Literal["both", "blocks", "end_to_end"] = field(
        default="both",
        metadata={
            "help": "Stage 1 (blocks apart, from the teacher's states), stage 2 (connected), or one after the other."
        },
    )
    blocks_share: float | None = field(default=None, metadata={"help": "Share of the steps given to stage 1, 0 to 1."})
    objective: str | None = field(default=None, metadata={"help": f"One of {', '.join(OBJECTIVES)}."})
    error: str | None = field(default=None, metadata={"help": f"Error between two states: {', '.join(ERRORS)}."})
    layer_reduction: str | None = field(default=None, metadata={"help": f"Over layers: {', '.join(LAYER_REDUCTIONS)}."})
    direction_weight: float | None = field(
        default=None, metadata={"help": "Weight of 1 - cosine, added to the error between two states."}
    )
    block_optimizer: str | None = field(
        default=None,
        metadata={"help": f"Of the blocks' matrices: {', '.join(BLOCK_OPTIMIZERS)}; AdamW learns the rest."},
    )
    loss_scale: str | None = field(
        default=None,
        metadata={
            "help": "Divides errors by a variance of the layer: each group's (layer_variance) or that of all tokens "
            f"together (shared_variance); one of {', '.join(LOSS_SCALES)}."
        },
    )
    loss_scale_images: int = field(default=256, metadata={"help": "Training images that the variances are taken from."})
    teacher_forcing_start: float | None = field(
        default=None, metadata={"help": "Lambda at the start of stage 1, 0 to 1."}
    )
    teacher_forcing_share: float | None = field(
        default=None, metadata={"help": "Share of stage 1 over which lambda falls linearly to 0."}
    )
    last_block_weights: list[float] | None = field(
        default=None,
        metadata={"help": "Stage 1, last block: weights of the cls, register and patch errors; 1: all tokens alike."},
    )
    end_to_end_weights: list[float] | None = field(
        default=None, metadata={"help": "Stage 2: weights of the cls, register and patch errors; 1: all tokens alike."}
    )
    horizon: int | None = field(
        default=None, metadata={"help": "Layers the student runs on its own states; default all."}
    )
    input_noise_std: float = field(default=0.0, metadata={"help": "Gaussian noise on a block's input in training."})

    fast_resume: bool = field(
        default=False,
        metadata={
            "help": "Go on in a stream from its saved state instead of reading past what was seen: not bit-equal, "
            "images in the shuffle buffer are lost for that pass."
        },
    )

    learning_rate: float | None = field(default=None, metadata={"help": "Peak learning rate."})
    weight_decay: float | None = field(default=None, metadata={"help": "Decay of the blocks' matrices alone."})
    warmup_steps: float | None = field(default=None, metadata={"help": "Linear warm-up: steps, or a share below 1."})
    lr_scheduler_type: str | None = field(default=None, metadata={"help": "Learning rate schedule."})
    lr_scheduler_kwargs: dict[str, Any] | str | None = field(default=None, metadata={"help": "Its arguments, as JSON."})
    max_grad_norm: float | None = field(
        default=None, metadata={"help": "Gradient clip, per block in stage 1; 0 is off."}
    )
    num_train_epochs: float | None = field(default=None, metadata={"help": "Epochs of both stages together."})
    per_device_train_batch_size: int | None = field(default=None, metadata={"help": "Images per step and process."})
    output_dir: str | None = field(default="runs/distill", metadata={"help": "Folder of the run."})
    logging_steps: float = field(
        default=0.02, metadata={"help": "Steps between log entries; below 1 a share of a stage."}
    )
    save_steps: float = field(default=0.1, metadata={"help": "Steps between checkpoints; below 1 a share of a stage."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints that are kept."})
    bf16: bool | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Autocast to bfloat16, weights stay float32; default where the hardware computes in it."},
    )
    label_names: list[str] | None = field(default=None, metadata={"help": "Columns of labels; distillation has none."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Whether to drop columns; leave it off."})
    dataloader_drop_last: bool = field(default=True, metadata={"help": "Whether to drop a last, smaller batch."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Whether to hide a loss that is not a number."}
    )

    def __post_init__(self) -> None:
        if self.preset not in TRAINING_PRESETS:
            raise ValueError(f"preset={self.preset!r} is unknown; use one of {', '.join(TRAINING_PRESETS)}.")
        own_schedule = self.lr_scheduler_type is not None
        if str(getattr(self.optim, "value", self.optim)) not in ("adamw_torch", "adamw_torch_fused"):
            if self.block_optimizer == "muon":
                raise ValueError(f"optim={self.optim!r} and block_optimizer='muon' exclude each other; leave one out.")
            self.block_optimizer = "adamw"  # the Trainer's own optimiser, the one that was asked for
        for name, value in TRAINING_PRESETS[self.preset].items():
            if getattr(self, name) is None and not (name == "lr_scheduler_kwargs" and own_schedule):
                setattr(self, name, value)
        if self.label_names is None:
            self.label_names = []
        self._check()
        if not torch.accelerator.is_available() and os.environ.get("WORLD_SIZE", "1") == "1":
            self.use_cpu = True  # as it is; said, because bfloat16 is refused without it
        if self.bf16 is None:
            self.bf16 = not self.fp16 and _has_bf16(self.use_cpu)
        super().__post_init__()
        if (self.activation_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "activation_checkpointing_kwargs with use_reentrant=True gives weight-tied blocks wrong or no "
                "gradients; leave it out or set it to false."
            )

    def _check(self) -> None:
        for name in ("blocks_share", "teacher_forcing_start", "teacher_forcing_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1.")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be positive.")
        if self.stage not in ("both", *STAGES):
            raise ValueError(f"stage={self.stage!r} is unknown; use one of both, {', '.join(STAGES)}.")
        for name, allowed in (
            ("error", ERRORS),
            ("layer_reduction", LAYER_REDUCTIONS),
            ("loss_scale", LOSS_SCALES),
            ("block_optimizer", BLOCK_OPTIMIZERS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}.")
        if self.loss_scale_images < 2:
            raise ValueError(f"loss_scale_images={self.loss_scale_images}: a variance needs at least 2 images.")
        for stage in STAGES:
            self.objective_for(stage)

    def objective_for(self, stage: str) -> DistillationObjective:
        """What `stage`, `"blocks"` or `"end_to_end"`, minimises.

        Raises:
            ValueError: if an option is unknown or out of range.
        """
        return DistillationObjective(
            stage=stage,
            objective=self.objective or "hybrid",
            error=self.error or "mse",
            layer_reduction=self.layer_reduction or "mean",
            last_block_weights=_token_weights("last_block_weights", self.last_block_weights),
            end_to_end_weights=_token_weights("end_to_end_weights", self.end_to_end_weights),
            horizon=self.horizon,
            input_noise_std=self.input_noise_std,
            direction_weight=self.direction_weight or 0.0,
        )

    def stage_arguments(self) -> dict[str, "DistillationArguments"]:
        """Arguments of the runs that `stage="both"` consists of, by stage: each in its sub-folder of `output_dir`, with
        its share of the steps or epochs, at least one step each. A stage whose share is 0 is left out.
        """
        shares = {"blocks": self.blocks_share or 0.0, "end_to_end": 1.0 - (self.blocks_share or 0.0)}
        stages = {}
        for stage in STAGES:
            if shares[stage] == 0:
                continue
            args = copy.copy(self)
            args.stage = stage  # type: ignore[assignment]
            args.output_dir = str(Path(str(self.output_dir)) / stage)
            args.push_to_hub = False
            if args.max_steps > 0:
                done = round(args.max_steps * shares["blocks"])
                if 0 < shares["blocks"] < 1:  # both stages run: at least one step each, together no more than asked
                    done = min(max(1, done), max(1, args.max_steps - 1))
                args.max_steps = max(1, done if stage == "blocks" else args.max_steps - done)
            args.num_train_epochs = (args.num_train_epochs or 0.0) * shares[stage]
            stages[stage] = args
        return stages

    def teacher_forcing_weight(self, stage: str, step: int, max_steps: int) -> float:
        """Lambda of the hybrid loss at `step` of `max_steps`: from `teacher_forcing_start` linearly to 0 over the first
        `teacher_forcing_share` of stage 1; 0 in stage 2.
        """
        last = (self.teacher_forcing_share or 0.0) * max_steps
        if stage != "blocks" or step >= last:
            return 0.0
        return (self.teacher_forcing_start or 0.0) * (1 - step / last)


def _has_bf16(use_cpu: bool) -> bool:
    """Whether matrix products in bfloat16 are computed as such, and not emulated."""
    if not use_cpu and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # of recent versions
    return use_cpu and bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def _token_weights(name: str, values: list[float] | None) -> dict[str, float] | None:
    if values == [1.0]:
        return None
    if values is None or len(values) != len(TOKEN_GROUPS):
        groups = ", ".join(TOKEN_GROUPS)
        raise ValueError(f"{name}={values}: give three weights, of {groups}, or 1 for all tokens alike.")
    return dict(zip(TOKEN_GROUPS, values, strict=True))
