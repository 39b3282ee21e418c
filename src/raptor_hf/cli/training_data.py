"""What `raptor-hf distill` trains and measures on: images that are read as they are needed, a stream of them, or the
teacher's states of them on disk.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState

from ..activations import ActivationCache, activation_bytes, cache_activations, describe
from ..arguments import DistillationArguments
from ..data import ImageDataset, PixelDataset, load_images
from ..streams import ImageStream, PixelStream, load_stream
from ..teachers import Teacher
from .common import ImageArguments, load_split, to_pixels
from .console import note, progress
from .values import UsageError


@dataclass
class StreamArguments:
    """Streaming."""

    _argument_group_name = "Streaming"

    streaming: bool = field(
        default=False, metadata={"help": "Read images as they come (Hub id, folder of .tar shards); needs --max_steps."}
    )
    shuffle_buffer: int = field(default=1000, metadata={"help": "Images that the stream's next one is drawn from."})


@dataclass
class CacheArguments:
    """Activation cache."""

    _argument_group_name = "Activation cache"

    activation_cache: str | None = field(
        default=None, metadata={"help": "Folder of the teacher's states: written once, then read, not computed."}
    )
    activation_cache_gb: float = field(default=100.0, metadata={"help": "Gigabytes that it may take."})


def training_images(
    images: ImageArguments, stream: StreamArguments, processor: Any, seed: int
) -> tuple[ImageDataset | ImageStream, Any]:
    """Training images, and the same through the teacher's image processor.

    Raises:
        ValueError: as [`~raptor_hf.data.load_images`] and [`~raptor_hf.streams.load_stream`].
    """
    if not stream.streaming:
        loaded = load_split(images, images.train_split, seed)
        return loaded, to_pixels(loaded, processor, images.image_size)
    opened = open_stream(images, images.train_split, stream.shuffle_buffer, seed)
    if processor is None:
        raise UsageError("this teacher has no image processor; add a preprocessor_config.json to its folder.")
    return opened, PixelStream(opened, processor, image_size=images.image_size, seed=seed)


def evaluation_images(images: ImageArguments, stream: StreamArguments, processor: Any, seed: int) -> Any:
    """Images to measure on, through the teacher's image processor; of a stream all, or the first `max_images`.

    Raises:
        ValueError: as [`training_images`].
    """
    if not stream.streaming:
        return to_pixels(load_split(images, images.eval_split, seed), processor, images.image_size)
    opened = open_stream(images, str(images.eval_split), 0, seed)
    if images.max_images is None:
        return PixelStream(opened, processor, image_size=images.image_size, seed=seed, repeat=False)
    return to_pixels(first_images(opened, images.max_images), processor, images.image_size)


def cached_states(
    cache: CacheArguments, teacher: Teacher, pixels: Any, args: DistillationArguments, processes: PartialState
) -> ActivationCache | None:
    """The teacher's states of the training images, written by all processes together if they are not there yet.

    Raises:
        ValueError: as [`~raptor_hf.activations.cache_activations`].
    """
    if cache.activation_cache is None:
        return None
    describe(teacher, pixels)  # refuses a stream before its length is asked for
    size = activation_bytes(teacher, pixels)
    note(f"activation cache {cache.activation_cache}: {len(pixels)} images, {size / 1e9:.3g} GB")
    return cache_activations(
        teacher,
        pixels,
        cache.activation_cache,
        batch_size=args.per_device_train_batch_size or 32,
        num_workers=args.dataloader_num_workers,
        autocast=torch.bfloat16 if args.bf16 else None,
        max_bytes=cache.activation_cache_gb * 1e9,
        processes=processes,
        progress=lambda batches, total: progress(batches, "states of the teacher", total) if total else batches,
    )


def first_images(stream: ImageStream, count: int) -> ImageDataset:
    """The first images of a stream, in memory."""
    kept = load_images(list(itertools.islice(stream, count)))
    kept.name = stream.name
    return kept


def phase_pixels(images: ImageDataset | ImageStream, processor: Any, count: int) -> PixelDataset:
    """About `count` training images, evenly spaced, or the first ones of a stream, for the search of phases."""
    if isinstance(images, ImageStream):
        return PixelDataset(first_images(images, count), processor)
    return PixelDataset(images.select(range(0, len(images), max(1, len(images) // count))), processor)


def open_stream(images: ImageArguments, split: str | None, shuffle_buffer: int, seed: int = 0) -> ImageStream:
    """A stream of one split, announced on stderr.

    Raises:
        ValueError: as [`~raptor_hf.streams.load_stream`].
    """
    opened = load_stream(
        images.dataset, split=split or "train", image_column=images.image_column, label_column=images.label_column,
        shuffle_buffer=shuffle_buffer, seed=seed, on_error=images.on_error, revision=images.dataset_revision,
        max_images=images.max_images,
    )  # fmt: skip
    note(f"{opened.name} ({split}): a stream")
    return opened
