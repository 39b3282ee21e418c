"""Images that are read as they come: WebDataset shards, Hub datasets that do not fit on the disk, iterable datasets.

[`load_stream`] and [`PixelStream`] are to a stream what `load_images` and `PixelDataset` are to what has a length. The
`datasets` library reads, shuffles through a buffer and divides the shards among a DataLoader's workers; decoding and
pixels are those of `data.py`.

Two ways to resume. Replay is the Trainer's own: the stream starts anew, in the same order, and what was seen is read
and dropped; weights are then bit-equal to those of a run that was not interrupted. [`PixelStream.load_state_dict`]
jumps to the row instead, but what was in the shuffle buffer is lost: that is faster, and not equal.
"""

import glob
import itertools
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .data import (
    HELD_OUT,
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    READ_ERRORS,
    SPLIT_NAMES,
    ImageDataset,
    PixelDataset,
    _choose_split,
    _find_columns,
    decode_image,
    load_images,
)
from .hub_data import load_hub_dataset

logger = logging.getLogger(__name__)

_MAX_WORKERS = 1024  # one counter each: workers cannot add to a shared one without a lock
_FOLDER_SHARDS = 64  # parts of a folder of images that workers divide among themselves
_ORIGIN = ("__url__", "__key__")  # which tar and which sample of it, in WebDataset rows
_STATE = {"epoch", "pass", "row", "seed", "shuffle_buffer", "dataset"}
_WORKERS_KEEP_STATE = "workers keep it to themselves: use --dataloader_num_workers 0, or resume by replay."


def _worker() -> tuple[int, int]:
    """Number of this DataLoader worker and of all; `(0, 0)` outside of workers."""
    info = get_worker_info()
    return (0, 0) if info is None else (info.id, info.num_workers)


class ImageStream(IterableDataset):
    """Upright RGB images as `{"image": PIL.Image.Image, "label": int}`, in the order of epoch 0, once.

    Without labels the items have no `"label"`. [`load_stream`] makes it.

    Args:
        dataset: a `datasets.IterableDataset` whose images are not decoded.
        image_column, label_column (`str`, `str`, *optional*): its columns; labels are 0-based integers.
        shuffle_buffer (`int`): rows among which the next one is drawn, 0 for the order of the files.
        seed (`int`): of the order, 0 or more.
        on_error (`str`): `"raise"` at a damaged image, or `"skip"` it, which is logged and counted.
        name (`str`): the stream's name in reports, without machine paths.

    Attributes:
        label_names (`list`, *optional*): name of each class.

    Raises:
        ValueError: if an option is out of range; on iteration, if an image cannot be read (names its file or key and
            its row), or the stream holds none that can.
    """

    def __init__(
        self, dataset: Any, image_column: str, label_column: str | None = None, *, shuffle_buffer: int = 1000,
        seed: int = 0, on_error: str = "raise", name: str = "stream",
    ) -> None:  # fmt: skip
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error={on_error!r} is unknown; use 'raise' or 'skip'.")
        if shuffle_buffer < 0 or seed < 0:
            rule = "both must be 0 or more; shuffle_buffer=0 keeps the order of the files."
            raise ValueError(f"shuffle_buffer={shuffle_buffer}, seed={seed}: {rule}")
        self.shuffle_buffer, self.seed, self.on_error, self.name = shuffle_buffer, seed, on_error, name
        self.label_names = label_column and getattr((dataset.features or {}).get(label_column), "names", None)
        self._dataset, self._image, self._label = dataset, image_column, label_column
        self._skipped = torch.zeros(_MAX_WORKERS, dtype=torch.int64).share_memory_()

    @property
    def has_labels(self) -> bool:
        """Whether its items have a `"label"`."""
        return self._label is not None

    @property
    def num_skipped(self) -> int:
        """Damaged images left out since the last iteration began, by all workers; again in each pass over them."""
        return int(self._skipped.sum())

    def start_counting(self) -> None:
        """Sets this worker's part of `num_skipped` to 0, and what workers left that there are no more."""
        worker, workers = _worker()
        self._skipped[worker] = 0
        if worker == 0:
            self._skipped[max(1, workers) :] = 0

    def rows(self, epoch: int) -> Any:
        """The undecoded rows of one pass as a new `datasets.IterableDataset`, in an order of (seed, epoch) alone."""
        # Not its set_epoch: that number is shared by all workers, which may be in different passes.
        if self.shuffle_buffer == 0:
            return self._dataset.with_format(None)
        seed = np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0]
        return self._dataset.shuffle(seed=int(seed), buffer_size=self.shuffle_buffer)

    def item(self, row: Mapping[str, Any], position: int) -> dict[str, Any] | None:
        """The decoded `row`, number `position` of this worker's pass; None if it is damaged and left out.

        Raises:
            ValueError: if it is damaged and `on_error` is `"raise"`.
        """
        value = _fetch(row[self._image])
        try:
            if value is None:
                raise ValueError("it has no image")
            item: dict[str, Any] = {"image": decode_image(value)}
            if self._label is not None:
                if row[self._label] is None:
                    raise ValueError("it has no label")
                item["label"] = int(row[self._label])
            return item
        except READ_ERRORS as error:
            damaged = f"row {position} of {self.name!r} ({self._origin(row)}) cannot be read: {error}"
            if self.on_error == "raise":
                raise ValueError(f"{damaged}; replace it, or load with on_error='skip' to leave it out.") from error
            self._skipped[_worker()[0]] += 1
            logger.warning("Left out: %s", damaged)
            return None

    def items(self, rows: Any, first: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Position and item of the readable ones of `rows`, which start at position `first`.

        Raises:
            ValueError: as [`ImageStream.item`], and if a whole pass holds no image that can be read.
        """
        position, given = first, 0
        for position, row in enumerate(rows, first + 1):
            item = self.item(row, position - 1)
            if item is not None:
                given += 1
                yield position - 1, item
        if given == first == 0 and (position > 0 or _worker()[1] == 0):  # a worker's own part may be empty
            raise ValueError(
                f"none of the {position} rows of {self.name!r} can be read; check its files and split, and the log."
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.start_counting()
        return (item for _, item in self.items(self.rows(0)))

    def _origin(self, row: Mapping[str, Any]) -> str:
        url, key = (row.get(column) for column in _ORIGIN)
        value = row[self._image]
        path = value.get("path") if isinstance(value, Mapping) else getattr(value, "filename", value)
        path = path if isinstance(path, (str, os.PathLike)) and path else key or "no path"
        return f"{path} in {url}" if url else str(path)


def _fetch(value: Any) -> Any:
    """Contents of a remote file (`hf://...`); not part of decoding, so that an outage is not taken for damage."""
    if isinstance(value, Mapping) and value.get("bytes") is None and "://" in str(value.get("path")):
        import fsspec  # type: ignore[import-untyped]

        with fsspec.open(value["path"], "rb") as file:
            return file.read()
    return value


def load_stream(
    source: Any, *, split: str = "train", image_column: str | None = None, label_column: str | None = None,
    shuffle_buffer: int = 1000, seed: int = 0, on_error: str = "raise", revision: str | None = None,
    max_images: int | None = None,
) -> ImageStream:  # fmt: skip
    """Images, and class labels if there are any, from one of four kinds of source, none of which is copied to the disk.

    - a folder of WebDataset shards (`*.tar`, at any depth): those with the split's name in their path, as in
      `train/0000.tar` or `data-val-0000.tar`; without any such name all are `train`.
    - a folder of images, as [`load_images`] reads it (which also shuffles it fully, and is the better choice).
    - the id of a dataset on the Hub, for `datasets.load_dataset(..., streaming=True)`.
    - a `datasets.IterableDataset`, whose own split is used, or `IterableDatasetDict`.

    Args:
        source, split: see above.
        image_column, label_column (`str`, *optional*): default `image`, `img`, `pixel_values` or the first column of
            images (WebDataset: `jpg`), and `label`, `labels`, `fine_label` or `cls`. Labels are integers: a stream
            cannot number names. A column found by its name that holds others is not used.
        shuffle_buffer, seed, on_error: as [`ImageStream`].
        revision (`str`, *optional*): commit, tag or branch of a Hub dataset.
        max_images (`int`, *optional*): rows that are read, the first ones.

    Raises:
        ValueError: if the source, split or column does not exist, holds no image, or an option is out of range.
    """
    if max_images is not None and max_images < 1:
        raise ValueError(f"max_images={max_images} must be at least 1; leave it out to take all images.")
    if isinstance(source, (str, os.PathLike)):
        dataset, name = _open_named(source, split, revision)
    else:
        dataset, name = _open_object(source, split)
    image, label = _stream_columns(dataset, (image_column, label_column), name)
    rows = _undecoded(dataset, image, label)
    if max_images is not None:
        rows = rows.take(max_images)
    return ImageStream(rows, image, label, shuffle_buffer=shuffle_buffer, seed=seed, on_error=on_error, name=name)


def _open_named(source: Any, split: str, revision: str | None) -> tuple[Any, str]:
    folder = Path(source).expanduser()
    if folder.is_dir():
        shards = sorted(path for path in folder.rglob("*.tar") if not path.name.startswith("."))  # ._x.tar of macOS
        name = folder.resolve().name
        return (_open_shards(folder, shards, split) if shards else _open_images(folder, split)), name
    is_id = isinstance(source, str) and not source.startswith((".", "/", "~")) and len(folder.parts) <= 2
    if folder.exists() or source == "digits" or not is_id:
        rule = "a stream is a folder of .tar shards or of images, a Hub dataset id, or a datasets.IterableDataset"
        raise ValueError(f"{source} cannot be streamed: {rule}; check the path, or use load_images.")
    return load_hub_dataset(source, split=split, streaming=True, revision=revision), source


def _open_shards(folder: Path, shards: list[Path], split: str) -> Any:
    import datasets

    known, by_split = {*SPLIT_NAMES["train"], *HELD_OUT}, dict[str, list[str]]()
    for shard in shards:
        words = re.findall("[a-z]+", shard.relative_to(folder).as_posix().lower())
        by_split.setdefault(next((word for word in words if word in known), "train"), []).append(str(shard))
    files = by_split[_choose_split(by_split, split, folder.resolve().name)]
    patterns = {"train": [glob.escape(file) for file in files]}  # else brackets in a name are taken for a choice
    try:
        return datasets.load_dataset("webdataset", data_files=patterns, split="train", streaming=True)
    except (OSError, ValueError, LookupError) as error:
        why = f"do not open as WebDataset ({' '.join(str(error).split())[:300]})"
        raise ValueError(f"the shards {files[0]} ... {why}; each sample needs the same files, as 0001.jpg.") from error


def _open_images(folder: Path, split: str) -> Any:
    import datasets

    images = load_images(folder, split=split)
    columns, features = {"image": [images._images[row] for row in images._rows]}, {"image": datasets.Value("string")}
    if images.labels is not None:
        columns["label"], features["label"] = images.labels, datasets.ClassLabel(names=images.label_names)
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    return table.to_iterable_dataset(num_shards=min(_FOLDER_SHARDS, len(images)))


def _open_object(source: Any, split: str) -> tuple[Any, str]:
    import datasets

    if isinstance(source, datasets.IterableDatasetDict):
        source = source[_choose_split(source, split, "IterableDatasetDict")]
    if not isinstance(source, datasets.IterableDataset):
        remedy = "use load_images for what has a length, or datasets.IterableDataset.from_generator"
        raise ValueError(f"a {type(source).__name__} cannot be streamed; {remedy}.")
    return source, source.info.dataset_name or "IterableDataset"


def _stream_columns(dataset: Any, asked: tuple[Any, Any], name: str) -> tuple[str, str | None]:
    import datasets

    features = dataset.features or {}
    first: dict[str, Any] = {} if features else next(iter(dataset), {})
    found = list(features or first)
    if not found:
        raise ValueError(f"stream {name!r} holds no image; check its split or filter.")
    image, label = asked
    if image is None and not set(IMAGE_COLUMNS) & set(found):
        image = next((column for column in features if isinstance(features[column], datasets.Image)), None)
    if label is None and "cls" in found and not set(LABEL_COLUMNS) & set(found):
        label = "cls"
    image, label = _find_columns(found, (image, label))
    feature = features.get(label, type(first.get(label)).__name__)
    kind = str(getattr(feature, "dtype", feature))  # int64 for a ClassLabel too
    if label is not None and not re.fullmatch(r"u?int\d*", kind):
        if asked[1] is not None:
            raise ValueError(f"label_column={label!r} of {name!r} holds {kind}; a stream's labels must be integers.")
        logger.warning("Column %r of %r holds no integers: no labels are taken from it.", label, name)
        label = None
    return image, label


def _undecoded(dataset: Any, image: str, label: str | None) -> Any:
    """The columns that are used, without format or decoding: a damaged file is then ours to name."""
    import datasets

    dataset = dataset.with_format(None)
    if not dataset.features:
        return dataset
    used = [column for column in dataset.features if column in (image, label, *_ORIGIN)]
    dataset = dataset.select_columns(used)
    if isinstance(dataset.features[image], datasets.Image):
        dataset = dataset.cast_column(image, datasets.Image(decode=False))
    return dataset


class _AtHand(ImageDataset):
    """The item at hand, under every index: with it a [`PixelDataset`] processes what comes, keyed by the index."""

    def __init__(self) -> None:
        super().__init__([])
        self.item: dict[str, Any] = {}

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.item)


class PixelStream(IterableDataset):
    """A stream through a model's image processor: `{"pixel_values": float (3, height, width), "label": int}`.

    It has no length, so a training on it needs `max_steps`. With `repeat` it never ends: pass `p` of an iteration
    begun in epoch `e` is epoch `e + p`, in a new order. The Trainer needs that to resume, since it counts the batches
    to skip from the start of the first pass. An evaluation needs `repeat=False`.

    The order depends on (seed of `images`, epoch, number of workers) alone, `augment="crop_flip"` (as
    [`PixelDataset`]) on (seed, epoch, index): index is the row's position in the shuffled pass of its worker, damaged
    rows included, times the number of workers, plus the worker's number. Nothing is drawn from a global generator.

    DataLoader workers divide the shards, so each image is read by one of them: more workers than shards
    (`num_shards`) have nothing to do, and with `repeat` each goes over its own shards again, which should be about
    equal. Several processes get alternating parts of the same order from accelerate.

    Args:
        images, processor: an [`ImageStream`] and the model's image processor.
        image_size, augment, scale, seed: as [`PixelDataset`].
        repeat (`bool`): go over the images again and again.

    Raises:
        ValueError: as [`PixelDataset`] and, on iteration, [`ImageStream`].
    """

    def __init__(
        self, images: ImageStream, processor: Any, *, image_size: int | None = None, augment: str = "none",
        scale: tuple[float, float] = (0.08, 1.0), seed: int = 0, repeat: bool = True,
    ) -> None:  # fmt: skip
        self.images, self.repeat = images, repeat
        checked = PixelDataset(_AtHand(), processor, image_size=image_size, augment=augment, scale=scale, seed=seed)
        self.processor, self.size = checked.processor, checked.size
        self._pixels = partial(PixelDataset, processor=self.processor, augment=augment, scale=scale, seed=seed)
        # Shared memory: workers that outlive an epoch see the next one, and this process sees that there are workers.
        self._epoch, self._workers = torch.zeros(2, 1, dtype=torch.int64).share_memory_()
        self._start: dict[str, Any] | None = None
        self._place: tuple[int, int, int] | None = None
        self._rows: Any = None

    @property
    def num_skipped(self) -> int:
        """As [`ImageStream`]'s."""
        return self.images.num_skipped

    @property
    def num_shards(self) -> int:
        """Parts that DataLoader workers divide among themselves."""
        return int(self.images._dataset.num_shards)

    def set_epoch(self, epoch: int) -> None:
        """Order and augmentation of `epoch` in the next iteration; the Trainer and accelerate's loaders call it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        raise TypeError("a stream has no length: set the number of steps of a training by max_steps (--max_steps).")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker, workers = _worker()
        self._workers.fill_(workers)
        self.images.start_counting()
        epoch, start = int(self._epoch), self._start
        if start is not None and workers:
            raise ValueError(f"fast resume with {workers} DataLoader workers: {_WORKERS_KEEP_STATE}")
        if start is None or start["epoch"] != epoch:
            start = {"pass": 0, "row": 0, "dataset": None}
        at_hand = _AtHand()
        for number in itertools.count(start["pass"]):
            pixels = self._pixels(at_hand)
            pixels.set_epoch(epoch + number)
            rows = self._rows = self.images.rows(epoch + number)
            if start["dataset"] is not None:
                rows.load_state_dict(start["dataset"])
            position = start["row"] - 1
            for position, at_hand.item in self.images.items(rows, start["row"]):
                self._place = (epoch, number, position + 1)
                yield pixels[position * max(1, workers) + worker]
            if position < 0 or not self.repeat:
                return
            start = {"row": 0, "dataset": None}

    def state_dict(self) -> dict[str, Any]:
        """Where the last iteration of this process is: plain values, for [`PixelStream.load_state_dict`].

        What a loader has read ahead (accelerate's: one batch) counts as read.

        Raises:
            ValueError: if nothing was read yet, or by DataLoader workers: the state is then in them.
        """
        if int(self._workers) or self._place is None:
            raise ValueError(f"no state: nothing was read in this process; {_WORKERS_KEEP_STATE}")
        epoch, number, row = self._place
        place = {"epoch": epoch, "pass": number, "row": row, "dataset": self._rows.state_dict()}
        return {"seed": self.images.seed, "shuffle_buffer": self.images.shuffle_buffer, **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Iterations of the state's epoch start after the last image it counts; fast, but not bit-equal.

        Rows that were in the shuffle buffer then are lost for that pass, at most `shuffle_buffer` of them; of sources
        in Arrow or Parquet a few may come twice. Without a buffer no row is lost and none comes twice.

        Raises:
            ValueError: if `state` is not one of [`PixelStream.state_dict`], or of another seed or buffer.
        """
        own = {"seed": self.images.seed, "shuffle_buffer": self.images.shuffle_buffer}
        if set(state) != _STATE or {name: state[name] for name in own} != own:
            kept = {name: state.get(name) for name in own}
            raise ValueError(f"the state is of a stream with {kept}, this one has {own}; use the same, or replay.")
        if self.images.shuffle_buffer:
            logger.warning(
                "Fast resume: rows that were in the shuffle buffer, at most %d, are not seen in this pass, and the run "
                "is not bit-equal to one without interruption.", self.images.shuffle_buffer,
            )  # fmt: skip
        self._start = dict(state)
