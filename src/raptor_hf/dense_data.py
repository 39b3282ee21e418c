"""Images with a label for every pixel: ADE20K (SceneParse150) and NYU Depth v2 in the layouts they are spread in.

Image and label always share one frame. Labels are class numbers from 0, with 255 where there is none, or depths in
metres, with 0 where there is none. Nothing is resized here.
"""

import contextlib
import copy
import csv
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image

from .data import IMAGE_COLUMNS, IMAGE_SUFFIXES, READ_ERRORS, UPRIGHT, decode_image
from .hub_data import load_hub_dataset

logger = logging.getLogger(__name__)
IGNORE_INDEX = 255
ADE_CLASSES = 150
ADE_FOLDER = "ADEChallengeData2016"
ADE_NAMES = "objectInfo150.txt"
MASK_COLUMNS = ("annotation", "annotations", "label", "labels", "mask", "segmentation_mask")
DEPTH_COLUMNS = ("depth_map", "depth", "label")
_ADE_SPLITS = {
    "train": "training",
    "training": "training",
    "validation": "validation",
    "val": "validation",
    "test": "validation",  # the held-out images with labels; the challenge's test set has none
}
_NYU_SPLITS = {"train": "train", "test": "test", "validation": "test", "val": "test"}
_MILLIMETRES = 1000
_EIGHT_BIT_METRES = 10 / 255  # of nyu2_train's 8-bit files
_LEAVE_OUT = "replace it, or leave damaged pairs out (--on-error skip, without_damaged())."
_FULL_ADE = "is the full ADE20K with its 3,000 classes; the probe takes SceneParse150, the folder ADEChallengeData2016."


class UnreadableError(ValueError):
    """A file of a pair is damaged; the message names it."""


class DenseDataset(torch.utils.data.Dataset):
    """Pairs of an upright RGB image and its label: `{"image": PIL.Image.Image, "label": numpy (height, width)}`.

    Where an image is stored turned (an EXIF orientation), a label of the stored size is turned with it, and one of
    another size is taken as it is. Labels have the dtype that `read_label` gives: uint8 classes, or float32 metres.
    `num_skipped` counts damaged pairs that were left out.

    Args:
        images: an image a row: a path, file contents, a PIL image, or the `{"bytes", "path"}` of `datasets`.
        labels: a label a row, as `read_label` takes it.
        read_label: a label and its name, for messages, to `(height, width)`.
        name: of the dataset in reports.
        label_names: of the classes, where they are known.

    Raises:
        ValueError: if the numbers differ; on access, if a file cannot be read ([`UnreadableError`]), or an upright
            image and its label differ in size: it names both.
    """

    def __init__(
        self, images: Sequence[Any], labels: Sequence[Any], read_label: Callable[[Any, str], np.ndarray], name: str,
        label_names: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        if len(images) != len(labels):
            raise ValueError(f"{name}: {len(images)} images and {len(labels)} labels; every image needs one.")
        self.name, self.label_names, self.num_skipped = name, label_names, 0
        self._images, self._labels, self._read_label = images, labels, read_label
        self._rows: Sequence[int] = range(len(images))

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, indices: Iterable[int]) -> "DenseDataset":
        """The pairs at `indices`, in that order; nothing is read."""
        subset = copy.copy(self)
        subset._rows = [self._rows[index] for index in indices]
        return subset

    def without_damaged(self) -> "DenseDataset":
        """The pairs without those of which a file cannot be read, which are logged and counted; decodes each pair once.

        Raises:
            ValueError: if no pair can be read, or a pair breaks another rule.
        """
        readable = []
        for index in range(len(self)):
            try:
                self[index]
                readable.append(index)
            except UnreadableError as damage:
                logger.warning("Left out: %s", damage)
        if not readable:
            raise ValueError(f"none of the {len(self)} pairs of {self.name} can be read; the log names the causes.")
        subset = self.select(readable)
        subset.num_skipped = self.num_skipped + len(self) - len(readable)
        return subset

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        image, label = self._images[row], self._labels[row]
        image_name, label_name = (_name_of(value, f"{row} of {self.name}") for value in (image, label))
        stored = _open(image, f"image {image_name}")
        mask, turn = self._read_label(label, label_name), _orientation(stored)
        if turn is not None and mask.shape == stored.size[::-1]:
            mask = np.array(Image.fromarray(mask).transpose(turn))
        upright = decode_image(stored)
        if mask.shape != upright.size[::-1]:
            raise ValueError(
                f"image {image_name} has {upright.width} x {upright.height} pixels, its label {label_name} "
                f"{mask.shape[1]} x {mask.shape[0]}; a label must have its image's size."
            )
        return {"image": upright, "label": mask}


def load_segmentation(source: Any, split: str = "validation", *, revision: str | None = None) -> DenseDataset:
    """ADE20K's 150 classes: 0 of a mask, which says "none of them", becomes 255, and 1 .. 150 become 0 .. 149.

    Args:
        source: the folder `ADEChallengeData2016` or the one above it (`images/` and `annotations/`, each with
            `training/` and `validation/`); a `datasets.Dataset` or Hub id with an image and a mask column.
        split: `"train"` or `"validation"` (also `"test"`); of a Hub dataset its own names.
        revision: of a Hub dataset.

    Raises:
        ValueError: if there is no such layout or split, a mask is missing, or the folder holds the full ADE20K; on
            access, if a mask has a number above 150 or three channels.
    """
    folder = _folder(source)
    if folder is None:
        rows, name = _rows(source, split, revision)
        return DenseDataset(*_columns(rows, MASK_COLUMNS, name), read_label=_read_mask, name=name)
    root = folder / ADE_FOLDER if (folder / ADE_FOLDER).is_dir() else folder
    if any(root.glob("index_ade20k.*")) or (root / "images" / "ADE").is_dir():
        raise ValueError(f"{source} {_FULL_ADE}")
    own = _split_of(split, _ADE_SPLITS, ADE_FOLDER)
    images, masks = (root / part / own for part in ("images", "annotations"))
    if not images.is_dir() or not masks.is_dir():
        wanted = f"{images} and {masks} are expected"
        raise ValueError(f"{source} is not laid out as {ADE_FOLDER}: {wanted}.{_script(folder)}")
    by_stem = {path.stem: path for path in masks.iterdir() if path.suffix.lower() == ".png"}
    if any(stem.endswith("_seg") for stem in by_stem):
        raise ValueError(f"{source} {_FULL_ADE}")
    paths = _sorted_images(images)
    missing = [path.name for path in paths if path.stem not in by_stem]
    if missing or not paths:
        raise ValueError(f"{len(missing)} of {len(paths)} images in {images} have no mask in {masks}: {missing[:3]}.")
    names = _class_names(root / ADE_NAMES)
    return DenseDataset(paths, [by_stem[path.stem] for path in paths], _read_mask, ADE_FOLDER, names)


def load_depth(source: Any, split: str = "test", *, revision: str | None = None) -> DenseDataset:
    """NYU Depth v2 in metres, float32; 0 and what is no finite number become 0, no depth.

    Args:
        source: a folder with `nyu2_train.csv` and `nyu2_test.csv` (here or in `data/`), whose rows name an image and a
            depth; or with h5 files of `rgb` and `depth` in `train/` and `val/`; the official labelled `.mat` file, with
            `splits.mat` beside it; or a `datasets.Dataset` or Hub id with an image and a depth column. Depth pictures
            hold millimetres in 16 bits or metres in `F`; 8 bits, value / 255 * 10 m, in `nyu2_train.csv` alone.
        split: `"train"` or `"test"`; of a Hub dataset its own names.
        revision: of a Hub dataset.

    Raises:
        ValueError: if there is no such layout or split, or a file is missing; on access, if a depth has 8 bits.
        ImportError: for h5 and `.mat` files without the extra `nyu`.
    """
    folder = _folder(source)
    if folder is None and str(source).endswith(".mat"):
        return _from_mat(Path(source), _split_of(split, _NYU_SPLITS, "NYU Depth v2"))
    if folder is None:
        rows, name = _rows(source, split, revision)
        return DenseDataset(*_columns(rows, DEPTH_COLUMNS, name), read_label=read_depth, name=name)
    own = _split_of(split, _NYU_SPLITS, "NYU Depth v2")
    for table in (folder / f"nyu2_{own}.csv", folder / "data" / f"nyu2_{own}.csv"):
        if table.is_file():
            return _from_csv(table, eight_bit=own == "train")
    part = folder / {"train": "train", "test": "val"}[own]
    files = sorted(part.rglob("*.h5")) if part.is_dir() else []
    if not files:
        raise ValueError(
            f"{source} is not laid out as NYU Depth v2: nyu2_{own}.csv, or h5 files in {part.name}/, are expected."
            f"{_script(folder)}"
        )
    return DenseDataset(_Lazy(files, _h5_image), _Lazy(files, _h5_depth), _as_metres, folder.name)


def read_depth(value: Any, name: str, eight_bit: bool = False) -> np.ndarray:
    """A depth map in metres, float32 `(height, width)`, 0 where there is none.

    Args:
        value: path, file contents, PIL image or `{"bytes", "path"}`: 16-bit pictures hold millimetres, `F` metres. Or
            an array of metres in floating point.
        name: for messages.
        eight_bit: whether an 8-bit picture is one of `nyu2_train`, value / 255 * 10 m, and no mistake.

    Raises:
        ValueError: if it cannot be read, or is of another kind.
    """
    if isinstance(value, np.ndarray | list):
        return _as_metres(value, name)
    picture = _open(value, f"depth {name}")
    if picture.mode == "F":
        return _as_metres(np.asarray(picture), name)
    if picture.mode.startswith("I"):
        return (np.asarray(picture).astype(np.float64) / _MILLIMETRES).astype(np.float32)
    if picture.mode == "L" and eight_bit:
        return (np.asarray(picture).astype(np.float64) * _EIGHT_BIT_METRES).astype(np.float32)
    raise ValueError(
        f"depth {name} is a picture of mode {picture.mode}: 8 bits cannot hold a depth. Give millimetres in 16 bits, "
        "or metres in floating point."
    )


def _class_names(table: Path) -> list[str] | None:
    """Names of the 150 classes in their order, of `objectInfo150.txt` as it comes with the images, if it is there."""
    if not table.is_file():
        return None
    with open(table, newline="", encoding="utf-8") as file:
        rows = {int(row["Idx"]): row["Name"] for row in csv.DictReader(file, delimiter="\t")}
    return [re.split("[;,]", rows.get(number, f"class {number}"))[0].strip() for number in range(1, ADE_CLASSES + 1)]


def _read_mask(value: Any, name: str) -> np.ndarray:
    picture = _open(value, f"mask {name}")
    if picture.mode not in ("L", "P", "I", "I;16"):
        raise ValueError(
            f"mask {name} is a picture of mode {picture.mode}, expected one number a pixel; it {_FULL_ADE}"
        )
    mask = np.asarray(picture).astype(np.int64)
    if mask.max(initial=0) > ADE_CLASSES:
        raise ValueError(
            f"mask {name} holds {mask.max()}, SceneParse150 has 0 .. {ADE_CLASSES}; use its masks as they are."
        )
    return np.where(mask == 0, IGNORE_INDEX, mask - 1).astype(np.uint8)


def _as_metres(value: Any, name: str) -> np.ndarray:
    depth = np.asarray(value)
    if depth.ndim != 2 or not np.issubdtype(depth.dtype, np.floating):
        raise ValueError(
            f"depth {name} is an array of {depth.dtype} {depth.shape}; give (height, width) in metres, float."
        )
    return np.where(np.isfinite(depth) & (depth > 0), depth, 0).astype(np.float32)


def _open(value: Any, what: str) -> Image.Image:
    """A picture as it is stored, read whole."""
    picture = None
    try:
        if isinstance(value, Mapping):
            value = value["path"] if value.get("bytes") is None else value["bytes"]
        if isinstance(value, Image.Image):
            value.load()
            return value
        picture = Image.open(BytesIO(value) if isinstance(value, bytes) else value)
        picture.load()
    except READ_ERRORS as error:
        if picture is not None:
            picture.close()
        raise UnreadableError(f"{what} cannot be read: {error}; {_LEAVE_OUT}") from error
    return picture


def _orientation(picture: Image.Image) -> Image.Transpose | None:
    """How a picture is turned upright; broken metadata say nothing."""
    with contextlib.suppress(*READ_ERRORS):
        turn = UPRIGHT.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
        return None if turn is None else Image.Transpose(turn)
    return None


class _Lazy(Sequence):
    """Items that are made when they are asked for; can be sent to workers if `make` can."""

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self.items, self.make = items, make

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.make(self.items[index])
        except (OSError, KeyError) as error:
            raise UnreadableError(f"{self.items[index]} cannot be read: {error}; {_LEAVE_OUT}") from error


def _name_of(value: Any, otherwise: str) -> str:
    path = value.get("path") if isinstance(value, Mapping) else getattr(value, "filename", value)
    return str(path) if isinstance(path, (str, Path)) and str(path) else otherwise


def _folder(source: Any) -> Path | None:
    """A folder that is there; `None` for what may be a Hub id or an object."""
    if not isinstance(source, (str, Path)):
        return None
    path = Path(source).expanduser()
    if not path.is_dir() and (isinstance(source, Path) or source.startswith((".", "/", "~")) or len(path.parts) > 2):
        if path.is_file() and path.suffix == ".mat":
            return None
        raise ValueError(f"folder {source} does not exist; check the path, or pass a Hub dataset id.")
    return path if path.is_dir() else None


def _rows(source: Any, split: str, revision: str | None) -> tuple[Any, str]:
    """A `datasets.Dataset`, and its name."""
    import datasets

    if not isinstance(source, (str, Path)):
        name = str(getattr(source, "builder_name", None) or type(source).__name__)
        return (source[split] if isinstance(source, datasets.DatasetDict) else source), name
    return load_hub_dataset(str(source), split=split, revision=revision), str(source)


def _columns(rows: Any, label_names: Sequence[str], name: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """Images and labels of rows, undecoded."""
    import datasets

    chosen = []
    for what, names in (("image", IMAGE_COLUMNS), ("label", label_names)):
        column = next((column for column in names if column in rows.column_names), None)
        if column is None:
            raise ValueError(
                f"{name} has no {what} column among {', '.join(names)}, only {', '.join(rows.column_names)}; rename it."
            )
        if isinstance(rows.features[column], datasets.Image):
            rows = rows.cast_column(column, datasets.Image(decode=False))
        chosen.append(column)
    image, label = chosen
    numbers = range(len(rows))
    return _Lazy(numbers, partial(_cell, rows, image)), _Lazy(numbers, partial(_cell, rows, label))


def _cell(rows: Any, column: str, index: int) -> Any:
    return rows[index][column]


def _sorted_images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)


def _script(folder: Path) -> str:
    """A word on a folder that holds a loading script, which is not run."""
    script = next(folder.glob("*.py"), None)
    return f" {script.name} is not run: datasets that are scripts are not supported." if script else ""


def _split_of(split: str, splits: Mapping[str, str], name: str) -> str:
    if split not in splits:
        raise ValueError(f"split={split!r} of {name}; use one of {', '.join(splits)}.")
    return splits[split]


def _from_csv(table: Path, eight_bit: bool) -> DenseDataset:
    with open(table, newline="", encoding="utf-8") as file:
        rows = [row[:2] for row in csv.reader(file) if row]
    if rows and Path(rows[0][0]).suffix.lower() not in IMAGE_SUFFIXES:
        rows = rows[1:]  # a header
    if not rows or any(len(row) != 2 for row in rows):
        raise ValueError(f"{table} must name an image and a depth in each row, with a comma between.")
    bases = (table.parent, table.parent.parent)
    base = next((base for base in bases if (base / rows[0][0]).is_file()), bases[0])
    pairs = [[base / cell for cell in row] for row in rows]
    missing = [path for pair in pairs for path in pair if not path.is_file()]
    if missing:
        raise ValueError(f"{table} names {len(missing)} files that are not there, the first is {missing[0]}.")
    images, depths = zip(*pairs, strict=True)
    return DenseDataset(images, depths, partial(read_depth, eight_bit=eight_bit), table.stem)


def _from_mat(path: Path, split: str) -> DenseDataset:
    """The labelled NYU Depth v2: MATLAB's axes are the other way round."""
    h5py, scipy_io = _extra("h5py"), _extra("scipy.io")
    chosen = path.with_name("splits.mat")
    if not path.is_file() or not chosen.is_file():
        raise ValueError(f"{path if chosen.is_file() else chosen} does not exist; the official split is in splits.mat.")
    numbers = scipy_io.loadmat(chosen)[f"{split}Ndxs"].ravel().astype(int) - 1
    with h5py.File(path) as file:
        if "images" not in file or "depths" not in file:
            raise ValueError(f"{path} has no images and depths; give nyu_depth_v2_labeled.mat.")
    rows = [(path, int(number)) for number in numbers]
    return DenseDataset(_Lazy(rows, _mat_image), _Lazy(rows, _mat_depth), _as_metres, path.stem)


def _mat_image(row: tuple[Path, int]) -> Image.Image:
    with _extra("h5py").File(row[0]) as file:
        return Image.fromarray(np.ascontiguousarray(file["images"][row[1]].transpose(2, 1, 0)))


def _mat_depth(row: tuple[Path, int]) -> np.ndarray:
    with _extra("h5py").File(row[0]) as file:
        return file["depths"][row[1]].transpose(1, 0)


def _h5_image(path: Path) -> Image.Image:
    with _extra("h5py").File(path) as file:
        pixels = file["rgb"][()]
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0) if len(pixels) == 3 else pixels))


def _h5_depth(path: Path) -> np.ndarray:
    with _extra("h5py").File(path) as file:
        return file["depth"][()]


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{module} is needed for this layout; install it with: pip install "raptor_hf[nyu]"'
        ) from error
