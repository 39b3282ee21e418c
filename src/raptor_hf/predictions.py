"""What dense probes predict for a few images, beside the results: `FOLDER/images.npz` and one file per model.

All are made small enough for a page; a mask by the nearest neighbour, so that its classes stay classes.
"""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from .results import write_file

PREDICTIONS_FOLDER = "predictions"
LONGEST_SIDE = 256  # pixels of a stored picture
_IMAGES = "images"


def chosen(count: int, number: int) -> list[int]:
    """Up to `number` of `count` images, evenly over the set."""
    return [round(position) for position in np.linspace(0, count - 1, min(count, number))]


def save_pairs(folder: str | os.PathLike[str], pairs: Iterable[Mapping[str, object]]) -> Path:
    """Writes `{"image": PIL.Image.Image, "label": (height, width)}` of every pair; returns the file."""
    stored = {}
    for number, pair in enumerate(pairs):
        stored[f"image_{number}"] = np.array(_small(pair["image"], Image.Resampling.BICUBIC))
        stored[f"label_{number}"] = _small_map(pair["label"])
    return _write(Path(folder) / f"{_IMAGES}.npz", stored)


def save_predictions(folder: str | os.PathLike[str], model: str, maps: Sequence[np.ndarray]) -> Path:
    """Writes a model's maps `(height, width)`, one for each pair; returns the file.

    Raises:
        ValueError: if the model has the name of the images' own file.
    """
    if model == _IMAGES:
        raise ValueError(f"a model called {model!r} has the name of the images' own file; rename it.")
    return _write(Path(folder) / f"{model}.npz", {f"map_{number}": _small_map(one) for number, one in enumerate(maps)})


def load_predictions(
    folder: str | os.PathLike[str], models: Iterable[str]
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, list[np.ndarray]]] | None:
    """Images `(height, width, 3)`, labels, and maps of the models that are there; `None` without images."""
    folder = Path(folder)
    if not (folder / f"{_IMAGES}.npz").is_file():
        return None
    pairs = _read(folder / f"{_IMAGES}.npz")
    images, labels = ([pairs[f"{part}_{number}"] for number in range(len(pairs) // 2)] for part in ("image", "label"))
    paths = {model: folder / f"{model}.npz" for model in models}
    found = {model: _read(path) for model, path in paths.items() if path.is_file()}
    return images, labels, {model: [maps[f"map_{i}"] for i in range(len(maps))] for model, maps in found.items()}


def _small(picture: object, resample: Image.Resampling) -> Image.Image:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(np.asarray(picture))
    scale = LONGEST_SIDE / max(image.size)
    return image if scale >= 1 else image.resize([max(1, round(side * scale)) for side in image.size], resample)


def _small_map(values: object) -> np.ndarray:
    array = np.asarray(values)
    stored = array.astype(np.uint8 if np.issubdtype(array.dtype, np.integer) else np.float32)
    return np.array(_small(Image.fromarray(stored), Image.Resampling.NEAREST))


def _write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # no array is called allow_pickle
    return write_file(path, buffer.getvalue())


def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)
