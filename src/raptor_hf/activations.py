"""The teacher's states on disk, for a set of images that is trained on again and again.

States are written once, in bfloat16, into shards that every process maps into memory; a batch then costs a read and no
forward pass of the teacher. An image of DINOv2-B at 224 pixels takes 5.2 MB, ImageNet-1k 6.7 TB: the states are made on
the fly by default, and a cache is for smaller sets and many epochs.

```text
cache.json                  what the states were made of, their shape, images per shard
states-00000.safetensors    "hidden_states", bfloat16 (images, L + 1, seq_length, hidden_size), a_0 .. a_L;
                            in its metadata the CRC-32 of each image's states, which a read checks
```

A file appears under its name when it is complete: an interrupted job goes on where it stopped, and processes, or jobs
that start together, do not disturb each other.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import socket
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from .data import PixelDataset, collate_pixels
from .teachers import Teacher
from .vision_models import public_name

CACHE_FORMAT = 1
CACHE_FILE = "cache.json"
SHARD_BYTES = 256 * 2**20
STATES = "hidden_states"
_COMPARED_IMAGES = 16  # of the set, evenly spaced, whose pixels stand for all
_OPEN_SHARDS = 256  # mapped at a time
_ABANDONED_SECONDS = 3600
_NOT_PIXELS = ("transformers_version", "image_processor_type", "processor_class", "data_format", "backend")


@dataclass(frozen=True)
class _Layout:
    """What `cache.json` says: of what the states are, and how they are divided into shards."""

    folder: Path
    made_of: Mapping[str, Any]
    state_shape: tuple[int, ...]
    images_per_shard: int

    @property
    def num_shards(self) -> int:
        """Files of states."""
        return -(-self.made_of["num_images"] // self.images_per_shard)

    def path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"states-{shard:05d}.safetensors"

    def rows(self, shard: int) -> range:
        """Images in a shard."""
        start = shard * self.images_per_shard
        return range(start, min(self.made_of["num_images"], start + self.images_per_shard))

    def missing(self) -> list[int]:
        """Shards that are not there, or too small for what they must hold."""
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.folder) if entry.is_file()}
        needed = [_num_bytes((len(self.rows(shard)), *self.state_shape)) for shard in range(self.num_shards)]
        return [shard for shard, size in enumerate(needed) if sizes.get(self.path(shard).name, 0) <= size]


class ActivationCache(torch.utils.data.Dataset):
    """States of a teacher, made by [`cache_activations`]; item `i` is `{"hidden_states": tensor}`, bfloat16 and of
    shape `(L + 1, seq_length, hidden_size)`: image `i` of the set they were made of.

    Args:
        folder: what [`cache_activations`] wrote.

    Attributes:
        made_of: the teacher, processor and images that the states belong to, see [`describe`].
        state_shape: `(L + 1, seq_length, hidden_size)`.

    Raises:
        ValueError: if the folder holds no cache, or an incomplete one; on access, if what is read is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        layout = _read_layout(Path(folder))
        if layout is None:
            raise ValueError(f"{folder} holds no activation cache; make one with cache_activations.")
        missing = layout.missing()
        if missing:
            raise ValueError(
                f"the activation cache in {folder} lacks {len(missing)} of its {layout.num_shards} shards, the first "
                f"is {layout.path(missing[0]).name}; run the command that made it again, it goes on where it stopped."
            )
        self.folder, self.made_of, self.state_shape = layout.folder, layout.made_of, layout.state_shape
        self._layout = layout
        self._shards: OrderedDict[int, tuple[Any, list[int]]] = OrderedDict()

    def __len__(self) -> int:
        return int(self.made_of["num_images"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = range(len(self))[index]
        shard, row = divmod(number, self._layout.images_per_shard)
        if shard not in self._shards:
            self._shards[shard] = self._open(shard)
            if len(self._shards) > _OPEN_SHARDS:
                self._shards.popitem(last=False)
        self._shards.move_to_end(shard)
        states, checksums = self._shards[shard]
        tensor = states[row]
        if _checksum(tensor) != checksums[row]:
            raise ValueError(
                f"{self._layout.path(shard)} is damaged: the states of image {number} are not those that were written; "
                "delete this file and run the command that made the cache again."
            )
        return {STATES: tensor}

    def _open(self, shard: int) -> tuple[Any, list[int]]:
        path, rows = self._layout.path(shard), self._layout.rows(shard)
        try:
            file = safe_open(path, "pt")
            states, checksums = file.get_slice(STATES), json.loads(file.metadata()["crc32"])
            if tuple(states.get_shape()) != (len(rows), *self.state_shape) or len(checksums) != len(rows):
                raise ValueError(f"it holds {states.get_shape()}, expected {[len(rows), *self.state_shape]}")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}); delete it and run the command that made the cache again."
            ) from error
        return states, checksums

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": OrderedDict()}  # a worker process maps the files itself

    def check_teacher(self, teacher: Teacher) -> None:
        """Refuses a teacher that did not make these states.

        Raises:
            ValueError: if its weights are others.
        """
        if weights_digest(teacher.model) != self.made_of["teacher_weights"]:
            raise ValueError(
                f"the activation cache in {self.folder} was made by teacher {self.made_of['teacher']!r} with other "
                f"weights than those of {public_name(teacher.name_or_path)!r}; use its teacher, or make another cache."
            )


def cache_activations(
    teacher: Teacher,
    pixels: PixelDataset,
    folder: str | Path,
    *,
    batch_size: int = 32,
    num_workers: int = 0,
    autocast: torch.dtype | None = None,
    max_bytes: float | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: PartialState | None = None,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda batches, total: batches,
) -> ActivationCache:
    """Writes the states of all images of a set, or what is missing of them, and opens the result.

    Args:
        teacher, pixels: whose states, and of what; images without augmentation.
        folder: a cache that is there already is gone on with if it was made of the same, else refused.
        batch_size, num_workers: images in a forward pass, and workers that read them.
        autocast: dtype in which matrix products are computed; the teacher's own by default. Both are taken for the
            same, since what is stored is rounded to bfloat16 anyhow.
        max_bytes: what the cache may take; no bound by default.
        shard_bytes: size of a file; at least one image is in each.
        processes: the processes that share the work, every n-th shard each; this one alone by default.
        progress: wraps the batches of this process, whose number it is given, to show a bar.

    Raises:
        ValueError: if the images are augmented or a stream, the cache would be larger than `max_bytes` or than the
            space that is left, or the folder holds something else.
        OSError: if the disk is full; shards that are complete are kept.
    """
    folder, made_of = Path(folder), describe(teacher, pixels)
    shape = _state_shape(teacher, pixels)
    rank, world_size = (processes.process_index, processes.num_processes) if processes else (0, 1)
    wait = processes.wait_for_everyone if processes else lambda: None
    _check_folder(folder, made_of)
    _check_size(folder, _num_bytes((len(pixels), *shape)), max_bytes)
    wait()
    if rank == 0:
        _claim(_Layout(folder, made_of, shape, max(1, shard_bytes // _num_bytes(shape))))
    wait()
    layout = _read_layout(folder)
    if layout is None:
        raise ValueError(f"{folder} is not what the first process made; name a folder that all processes share.")
    mine = layout.missing()[rank::world_size]
    wait()  # nobody writes before everybody has looked
    batches = [
        list(rows[start : start + batch_size])
        for rows in map(layout.rows, mine)
        for start in range(0, len(rows), batch_size)
    ]
    loader = torch.utils.data.DataLoader(
        pixels, batch_sampler=batches, num_workers=num_workers, collate_fn=collate_pixels
    )
    states = _batched_states(teacher, progress(loader, len(batches)), autocast)
    for shard in mine:
        _write_shard(layout.path(shard), [next(states) for _ in range(0, len(layout.rows(shard)), batch_size)])
    for _ in states:  # there is none: a progress bar learns that it is at its end
        pass
    wait()
    return ActivationCache(folder)


def activation_bytes(teacher: Teacher, pixels: PixelDataset) -> int:
    """Bytes that [`cache_activations`] will write for a set, the states of all its images in bfloat16."""
    return _num_bytes((len(pixels), *_state_shape(teacher, pixels)))


def describe(teacher: Teacher, pixels: PixelDataset) -> dict[str, Any]:
    """What states are made of, as JSON; two equal descriptions mean equal states.

    Of the images only 16, evenly spaced, are read: name, number and the digest of their pixels stand for the set.

    Raises:
        ValueError: if the images are a stream or augmented.
    """
    if not isinstance(pixels, PixelDataset):
        raise ValueError(
            f"an activation cache of a {type(pixels).__name__}: it needs images that can be counted and read again in "
            "the same order, a PixelDataset; a stream has no such order."
        )
    if pixels.augment != "none":
        raise ValueError(
            f"augment={pixels.augment!r}: an augmented image is another one in every epoch, and its states cannot be "
            "stored; leave the augmentation or the activation cache out."
        )
    if len(pixels) == 0:
        raise ValueError("an activation cache of no image; give a set that is not empty.")
    digest = hashlib.sha256()
    for index in np.linspace(0, len(pixels) - 1, min(len(pixels), _COMPARED_IMAGES)).astype(int):
        digest.update(pixels[int(index)]["pixel_values"].half().contiguous().numpy().tobytes())
    processor = {name: value for name, value in pixels.processor.to_dict().items() if name not in _NOT_PIXELS}
    return {
        "teacher": public_name(teacher.name_or_path),
        "teacher_weights": weights_digest(teacher.model),
        "image_size": list(pixels[0]["pixel_values"].shape[1:]),
        "processor": json.loads(json.dumps(processor, default=str, sort_keys=True)),
        "dataset": public_name(pixels.images.name),
        "num_images": len(pixels),
        "pixels": digest.hexdigest(),
    }


def collate_states(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Items of an [`ActivationCache`] as `hidden_states (batch_size, L + 1, seq_length, hidden_size)`; items of a
    [`~raptor_hf.data.PixelDataset`] as [`~raptor_hf.data.collate_pixels`] does.
    """
    if STATES not in batch[0]:
        return collate_pixels(batch)
    return {STATES: torch.stack([item[STATES] for item in batch])}


def _check_size(folder: Path, size: int, max_bytes: float | None) -> None:
    """Refuses a cache that is larger than it may be, or than the free space and what is written of it."""
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"the activation cache would take {size / 1e9:.3g} GB, more than the {max_bytes / 1e9:.3g} GB it may; "
            "allow more, take fewer images, or train without a cache."
        )
    there = sum(path.stat().st_size for path in folder.glob("states-*.safetensors"))
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir())).free
    if size - there > free:
        raise ValueError(
            f"the activation cache would take {size / 1e9:.3g} GB, but {free / 1e9:.3g} GB are free at {folder}; name "
            "a folder on another disk, take fewer images, or train without a cache."
        )


def _check_folder(folder: Path, made_of: Mapping[str, Any]) -> None:
    """Refuses a folder that holds something else than the cache that is asked for, or a part of it."""
    layout = _read_layout(folder)
    if layout is not None:
        _compare(folder, layout.made_of, made_of)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is no activation cache and not empty; name a new folder.")


def _claim(layout: _Layout) -> None:
    """Writes `cache.json`, unless it is there, and removes what a job that was killed left half-written."""
    folder = layout.folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".*.part"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                path.unlink()
    if not (folder / CACHE_FILE).is_file():
        record = {"format": CACHE_FORMAT, "made_of": layout.made_of, "state_shape": layout.state_shape,
                  "images_per_shard": layout.images_per_shard}  # fmt: skip
        _write(folder / CACHE_FILE, json.dumps(record, indent=2).encode())


def _compare(folder: Path, made_of: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        found = made_of.get(name)
        if found == value:
            continue
        if isinstance(value, dict) and isinstance(found, dict):  # the entries that differ, not the whole processor
            names = [key for key in {**value, **found} if value.get(key) != found.get(key)]
            found, value = ({key: part.get(key) for key in names} for part in (found, value))
        raise ValueError(
            f"the activation cache in {folder} was made with {name}={found}, this run has {value}; name another "
            "folder, or delete this one."
        )


def _read_layout(folder: Path) -> _Layout | None:
    path = folder / CACHE_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        if record["format"] != CACHE_FORMAT:
            raise ValueError(f"format {record['format']}, this version reads {CACHE_FORMAT}")
        return _Layout(folder, record["made_of"], tuple(record["state_shape"]), int(record["images_per_shard"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete the cache and make it again.") from error


def _state_shape(teacher: Teacher, pixels: PixelDataset) -> tuple[int, ...]:
    """`(L + 1, seq_length, hidden_size)`, asked of the teacher itself."""
    states = teacher.hidden_states(teacher.pixel_values([pixels[0]]))
    return (len(states), *states[0].shape[1:])


def _batched_states(
    teacher: Teacher, batches: Iterable[dict[str, torch.Tensor]], autocast: torch.dtype | None
) -> Iterator[torch.Tensor]:
    for batch in batches:
        device = teacher.device
        context = torch.autocast(device.type, autocast) if autocast is not None else contextlib.nullcontext()
        with context:
            states = teacher.hidden_states(batch["pixel_values"].to(device))
        yield torch.stack([state.to(torch.bfloat16) for state in states], dim=1).cpu()


def _write_shard(path: Path, parts: list[torch.Tensor]) -> None:
    states = torch.cat(parts)
    checksums = [_checksum(state) for state in states]
    _write(path, save({STATES: states}, metadata={"crc32": json.dumps(checksums)}))


def _write(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _checksum(states: torch.Tensor) -> int:
    return zlib.crc32(states.contiguous().view(torch.uint8).numpy().data)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of a model's state, names and values."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _num_bytes(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)
