"""Arguments that several commands share, and how they become a teacher and images."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from huggingface_hub.utils import httpx

from ..cards import load_config
from ..data import ImageDataset, PixelDataset, load_images
from ..hub import INDEX, WEIGHTS, push_folder
from ..probe_tables import probe_records, probe_table, write_tables
from ..results import RESULTS_FILE
from ..teachers import Teacher
from ..vision_models import VisionModel
from .console import note, status, table, warn
from .values import UsageError

AnyModel = TypeVar("AnyModel", bound=VisionModel)
EXAMPLE_TEACHER = "facebook/dinov2-with-registers-small"


@dataclass
class TeacherArguments:
    """The teacher."""

    _argument_group_name = "Teacher"

    teacher: str | None = field(default=None, metadata={"help": "Hub id or folder of the pretrained ViT (required)."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the teacher on the Hub."})
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa (default) or eager."})


@dataclass
class ImageArguments:
    """The images."""

    _argument_group_name = "Images"

    dataset: str = field(default="digits", metadata={"help": "Folder of images, Hub dataset id, or digits."})
    train_split: str = field(default="train", metadata={"help": "Split to train on, or to look at."})
    eval_split: str | None = field(default="test", metadata={"help": "Split to measure on."})
    image_column: str | None = field(default=None, metadata={"help": "Column of the images, if it cannot be guessed."})
    label_column: str | None = field(default=None, metadata={"help": "Column of the labels, if it cannot be guessed."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Revision of a Hub dataset."})
    image_size: int | None = field(default=None, metadata={"help": "Pixels of a side; default the image processor's."})
    max_images: int | None = field(default=None, metadata={"help": "Random subset of every split."})
    on_error: str = field(default="raise", metadata={"help": "raise, or skip damaged images and count them."})


def print_probe_table(folder: Path, results: Mapping[str, Any]) -> None:
    """Prints the paper's Table 1 of the results' probes, and writes it to `folder` in four formats.

    Raises:
        UsageError: if there is no probe.
    """
    records = probe_records(results)
    if not records:
        raise UsageError("no probe in these results; run raptor-hf probe first, or leave --table out.")
    table(*probe_table(records), title=results.get("title"))
    note(f"wrote {', '.join(map(str, write_tables(folder, records)))}")


def load_teacher(args: TeacherArguments) -> Teacher:
    """The teacher, loaded on the accelerator if there is one.

    Raises:
        UsageError: if none is named or it cannot be loaded.
    """
    if args.teacher is None:
        raise UsageError(f"no teacher given; name a Hub id or a folder, for example {EXAMPLE_TEACHER}.")
    return load_pretrained(Teacher, args.teacher, args)


def load_pretrained(model_class: type[AnyModel], name: str, args: Any) -> AnyModel:
    """A ViT, loaded on the accelerator if there is one.

    Args:
        model_class: [`VisionModel`] or [`Teacher`].
        name: Hub id or folder.
        args: with `revision` and `attn_implementation`.

    Raises:
        UsageError: if it cannot be loaded.
        ValueError: if it is none of that class.
    """
    kwargs: dict[str, Any] = {}
    if args.attn_implementation is not None:
        kwargs["attn_implementation"] = args.attn_implementation
    with status(f"loading {name}"):
        try:
            model = model_class.from_pretrained(name, revision=args.revision, **kwargs)
        except OSError as error:
            raise UsageError(f"teacher {name!r} cannot be loaded: {error}") from error
    if torch.accelerator.is_available():
        model.model.to(torch.accelerator.current_accelerator())
    return model


def load_split(args: ImageArguments, split: str | None, seed: int = 0) -> ImageDataset:
    """Images of one split, announced on stderr.

    Raises:
        ValueError: as [`~raptor_hf.data.load_images`].
    """
    images = load_images(
        args.dataset,
        split=split,
        image_column=args.image_column,
        label_column=args.label_column,
        on_error=args.on_error,
        max_images=args.max_images,
        seed=seed,
        revision=args.dataset_revision,
    )
    skipped = f", {images.num_skipped} damaged ones left out" if images.num_skipped else ""
    note(f"{images.name} ({split}): {len(images)} images{skipped}")
    return images


def to_pixels(images: ImageDataset, processor: Any, image_size: int | None) -> PixelDataset:
    """Images through a processor at the size asked for.

    Raises:
        UsageError: if there is no processor.
    """
    if processor is None:
        raise UsageError("this model has no image processor; add a preprocessor_config.json to its folder.")
    return PixelDataset(images, processor, image_size=image_size)


def saved_raptor(folder: str | None) -> Any:
    """Configuration of the saved Raptor that a command is given.

    Raises:
        UsageError: if none is named.
        ValueError: if the folder holds none.
    """
    if folder is None:
        raise UsageError("no folder given; name one that holds a saved Raptor, as OUTPUT_DIR/model.")
    return load_config(folder)


def require_weights(folder: str) -> None:
    """Refuses a folder that has no whole weights, such as a checkpoint of a run whose processes saved a shard each.

    Raises:
        UsageError: if there is neither `model.safetensors` nor its index.
    """
    path = Path(folder)
    if any((path / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    shards = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and entry.name.startswith("pytorch_model"))
    found = f"only the shards of a run on several processes, {shards[0]}/" if shards else "a configuration alone"
    raise UsageError(
        f"{folder} has no {WEIGHTS} ({found}); name the run's OUTPUT_DIR/model, or run with "
        "fsdp_state_dict_type: FULL_STATE_DICT as examples/accelerate/fsdp2.yaml has it, which saves whole weights."
    )


def check_finished(output_dir: Path, overwrite: bool) -> None:
    """Refuses to run again over a finished run.

    Raises:
        UsageError: if `output_dir` has results and `overwrite` is not set.
    """
    if (output_dir / RESULTS_FILE).is_file() and not overwrite:
        raise UsageError(f"{output_dir} holds a finished run; give --overwrite to replace it, or another --output_dir.")


def make_way(output_dir: Path, overwrite: bool) -> None:
    """Removes what is to be replaced; called when the input has been read, so that wrong input costs no finished run.

    In a launch of several processes the first one removes, and all go on together.
    """
    processes = PartialState()
    if overwrite and processes.is_main_process:
        shutil.rmtree(output_dir, ignore_errors=True)
    processes.wait_for_everyone()


def push_and_report(folder: str | Path, repo_id: str, **options: Any) -> int:
    """Uploads a saved Raptor, as [`~raptor_hf.hub.push_folder`]; exit code 0, or 1 if the Hub could not be reached.

    Raises:
        ValueError: as `push_folder`.
    """
    try:
        with status(f"uploading {folder} to {repo_id}"):
            commit = push_folder(folder, repo_id, **options)
    except (httpx.HTTPError, ConnectionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warn(
            f"the upload did not finish ({reason}); {folder} is unchanged, run the same command again, or after a "
            f"training: raptor-hf push {folder} {repo_id}"
        )
        return 1
    note(commit.pr_url or commit.commit_url)
    return 0


def check_ranges(args: Any, at_least: Mapping[int, Sequence[str]], above_zero: Sequence[str] = ()) -> None:
    """Refuses numbers that are out of range; fields that are `None` are left out.

    Args:
        args: a dataclass of numbers.
        at_least (mapping of int to names): the smallest allowed value of each field.
        above_zero (sequence of str): fields of positive, finite numbers.

    Raises:
        UsageError: for the first that is.
    """
    for low, names in at_least.items():
        for name in names:
            value = getattr(args, name)
            if value is not None and value < low:
                raise UsageError(f"--{name} {value} is {'negative' if low == 0 else f'below {low}'}.")
    for name in above_zero:
        if not 0 < getattr(args, name) < float("inf"):
            raise UsageError(f"--{name} {getattr(args, name)} is not a size; give a number above 0, such as 0.1.")
