"""Backbones named on the command line: Raptors and ViTs, from folders or the Hub."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoImageProcessor

from ..modeling_raptor import RaptorModel
from ..results import RESULTS_FILE, read_json
from ..teachers import Teacher
from ..vision_models import public_name
from .common import require_weights
from .values import UsageError


def short_names(names: list[str]) -> list[str]:
    """Short names, as long as needed to be told apart; a Raptor that was distilled here has the name it got then."""
    short = [_distilled_name(Path(name) / RESULTS_FILE) or public_name(name) for name in names]
    parents = [f"{Path(name).resolve().parent.name}/{label}" for name, label in zip(names, short, strict=True)]
    return [long if short.count(label) > 1 else label for label, long in zip(short, parents, strict=True)]


def _distilled_name(path: Path) -> str | None:
    """Name of the only model of a `results.json`, if there is such a file."""
    models = (read_json(path).get("models") or []) if path.is_file() else []
    return models[0].get("name") if len(models) == 1 else None


def load_backbone(name: str) -> tuple[RaptorModel | Teacher, Any]:
    """A Raptor or a [`~raptor_hf.Teacher`] and its image processor, on the accelerator if there is one.

    Raises:
        UsageError: if it cannot be loaded, or has no image processor.
    """
    try:
        config = AutoConfig.from_pretrained(name)
        if config.model_type == "raptor":
            if Path(name).is_dir():
                require_weights(name)
            model, processor = RaptorModel.from_pretrained(name), AutoImageProcessor.from_pretrained(name)
            return to_accelerator(model), processor
        teacher = Teacher.from_pretrained(name)
    except OSError as error:
        raise UsageError(f"model {name!r} cannot be loaded: {error}") from error
    if teacher.image_processor is None:
        raise UsageError(f"model {name!r} has no image processor; add a preprocessor_config.json to its folder.")
    to_accelerator(teacher.model)
    return teacher, teacher.image_processor


def to_accelerator(model: Any) -> Any:
    """`model`, on the accelerator if there is one."""
    return model.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else model
