"""Metrics as `evaluate.Metric` classes that need no network: make an instance, no `evaluate.load` is involved.

```python
from raptor_hf.metrics import RaptorAccuracy

RaptorAccuracy().compute(predictions=[0, 1], references=[0, 0])["accuracy"]  # 0.5
```

Each file of this folder is also a script that `evaluate.load(path_of_the_file)` accepts: it has one import a line (what
evaluate's scanner understands) and no relative import (the script is copied elsewhere). Importing evaluate takes
seconds, so the classes are imported when they are first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accuracy import RaptorAccuracy
    from .depth import RaptorDepth
    from .fidelity import RaptorFidelity
    from .mean_iou import RaptorMeanIoU

__all__ = ["RaptorAccuracy", "RaptorDepth", "RaptorFidelity", "RaptorMeanIoU"]

_MODULES = {
    "RaptorAccuracy": "accuracy",
    "RaptorDepth": "depth",
    "RaptorFidelity": "fidelity",
    "RaptorMeanIoU": "mean_iou",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
