"""Raptor for Hugging Face: Vision Transformers rewritten as a few weight-tied blocks applied again and again.

Importing the package registers the Auto classes and nothing else; every name below the models is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
)

from .configuration_raptor import RaptorConfig
from .modeling_raptor import (
    RaptorBackbone,
    RaptorForDepthEstimation,
    RaptorForImageClassification,
    RaptorForSemanticSegmentation,
    RaptorModel,
)

if TYPE_CHECKING:
    from .phases import Phases, find_phases
    from .teachers import Teacher
    from .trainer import DistillationArguments, RaptorDistillationTrainer

__version__ = "0.1.0"
__all__ = [
    "DistillationArguments",
    "Phases",
    "RaptorBackbone",
    "RaptorConfig",
    "RaptorDistillationTrainer",
    "RaptorForDepthEstimation",
    "RaptorForImageClassification",
    "RaptorForSemanticSegmentation",
    "RaptorModel",
    "Teacher",
    "find_phases",
    "layer_similarity",
]
_LAZY = {
    "DistillationArguments": "trainer",
    "Phases": "phases",
    "RaptorDistillationTrainer": "trainer",
    "Teacher": "teachers",
    "find_phases": "phases",
    "layer_similarity": "similarity",
}

AutoConfig.register("raptor", RaptorConfig, exist_ok=True)
AutoModel.register(RaptorConfig, RaptorModel, exist_ok=True)
AutoBackbone.register(RaptorConfig, RaptorBackbone, exist_ok=True)
AutoModelForImageClassification.register(RaptorConfig, RaptorForImageClassification, exist_ok=True)
AutoModelForSemanticSegmentation.register(RaptorConfig, RaptorForSemanticSegmentation, exist_ok=True)
AutoModelForDepthEstimation.register(RaptorConfig, RaptorForDepthEstimation, exist_ok=True)
# A saved model brings its code along, for where this package is not installed.
RaptorConfig.register_for_auto_class()
RaptorModel.register_for_auto_class("AutoModel")
RaptorBackbone.register_for_auto_class("AutoBackbone")
RaptorForImageClassification.register_for_auto_class("AutoModelForImageClassification")
RaptorForSemanticSegmentation.register_for_auto_class("AutoModelForSemanticSegmentation")
RaptorForDepthEstimation.register_for_auto_class("AutoModelForDepthEstimation")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
