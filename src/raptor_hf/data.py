"""Images in, pixel tensors out: the bundled digits, folders, Hub datasets and `datasets.Dataset` objects as one type.

Every source becomes an [`ImageDataset`] of upright RGB images read by one function. [`PixelDataset`] applies the
model's own image processor, so that training, probes and the saved `preprocessor_config.json` agree.
"""

import contextlib
import copy
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image

from .hub_data import load_hub_dataset

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = tuple(".jpg .jpeg .jfif .png .bmp .gif .tif .tiff .webp .avif .jp2 .ppm .pgm .pbm .pnm .tga".split())
IMAGE_COLUMNS = ("image", "img", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "fine_label")
HELD_OUT = ("test", "testing", "validation", "valid", "val")
# Names under which a split is looked for, in this order.
SPLIT_NAMES = {"train": ("train", "training"), "test": HELD_OUT, "validation": HELD_OUT[2:]}
# What Pillow raises on damaged data; an error that is not about the file is chained, so nothing is hidden.
READ_ERRORS = (OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError,
                AssertionError, struct.error, Image.DecompressionBombError)  # fmt: skip
UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF orientation to Image.Transpose


def to_rgb(image: Image.Image) -> Image.Image:
    """3-channel copy of an image of any mode; an opaque RGB image is returned as is.

    Transparency (an alpha channel, a palette with alpha or a transparent colour) is composited on white. 16-bit grey
    (`I;16` in either byte order, and `I`, which holds such files too) is scaled by its full range, 0..65535 to 0..255,
    never by the values found. `F` is taken as 0..1 if no value exceeds 1, else as 0..255. Values out of range are
    clipped. CMYK is converted without a colour profile; Pillow has already inverted Adobe's JPEGs.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        levels = np.nan_to_num(np.asarray(image).astype(np.float64))
        scale = 1 / 257 if image.mode != "F" else 255 if levels.max() <= 1 else 1
        levels = np.where(levels == image.info.get("transparency", np.nan), 255, levels * scale)
        return Image.fromarray(np.rint(levels.clip(0, 255)).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_image(value: Any) -> Image.Image:
    """Upright RGB image from a PIL image, file contents, a path, or the `{"bytes", "path"}` of `datasets`."""
    if isinstance(value, Mapping):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if not isinstance(value, Image.Image):
        with Image.open(BytesIO(value) if isinstance(value, bytes) else value) as image:
            return decode_image(image)
    value.load()
    method = None
    with contextlib.suppress(*READ_ERRORS):  # broken metadata never make an image unreadable
        # Not ImageOps.exif_transpose, which also rewrites the metadata and fails where they are broken.
        method = UPRIGHT.get(value.getexif().get(ExifTags.Base.Orientation, 1))
    if method is None:
        return to_rgb(value)
    rotated = to_rgb(value).transpose(Image.Transpose(method))
    rotated.info.clear()  # the tag must not rotate the image a second time
    return rotated


class ImageDataset(torch.utils.data.Dataset):
    """Upright RGB images (EXIF orientation applied, first frame) as `{"image": PIL.Image.Image, "label": int}`.

    Without labels the items have no `"label"`. `num_skipped` counts damaged images that were left out on loading.

    Args:
        images: what has `len` and gives PIL images, file contents, paths, or the `{"bytes", "path"}` of `datasets`.
        labels, label_names (`list`, *optional*): class of each image, 0-based, and name of each class.
        name (`str`): the dataset's name in reports, without machine paths.
        column: the part of each item of `images` that holds the image, if it is not the item itself.

    Raises:
        ValueError: on access, if an image cannot be read; names its path and index.
    """

    def __init__(
        self, images: Any, labels: list[Any] | None = None, label_names: list[str] | None = None,
        name: str = "images", column: str | int | None = None,
    ) -> None:  # fmt: skip
        self.labels, self.label_names, self.name, self.num_skipped = labels, label_names, name, 0
        self._images, self._column, self._rows = images, column, np.arange(len(images))

    @property
    def has_labels(self) -> bool:
        """Whether there are images, each with a label."""
        return len(self) > 0 and self.labels is not None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, path = int(self._rows[index]), None
        try:
            value = self._images[row] if self._column is None else self._images[row][self._column]
            path = value.get("path") if isinstance(value, Mapping) else getattr(value, "filename", value)
            image = decode_image(value)
        except READ_ERRORS as error:
            where = path if isinstance(path, (str, os.PathLike)) and path else f"row {row} of the source"
            damaged = f"image {index} of {self.name!r} ({where}) cannot be read: {error}; replace it, or load"
            raise ValueError(f"{damaged} with on_error='skip' to leave it out.") from error
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
        readable = []
        for index in range(len(self)):
            try:
                self[index]
                readable.append(index)
            except ValueError as damage:
                logger.warning("Left out: %s", damage)
        if not readable:
            raise ValueError(f"none of the {len(self)} images of {self.name!r} can be read; the log names the causes.")
        subset = self.select(readable)
        subset.num_skipped = self.num_skipped + len(self) - len(readable)
        return subset


def load_images(
    source: Any, *, split: str | None = None, image_column: str | None = None, label_column: str | None = None,
    on_error: str = "raise", max_images: int | None = None, seed: int = 0, revision: str | None = None,
) -> ImageDataset:  # fmt: skip
    """Images, and class labels if there are any, from one of four kinds of source.

    - `"digits"`: scikit-learn's 1,797 handwritten digits, grey, 8 x 8; `train` 1,437, `test` 360 (stratified, fixed).
    - a folder: one sub-folder per class; or `train/` and `test/` (else `validation/`, `val/`) with such sub-folders,
      classes numbered over all splits; or images alone. A folder without splits is its own `train`. Scanned here, not
      by `datasets`' imagefolder: no cached copy that outlives changed files, and errors name the file.
    - the id of a dataset on the Hub, for `datasets.load_dataset`.
    - a `datasets.Dataset` or `DatasetDict` (formats and transforms set on it are not used), or anything with `__len__`
      and `__getitem__` that gives mappings, `(image, label)` pairs or images; it is read once for its labels.

    Args:
        source, split: see above; a split is needed where there are several, digits without it are all digits.
        image_column, label_column (`str`, *optional*): of the last two kinds; default `image`, `img` or `pixel_values`,
            and `label`, `labels` or `fine_label`. Labels are integers or names; all -1 means unlabelled.
        on_error (`str`): `"raise"` when a damaged image is met, or `"skip"`: [`ImageDataset.without_damaged`] now.
        max_images, seed (`int`): random subset, drawn before any is skipped; part of every larger one.
        revision (`str`, *optional*): commit, tag or branch of a Hub dataset.

    Raises:
        ValueError: if the source, split or column does not exist, holds no image, or an option is unknown.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error={on_error!r} is unknown; use 'raise' or 'skip'.")
    if max_images is not None and max_images < 1:
        raise ValueError(f"max_images={max_images} must be at least 1; leave it out to take all images.")
    columns = (image_column, label_column)
    named = isinstance(source, (str, os.PathLike))
    dataset = _from_name(source, split, columns, revision) if named else _from_object(source, split, columns)
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
    folder = Path(source).expanduser()
    if source == "digits":
        return _digits(split)
    if folder.is_dir():
        return _from_folder(folder, split)
    if folder.exists():
        raise ValueError(f"{source} is a file; pass the folder that holds the images (unpack an archive first).")
    if not isinstance(source, str) or source.startswith((".", "/", "~")) or len(folder.parts) > 2:
        raise ValueError(f"folder {source} does not exist; check the path, or pass 'digits' or a Hub dataset id.")
    loaded = load_hub_dataset(source, split=split, revision=revision)
    return _from_object(loaded, None, columns, source)


def _digits(split: str | None) -> ImageDataset:
    if split not in (None, "train", "test"):
        raise ValueError(f"split={split!r} of 'digits' does not exist; use 'train' or 'test', or leave it out for all.")
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ValueError("'digits' needs scikit-learn: pip install \"raptor_hf[analysis]\"") from error
    digits = datasets.load_digits()
    images = [Image.fromarray(pixels) for pixels in np.rint(digits.images * (255 / 16)).astype(np.uint8)]
    dataset = ImageDataset(images, digits.target.tolist(), list("0123456789"), "digits")
    parts = model_selection.train_test_split(range(1797), test_size=360, random_state=0, stratify=digits.target)
    return dataset if split is None else dataset.select(parts[split == "test"])


def _image_files(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in sorted(files):  # macOS leaves hidden files like ._x.jpg, which are no images
            if not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES):
                yield os.path.join(parent, name)


def _image_folders(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [name for name in names if next(_image_files(folder / name), None) is not None]


def _from_folder(root: Path, split: str | None) -> ImageDataset:
    name, classes, base = root.resolve().name, _image_folders(root), root
    splits = [folder for folder in classes if folder.lower() in {*SPLIT_NAMES["train"], *HELD_OUT}]
    if splits and (len(splits) > 1 or splits == classes):  # one folder "train" among others is a class of vehicles
        base = root / _choose_split(splits, split, name)
        classes = sorted({label for folder in splits for label in _image_folders(root / folder)})
    elif split not in (None, "train"):
        raise ValueError(f"folder {name!r} has no split {split!r}: put its images into train/ and test/ sub-folders.")
    files = list(_image_files(base))
    if not files:
        script = next((f", and its script {path.name} is not run (as datasets >= 4)" for path in root.glob("*.py")), "")
        layout = "put one sub-folder of images per class there, or train/ and test/ with such, or images alone."
        raise ValueError(f"folder {base} holds no image{script}; {layout}")
    numbers, start = {label: number for number, label in enumerate(classes)}, len(os.path.join(base, ""))
    labels = [numbers.get(file[start:].split(os.sep, 1)[0]) for file in files]
    labelled = [index for index, label in enumerate(labels) if label is not None]
    if not labelled:
        return ImageDataset(files, name=name)
    if len(labelled) < len(files):
        logger.warning("%d images of %r lie in no class folder: left out.", len(files) - len(labelled), name)
    return ImageDataset(files, labels, classes, name).select(labelled)


def _choose_split(splits: Iterable[Any], split: str | None, name: str) -> Any:
    by_name = {str(candidate).lower(): candidate for candidate in splits}
    asked = next(iter(by_name)) if split is None and len(by_name) == 1 else str(split).lower()
    found = next((by_name[key] for key in SPLIT_NAMES.get(asked, (asked,)) if key in by_name), None)
    if found is None:
        raise ValueError(f"split={split!r} of {name!r} does not exist; choose one of: {', '.join(by_name)}.")
    return found


def _from_object(source: Any, split: str | None, columns: tuple[Any, Any], name: str | None = None) -> ImageDataset:
    if isinstance(source, Mapping):
        source, split = source[_choose_split(source, split, name or type(source).__name__)], None
    name = name or getattr(getattr(source, "info", None), "dataset_name", None) or type(source).__name__
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise ValueError(f"{name!r} has no length: pass list(dataset.take(n)), or stream it with load_stream.")
    if split is not None and split != str(getattr(source, "split", None)):
        raise ValueError(f"split={split!r} cannot be taken from one dataset object; pass that split itself.")
    if len(source) == 0:
        raise ValueError(f"dataset {name!r} holds no image; check its split or filter.")
    if hasattr(source, "column_names"):
        return _from_datasets(source, columns, name)
    first = next((item for item in _readable(source) if item is not None), None)
    image, label = (0, 1) if isinstance(first, tuple) else (None, None)
    if isinstance(first, Mapping):
        image, label = _find_columns(list(first), columns)
    values = None if label is None else [None if item is None else item[label] for item in _readable(source)]
    return ImageDataset(source, *_class_numbers(values, getattr(source, "classes", None), name), name, image)


def _readable(source: Any) -> Iterator[Any]:
    for row in range(len(source)):
        item = None  # in place of one that cannot be read
        with contextlib.suppress(*READ_ERRORS):
            item = source[row]
        yield item


def _from_datasets(source: Any, columns: tuple[Any, Any], name: str) -> ImageDataset:
    from datasets import Image as ImageFeature

    image, label = _find_columns(source.column_names, columns)
    source = source.with_format(None)
    images = source.select_columns([image])
    if isinstance(source.features[image], ImageFeature):
        images = images.cast_column(image, ImageFeature(decode=False))  # a damaged file is then ours to name
    values = label and source[label][:]
    names = label and getattr(source.features[label], "names", None)
    return ImageDataset(images, *_class_numbers(values, names, name), name, image)


def _find_columns(found: list[Any], asked: tuple[Any, Any]) -> tuple[Any, Any]:
    image = asked[0] or next((column for column in IMAGE_COLUMNS if column in found), None)
    label = asked[1] or next((column for column in LABEL_COLUMNS if column in found), None)
    for argument, column in (("image_column", image), ("label_column", label)):
        if column not in found and (argument == "image_column" or column is not None):
            raise ValueError(f"{argument}={column!r} is no column; choose one of: {', '.join(map(str, found))}.")
    return image, label


def _class_numbers(values: list[Any] | None, names: list[str] | None, name: str) -> tuple[Any, Any]:
    known = [value for value in values or [] if value is not None]
    if all(isinstance(value, str) for value in known):
        names = sorted(set(known)) or None
        numbers = {label: number for number, label in enumerate(names or [])}
        return [numbers.get(value) for value in values or []] if names else None, names
    if not all(isinstance(value, (int, np.integer)) for value in known):
        raise ValueError(f"labels of {name!r} are neither integers nor class names; name the right label_column.")
    if min(known) == max(known) == -1:
        return None, None
    if min(known) < 0 or (names is not None and max(known) >= len(names)):
        raise ValueError(f"labels of {name!r} run from {min(known)} to {max(known)}; expected 0-based class numbers.")
    return [value if value is None else int(value) for value in values or []], names and list(names)


def dinov2_processor(image_size: int = 224) -> Any:
    """DINOv2's processor with its values, not its class's CLIP ones: shorter side at 256 / 224 of `image_size`, crop.

    Pillow backend, so that pixels do not depend on torchvision; it is saved as `BitImageProcessor`.

    Raises:
        ValueError: as [`processor_at_size`].
    """
    from transformers import BitImageProcessorPil

    processor = BitImageProcessorPil(
        do_convert_rgb=True, do_rescale=True, rescale_factor=1 / 255, do_resize=True, resample=Image.Resampling.BICUBIC,
        size={"shortest_edge": 256}, do_center_crop=True, crop_size={"height": 224, "width": 224}, do_normalize=True,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip
    return processor_at_size(processor, image_size)


def processor_at_size(processor: Any, image_size: int) -> Any:
    """Copy of an image processor that gives `image_size x image_size` pixels by the same rule; save this one.

    The ratio of resize to crop is kept: DINOv2's 256 / 224 becomes 112 / 98. A processor that resizes the shorter side
    and does not crop gets a centre crop of that side, which keeps the aspect ratio where a batch needs equal sizes.

    Raises:
        ValueError: if `image_size` is not positive, or the processor does not resize, pads, or gives no square.
    """
    size = dict(getattr(processor, "size", None) or {})
    crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", None) else {}
    sides = set((crop or size).values())
    resizes = getattr(processor, "do_resize", None) and set(size) in ({"shortest_edge"}, {"height", "width"})
    if image_size < 1 or not resizes or getattr(processor, "do_pad", None) or len(sides) != 1:
        tried = f"image_size={image_size} cannot be set on {type(processor).__name__} (size={size}, crop_size={crop})"
        raise ValueError(f"{tried}: give a positive size, or leave it out where resizing is not to one square or side.")
    adapted, (side,) = copy.deepcopy(processor), sides
    adapted.size = type(processor.size)(**{key: max(1, round(edge * image_size / side)) for key, edge in size.items()})
    if crop or "shortest_edge" in size:
        adapted.do_center_crop, adapted.crop_size = True, type(adapted.size)(height=image_size, width=image_size)
    return adapted


def random_crop_box(size: tuple[int, int], rng: np.random.Generator, scale: tuple[float, float]) -> tuple[int, ...]:
    """Box `(left, top, right, bottom)` of a RandomResizedCrop in an image of `size` `(width, height)`, in pixels.

    Its share of the area is uniform in `scale`, its ratio log-uniform in 3/4..4/3. After ten boxes that do not fit it
    is the largest centred one within the ratios, as in torchvision.
    """
    width, height = size
    for _ in range(10):
        area, ratio = width * height * rng.uniform(*scale), np.exp(rng.uniform(-1, 1) * np.log(4 / 3))
        w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


class PixelDataset(torch.utils.data.Dataset):
    """Images through a model's image processor; item `i` is `{"pixel_values": float (3, height, width), "label": int}`.

    `augment="crop_flip"` is the RandomResizedCrop and horizontal flip of arXiv 2512.19941, App. A.4, after which the
    processor only rescales and normalises. It is drawn from (seed, epoch, index) alone, whatever the workers and order.

    Args:
        images, processor: an [`ImageDataset`] and the model's image processor.
        image_size (`int`, *optional*): side in pixels; `processor` then becomes [`processor_at_size`]'s copy.
        augment, scale, seed: `"none"` or `"crop_flip"`, share of the area that a crop keeps, and seed (0 or more).

    Raises:
        ValueError: if an argument is out of range, or (on access) the processor gives another size.
    """

    def __init__(
        self, images: ImageDataset, processor: Any, *, image_size: int | None = None, augment: str = "none",
        scale: tuple[float, float] = (0.08, 1.0), seed: int = 0,
    ) -> None:  # fmt: skip
        if augment not in ("none", "crop_flip") or not 0 < scale[0] <= scale[1] <= 1 or seed < 0:
            rule = "use augment 'none' or 'crop_flip', 0 < scale[0] <= scale[1] <= 1 and seed >= 0."
            raise ValueError(f"augment={augment!r}, scale={scale}, seed={seed}: {rule}")
        self.images, self.augment, self.scale, self.seed = images, augment, scale, seed
        self.processor = processor if image_size is None else processor_at_size(processor, image_size)
        last = "crop_size" if getattr(self.processor, "do_center_crop", None) else "size"
        size = dict(getattr(self.processor, last, None) or {})
        self.size = (size["height"], size["width"]) if set(size) == {"height", "width"} else None
        if augment == "crop_flip" and self.size is None:
            raise ValueError("augment='crop_flip' needs one size, but the processor names none; pass image_size.")
        # Shared memory, so that workers that outlive an epoch see the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the augmentation of `epoch`; the Trainer and accelerate's loaders call it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.images[index]
        image, options = item.pop("image"), dict[str, Any]()
        if self.augment == "crop_flip" and self.size is not None:
            options = {"do_resize": False, "do_center_crop": False}
            rng = np.random.default_rng([self.seed, int(self._epoch), range(len(self))[index]])
            box = random_crop_box(image.size, rng, self.scale)
            image = image.resize(self.size[::-1], getattr(self.processor, "resample", None), box)
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image
        pixels = self.processor(image, return_tensors="pt", **options)["pixel_values"][0]
        if len(pixels) != 3 or self.size not in (None, tuple(pixels.shape[1:])):
            made = f"{type(self.processor).__name__} made {tuple(pixels.shape)} of image {index}"
            raise ValueError(f"{made}, expected 3 channels of {self.size}; use one that follows its size.")
        return {"pixel_values": pixels, **item}


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
