"""Raptor for Hugging Face: Vision Transformers rewritten as a few weight-tied blocks applied again and again.

Importing the package registers the Auto classes and nothing else; every name below the models is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from .configuration_raptor import RaptorConfig
from .modeling_raptor import RaptorModel
from .modeling_raptor_heads import RaptorForImageClassification

if TYPE_CHECKING:
    from .phases import Phases, find_phases, layer_similarity
    from .teachers import Teacher
    from .trainer import DistillationArguments, RaptorDistillationTrainer

__version__ = "0.1.0"
__all__ = [
    "DistillationArguments",
    "Phases",
    "RaptorConfig",
    "RaptorDistillationTrainer",
    "RaptorForImageClassification",
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
    "layer_similarity": "phases",
}

AutoConfig.register("raptor", RaptorConfig, exist_ok=True)
AutoModel.register(RaptorConfig, RaptorModel, exist_ok=True)
AutoModelForImageClassification.register(RaptorConfig, RaptorForImageClassification, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
