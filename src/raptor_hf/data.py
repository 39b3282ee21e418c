"""Images in, pixel tensors out: the bundled digits, folders, Hub datasets and `datasets.Dataset` objects as one type.

Every source becomes an [`ImageDataset`] of upright 3-channel images, all read by one function, so that a file's mode,
EXIF tag or damage is treated alike everywhere. [`PixelDataset`] applies the model's own image processor, so that
training, probes and the saved `preprocessor_config.json` agree.
"""

import contextlib
import copy
import logging
import math
import operator
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

logger = logging.getLogger(__name__)

AUGMENTATIONS = ("none", "crop_flip")
IMAGE_SUFFIXES = frozenset(
    ".jpg .jpeg .jfif .png .bmp .gif .tif .tiff .webp .avif .jp2 .ppm .pgm .pbm .pnm .tga".split()
)
IMAGE_COLUMNS = ("image", "img", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "fine_label")
# Names under which a split is looked for, in this order.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing", "validation", "valid", "val"),
    "validation": ("validation", "valid", "val"),
}
_SPLIT_FOLDERS = {folder for folders in SPLIT_NAMES.values() for folder in folders}
# What Pillow raises on damaged data; an error that is not about the file is chained, so nothing is hidden.
_READ_ERRORS: tuple[type[Exception], ...] = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError),
    *(AssertionError, struct.error, Image.DecompressionBombError),
)
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = dict(
    enumerate("FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90".split(), 2)
)


def to_rgb(image: Image.Image) -> Image.Image:
    """3-channel copy of an image of any mode; an opaque RGB image is returned as is.

    Transparency (an alpha channel, a palette with alpha or a transparent colour) is composited on white. 16-bit grey
    (`I;16` in either byte order, and `I`, which holds such files too) is scaled by its full range, 0..65535 to 0..255,
    never by the values found. `F` is taken as 0..1 if no value exceeds 1, else as 0..255. Values out of range are
    clipped. CMYK is converted without a colour profile; Pillow has already inverted Adobe's JPEGs.
    """
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.float64)
        return _grey_to_rgb(np.where(levels == image.info.get("transparency", -1), 255, levels / 257))
    if image.mode == "F":
        levels = np.nan_to_num(np.asarray(image, dtype=np.float64))
        return _grey_to_rgb(levels * 255 if levels.max() <= 1 else levels)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_to_rgb(levels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(levels.clip(0, 255)).astype(np.uint8)).convert("RGB")


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    method = None
    with contextlib.suppress(*_READ_ERRORS):  # broken metadata never make an image unreadable
        # Not ImageOps.exif_transpose, which also rewrites the metadata and fails where they are broken.
        method = _UPRIGHT.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    if method is None:
        return to_rgb(image)
    rotated = to_rgb(image).transpose(Image.Transpose[method])
    rotated.info.clear()  # the tag must not rotate the image a second time
    return rotated


def _decode(value: Any) -> Image.Image:
    """Upright RGB image from a PIL image, file contents, a path, or the `{"bytes", "path"}` of `datasets`."""
    if isinstance(value, Mapping):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, Image.Image):
        return _upright_rgb(value)
    with Image.open(BytesIO(value) if isinstance(value, bytes) else value) as image:
        return _upright_rgb(image)


class ImageDataset(torch.utils.data.Dataset):
    """Upright RGB images with class labels; item `i` is `{"image": PIL.Image.Image, "label": int}`.

    Photos are turned upright by their EXIF orientation, as `datasets` does; of an animation the first frame is read.
    Items of an unlabelled dataset have no `"label"`. Built by [`load_images`].

    Args:
        images (`Sequence`): PIL images, file contents, paths, or the `{"bytes", "path"}` pairs of `datasets`.
        labels (`list[int]`, *optional*): class of each image, 0-based.
        label_names (`list[str]`, *optional*): name of each class.
        name (`str`): the dataset's name in reports, without machine paths.

    Attributes:
        num_skipped (`int`): damaged images that were left out on loading.

    Raises:
        ValueError: on access, if an image cannot be read; names its path and index.
    """

    def __init__(
        self, images: Any, labels: list[Any] | None = None, label_names: list[str] | None = None, name: str = "images"
    ) -> None:
        self.labels, self.label_names, self.name, self.num_skipped = labels, label_names, name, 0
        self._images, self._rows = images, np.arange(len(images))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = int(self._rows[operator.index(index)])
        path: Any = None
        try:
            value = self._images[row]
            path = value.get("path") if isinstance(value, Mapping) else getattr(value, "filename", value)
            image = _decode(value)
        except _READ_ERRORS as error:
            where = path if isinstance(path, (str, os.PathLike)) and path else f"row {row} of the source"
            raise ValueError(
                f"image {index} of {self.name!r} ({where}) cannot be read: {error}; replace it, or load with "
                "on_error='skip' to leave damaged images out."
            ) from error
        return {"image": image} if self.labels is None else {"image": image, "label": self.labels[index]}

    def select(self, indices: Iterable[int]) -> "ImageDataset":
        """Dataset of the images at `indices`, in that order; nothing is read."""
        indices, subset = list(indices), copy.copy(self)
        subset._rows = self._rows[np.array(indices, dtype=np.int64)]
        subset.labels = None if self.labels is None else [self.labels[index] for index in indices]
        return subset

    def without_damaged(self) -> "ImageDataset":
        """Dataset without unreadable images, which are logged and counted; decodes each image once, on one core.

        Raises:
            ValueError: if no image can be read.
        """
        readable, error = [], None
        for index in range(len(self)):
            try:
                self[index]
                readable.append(index)
            except ValueError as damage:
                error = damage
                logger.warning("Left out: %s", damage)
        if not readable:
            raise ValueError(f"none of the {len(self)} images of {self.name!r} can be read.") from error
        subset = self.select(readable)
        subset.num_skipped = self.num_skipped + len(self) - len(readable)
        return subset


def load_images(
    source: Any,
    *,
    split: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    on_error: str = "raise",
    max_images: int | None = None,
    seed: int = 0,
    revision: str | None = None,
) -> ImageDataset:
    """Images, and class labels if there are any, from one of four kinds of source.

    - `"digits"`: scikit-learn's 1,797 handwritten digits, grey, 8 x 8; `train` 1,437, `test` 360 (stratified, fixed).
    - a folder: one sub-folder per class; or `train/` and `test/` (else `validation/`, `val/`) with such sub-folders,
      classes numbered over all splits; or images alone. A folder without splits is its own `train`. Scanned here, not
      by `datasets`' imagefolder: no cached copy that outlives changed files, and errors name the file.
    - the id of a dataset on the Hub, for `datasets.load_dataset`.
    - a `datasets.Dataset` or `DatasetDict` (formats and transforms set on it are not used), or anything with `__len__`
      and `__getitem__` that gives mappings, `(image, label)` pairs or images; it is read once for its labels.

    Args:
        source: see above.
        split (`str`, *optional*): needed where there are several; digits without it are all digits.
        image_column (`str`, *optional*): default `image`, `img` or `pixel_values`; for the last two kinds.
        label_column (`str`, *optional*): default `label`, `labels` or `fine_label`; integers or names. Only -1, the
            Hub's mark for withheld labels, means unlabelled.
        on_error (`str`): `"raise"` when a damaged image is met, or `"skip"`: [`ImageDataset.without_damaged`] now.
        max_images (`int`, *optional*): random subset drawn by `seed`, in the source's order, before anything is
            skipped; a smaller subset is part of a larger one.
        seed (`int`): of the subset.
        revision (`str`, *optional*): commit, tag or branch of a Hub dataset.

    Raises:
        ValueError: if the source, split or column does not exist, holds no image, or an option is unknown.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r} is unknown; use 'raise' or 'skip'.")
    if max_images is not None and max_images < 1:
        raise ValueError(f"max_images={max_images} must be at least 1; leave it out to take all images.")
    columns = (image_column, label_column)
    if isinstance(source, (str, os.PathLike)):
        dataset = _from_name(source, split, columns, revision)
    else:
        dataset = _from_object(source, split, columns)
    if max_images is not None and max_images < len(dataset):
        dataset = dataset.select(np.sort(np.random.default_rng(seed).permutation(len(dataset))[:max_images]).tolist())
    if on_error == "skip":
        dataset = dataset.without_damaged()
    if dataset.labels is not None and None in dataset.labels:
        index = dataset.labels.index(None)
        dataset[index]  # an item that cannot be read has no label either, and says so itself
        raise ValueError(f"image {index} of {dataset.name!r} has no label; drop the row or name another label_column.")
    return dataset


def _from_name(source: Any, split: str | None, columns: tuple[Any, Any], revision: str | None) -> ImageDataset:
    if source == "digits":
        return _digits(split)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _from_folder(folder, split)
    if folder.exists():
        raise ValueError(f"{source} is a file; pass the folder that holds the images (unpack an archive first).")
    if not isinstance(source, str) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ValueError(f"folder {source} does not exist; check the path, or pass 'digits' or a Hub dataset id.")
    return _from_object(_load_hub(source, split, revision), None, columns, source)


def _digits(split: str | None) -> ImageDataset:
    if split not in (None, "train", "test"):
        raise ValueError(f"split={split!r} of 'digits' does not exist; use 'train' or 'test', or leave it out for all.")
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ValueError("'digits' needs scikit-learn: pip install \"raptor_hf[analysis]\"") from error
    digits = load_digits()
    images = [Image.fromarray(pixels) for pixels in np.rint(digits.images * (255 / 16)).astype(np.uint8)]
    dataset = ImageDataset(images, digits.target.tolist(), [str(digit) for digit in range(10)], "digits")
    if split is None:
        return dataset
    train, test = train_test_split(np.arange(len(images)), test_size=360, random_state=0, stratify=digits.target)
    return dataset.select((train if split == "train" else test).tolist())


def _image_files(folder: Path) -> Iterator[str]:
    """Image files below `folder` in sorted order; hidden ones (macOS leaves `._x.jpg`) are no images."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in sorted(files):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield os.path.join(parent, name)


def _image_folders(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [name for name in names if next(_image_files(folder / name), None) is not None]


def _from_folder(root: Path, split: str | None) -> ImageDataset:
    name, classes, base = root.resolve().name, _image_folders(root), root
    splits = [folder for folder in classes if folder.lower() in _SPLIT_FOLDERS]
    if splits and (len(splits) > 1 or splits == classes):  # one folder "train" among others is a class of vehicles
        base = root / _choose_split(splits, split, name)
        classes = sorted({label for folder in splits for label in _image_folders(root / folder)})
    elif split not in (None, "train"):
        raise ValueError(f"folder {name!r} has no split {split!r}: put its images into train/ and test/ sub-folders.")
    files = list(_image_files(base))
    if not files:
        script = next((f", and its script {path.name} is not run (as datasets >= 4)" for path in root.glob("*.py")), "")
        raise ValueError(
            f"folder {base} holds no image{script}; put one sub-folder of images per class there, or train/ and test/ "
            "with such sub-folders, or images alone."
        )
    numbers, start = {label: number for number, label in enumerate(classes)}, len(os.path.join(base, ""))
    labels = [numbers.get(file[start:].split(os.sep, 1)[0], -1) for file in files]
    if max(labels) == -1:
        return ImageDataset(files, name=name)
    labelled = [index for index, label in enumerate(labels) if label != -1]
    if len(labelled) < len(files):
        logger.warning("%d images of %r lie in no class folder: left out.", len(files) - len(labelled), name)
    return ImageDataset(files, labels, classes, name).select(labelled)


def _choose_split(splits: Iterable[Any], split: str | None, name: str) -> Any:
    by_name = {str(candidate).lower(): candidate for candidate in splits}
    if split is None and len(by_name) == 1:
        return next(iter(by_name.values()))
    wanted = str(split).lower()
    for candidate in SPLIT_NAMES.get(wanted, (wanted,)):
        if candidate in by_name:
            return by_name[candidate]
    raise ValueError(f"split={split!r} of {name!r} does not exist; choose one of: {', '.join(by_name)}.")


def _load_hub(source: str, split: str | None, revision: str | None) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{source!r} is no folder here and did not load from the Hub ({' '.join(str(error).split())[:300]}); check "
            "id, split, network and login, or pass a folder of images or a Dataset that you loaded yourself."
        ) from error


class _Column:
    """One part of every item of a source: `items[row][key]`, or the item itself if `key` is None."""

    def __init__(self, items: Any, key: Any) -> None:
        self._items, self._key = items, key

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, row: int) -> Any:
        return self._items[row] if self._key is None else self._items[row][self._key]

    def get(self, row: int) -> Any:
        """As indexing, but None where the item cannot be read."""
        with contextlib.suppress(*_READ_ERRORS):
            return self[row]


def _from_object(source: Any, split: str | None, columns: tuple[Any, Any], name: str | None = None) -> ImageDataset:
    if isinstance(source, Mapping):
        source, split = source[_choose_split(source, split, name or type(source).__name__)], None
    name = name or getattr(getattr(source, "info", None), "dataset_name", None) or type(source).__name__
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ValueError(
            f"{name!r} has no length: streaming datasets are not supported here; load it without streaming=True, or "
            "pass list(dataset.take(n))."
        )
    if split is not None and split != str(getattr(source, "split", None)):
        raise ValueError(f"split={split!r} cannot be taken from one dataset object; pass that split itself.")
    if len(source) == 0:
        raise ValueError(f"dataset {name!r} holds no image; check its split or filter.")
    if hasattr(source, "column_names"):
        return _from_datasets(source, columns, name)
    rows = range(len(source))
    first = next((item for item in map(_Column(source, None).get, rows) if item is not None), None)
    image, label = (0, 1) if isinstance(first, tuple) else (None, None)
    if isinstance(first, Mapping):
        image, label = _find_columns(list(first), columns)
    values = None if label is None else [_Column(source, label).get(row) for row in rows]
    labels, names = _class_numbers(values, getattr(source, "classes", None), name)
    return ImageDataset(_Column(source, image), labels, names, name)


def _from_datasets(source: Any, columns: tuple[Any, Any], name: str) -> ImageDataset:
    from datasets import Image as ImageFeature

    image, label = _find_columns(source.column_names, columns)
    source = source.with_format(None)
    images = source.select_columns([image])
    if isinstance(source.features[image], ImageFeature):
        images = images.cast_column(image, ImageFeature(decode=False))  # a damaged file is then ours to name
    values, names = (
        (None, None) if label is None else (source[label][:], getattr(source.features[label], "names", None))
    )
    return ImageDataset(_Column(images, image), *_class_numbers(values, names, name), name)


def _find_columns(found: list[Any], asked: tuple[Any, Any]) -> tuple[Any, Any]:
    image = asked[0] or next((column for column in IMAGE_COLUMNS if column in found), None)
    label = asked[1] or next((column for column in LABEL_COLUMNS if column in found), None)
    for argument, column in (("image_column", image), ("label_column", label)):
        if column not in found and (argument == "image_column" or column is not None):
            raise ValueError(f"{argument}={column!r} is no column; choose one of: {', '.join(map(str, found))}.")
    return image, label


def _class_numbers(values: list[Any] | None, names: list[str] | None, name: str) -> tuple[Any, Any]:
    known = [value for value in values or [] if value is not None]
    if values is None or all(isinstance(value, (int, np.integer)) and value == -1 for value in known):
        return None, None
    if all(isinstance(value, str) for value in known):
        names = sorted(set(known))
        numbers = {label: number for number, label in enumerate(names)}
        return [numbers.get(value) for value in values], names
    if not all(isinstance(value, (int, np.integer)) for value in known):
        raise ValueError(f"labels of {name!r} are neither integers nor class names; name the right label_column.")
    if min(known) < 0 or (names is not None and max(known) >= len(names)):
        raise ValueError(f"labels of {name!r} run from {min(known)} to {max(known)}; expected 0-based class numbers.")
    return [value if value is None else int(value) for value in values], names and list(names)


def dinov2_processor(image_size: int = 224) -> Any:
    """DINOv2's image processor, values written out: `BitImageProcessor`'s defaults are CLIP's mean and deviation.

    The Pillow backend, so that pixels do not depend on an installed torchvision. It is saved as `BitImageProcessor`;
    `AutoImageProcessor.from_pretrained(path, backend="pil")` gives this class back.

    Args:
        image_size (`int`): side of the centre crop in pixels; the shorter side is resized to 256 / 224 of it.

    Raises:
        ValueError: as [`processor_at_size`].
    """
    from transformers import BitImageProcessorPil

    processor = BitImageProcessorPil(
        do_convert_rgb=True,
        do_resize=True,
        size={"shortest_edge": 256},
        resample=Image.Resampling.BICUBIC,
        do_center_crop=True,
        crop_size={"height": 224, "width": 224},
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    return processor_at_size(processor, image_size)


def processor_at_size(processor: Any, image_size: int) -> Any:
    """Copy of an image processor that gives `image_size x image_size` pixels by the same rule; save this one.

    The ratio of resize to crop is kept: DINOv2's 256 / 224 becomes 112 / 98. A processor that resizes the shorter side
    and does not crop gets a centre crop of that side, which keeps the aspect ratio where a batch needs equal sizes.

    Raises:
        ValueError: if `image_size` is not positive, or the processor does not resize, pads, or gives no square.
    """
    size, crop = dict(getattr(processor, "size", None) or {}), {}
    if getattr(processor, "do_center_crop", None):
        crop = dict(processor.crop_size)
    sides = set((crop or size).values())
    resizes = getattr(processor, "do_resize", None) and set(size) in ({"shortest_edge"}, {"height", "width"})
    if image_size < 1 or not resizes or getattr(processor, "do_pad", None) or len(sides) != 1:
        raise ValueError(
            f"image_size={image_size} cannot be set on {type(processor).__name__} (size={size}, crop_size={crop}): it "
            "must be positive and the processor must resize to a square or a shorter side; else leave image_size out."
        )
    adapted, (side,) = copy.deepcopy(processor), sides
    adapted.size = type(processor.size)(**{key: max(1, round(edge * image_size / side)) for key, edge in size.items()})
    if crop or "shortest_edge" in size:
        adapted.do_center_crop = True
        adapted.crop_size = type(processor.size)(height=image_size, width=image_size)
    return adapted


def _output_size(processor: Any) -> tuple[int, int] | None:
    step = "crop_size" if getattr(processor, "do_center_crop", None) else "size"
    size = dict(getattr(processor, step, None) or {})
    fixed = set(size) == {"height", "width"} and (step == "crop_size" or getattr(processor, "do_resize", None))
    return (size["height"], size["width"]) if fixed else None


def random_crop_box(
    size: tuple[int, int], rng: np.random.Generator, scale: tuple[float, float] = (0.08, 1.0)
) -> tuple[int, int, int, int]:
    """Box `(left, top, right, bottom)` of a RandomResizedCrop: area uniform in `scale`, log-uniform ratio 3/4..4/3.

    After ten boxes that do not fit, the largest centred one within the ratios, as torchvision does.

    Args:
        size (`tuple[int, int]`): width and height of the image in pixels.
        rng (`numpy.random.Generator`): the only source of randomness.
        scale (`tuple[float, float]`): least and greatest share of the image's area.
    """
    width, height = size
    for _ in range(10):
        area, ratio = width * height * rng.uniform(*scale), math.exp(rng.uniform(-1, 1) * math.log(4 / 3))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


class PixelDataset(torch.utils.data.Dataset):
    """Images through a model's image processor; item `i` is `{"pixel_values": float (3, height, width), "label": int}`.

    Training and evaluation input of arXiv 2512.19941, App. A.4: `augment="crop_flip"` is its RandomResizedCrop with
    horizontal flip, `"none"` the processor's own resize and crop. Augmentation is drawn from (seed, epoch, index)
    alone, so that workers, order, prefetching and resuming do not change it.

    Args:
        images ([`ImageDataset`]): what to read.
        processor (`BaseImageProcessor`): the model's; with `"crop_flip"` it only rescales and normalises.
        image_size (`int`, *optional*): side in pixels in place of the processor's, see [`processor_at_size`].
        augment (`str`): `"none"` or `"crop_flip"`.
        scale (`tuple[float, float]`): share of the area that a crop keeps.
        seed (`int`): of the augmentation, 0 or more.

    Attributes:
        processor (`BaseImageProcessor`): the one in use, adapted to `image_size`; the one to save.
        size (`tuple[int, int]`): height and width of every item; None if the processor leaves it to the image.

    Raises:
        ValueError: if an argument is out of range, or (on access) the processor gives another size.
    """

    def __init__(
        self,
        images: ImageDataset,
        processor: Any,
        *,
        image_size: int | None = None,
        augment: str = "none",
        scale: tuple[float, float] = (0.08, 1.0),
        seed: int = 0,
    ) -> None:
        if augment not in AUGMENTATIONS or not 0 < scale[0] <= scale[1] <= 1 or seed < 0:
            raise ValueError(
                f"augment={augment!r}, scale={scale}, seed={seed}: use augment 'none' or 'crop_flip', 0 < scale[0] <= "
                "scale[1] <= 1 and a seed of 0 or more."
            )
        self.images, self.augment, self.scale, self.seed = images, augment, scale, seed
        self.processor = processor if image_size is None else processor_at_size(processor, image_size)
        self.size = _output_size(self.processor)
        if augment == "crop_flip" and self.size is None:
            raise ValueError(
                "augment='crop_flip' needs one output size, but the processor names none; pass image_size."
            )
        # Shared memory, so that workers that outlive an epoch see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the augmentation of `epoch`; the Trainer and accelerate's loaders call it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.images[index]
        if self.augment == "none":
            pixels = self.processor(item.pop("image"), return_tensors="pt")["pixel_values"][0]
        else:
            image = self._crop_and_flip(item.pop("image"), range(len(self))[index])
            prepared = self.processor(image, do_resize=False, do_center_crop=False, return_tensors="pt")
            pixels = prepared["pixel_values"][0]
        if len(pixels) != 3 or self.size not in (None, tuple(pixels.shape[1:])):
            raise ValueError(
                f"{type(self.processor).__name__} made {tuple(pixels.shape)} of image {index}, expected 3 channels and "
                f"size {self.size}; use a processor that follows its size and crop_size."
            )
        return {"pixel_values": pixels, **item}

    def _crop_and_flip(self, image: Image.Image, index: int) -> Image.Image:
        rng = np.random.default_rng([self.seed, int(self._epoch), index])
        height, width = self.size  # type: ignore[misc]
        resample = getattr(self.processor, "resample", None)
        resample = Image.Resampling.BICUBIC if resample is None else Image.Resampling(resample)
        image = image.resize((width, height), resample, box=random_crop_box(image.size, rng, self.scale))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def collate_pixels(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Items of a [`PixelDataset`] as `pixel_values (batch_size, 3, height, width)` and int64 `labels (batch_size,)`.

    Raises:
        ValueError: if the images differ in size.
    """
    shapes = sorted({tuple(item["pixel_values"].shape) for item in batch})
    if len(shapes) > 1:
        raise ValueError(f"images of {shapes[0]} and {shapes[-1]} cannot be stacked; pass image_size to PixelDataset.")
    stacked = {"pixel_values": torch.stack([item["pixel_values"] for item in batch])}
    if "label" in batch[0]:
        stacked["labels"] = torch.tensor([item["label"] for item in batch], dtype=torch.int64)
    return stacked
