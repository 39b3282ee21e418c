"""Which student `raptor-hf distill` trains: its options, its phases, or the Raptor that it goes on from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ..cards import load_config
from ..data import ImageDataset
from ..modeling_raptor import RaptorModel
from ..phases import Phases
from ..results import read_json
from ..runs import PHASES_FILE, discover_phases
from ..streams import ImageStream
from ..teachers import Teacher
from .common import require_weights
from .console import status
from .training_data import phase_pixels
from .values import UsageError

STUDENT_OPTIONS = ("init", "mlp_type", "intermediate_size", "depth_scale_init", "adapter_rank")


@dataclass
class StudentArguments:
    """The student."""

    _argument_group_name = "Student"

    num_blocks: int | None = field(default=None, metadata={"help": "Blocks; 3 unless repeats or phases are given."})
    repeats: list[int] | None = field(default=None, metadata={"help": "Applications of each block, as 7 3 2."})
    phases: str | None = field(default=None, metadata={"help": "phases.json of an earlier `raptor-hf phases`."})
    phase_images: int = field(default=1000, metadata={"help": "Training images that the phases are found on."})
    init: str | None = field(
        default=None, metadata={"help": "first, middle, last, mean or random; default the preset's."}
    )
    mlp_type: str | None = field(default=None, metadata={"help": "gelu or swiglu; default the preset's."})
    intermediate_size: int | str | None = field(default=None, metadata={"help": "MLP width, research or dinov2."})
    depth_scale: bool = field(default=True, metadata={"help": "Whether blocks are scaled by depth."})
    depth_scale_init: str | None = field(default=None, metadata={"help": "zeros or normal; default the preset's."})
    adapter_rank: int | None = field(
        default=None, metadata={"help": "Rank of the adapters of every application; none by default."}
    )
    blocks: list[int] | None = field(
        default=None, metadata={"help": "Train these blocks alone, stage 1 only; `raptor-hf assemble` joins the runs."}
    )
    student: str | None = field(
        default=None, metadata={"help": "Folder of a Raptor to go on from in stage 2, as `assemble` leaves it."}
    )
    name: str | None = field(default=None, metadata={"help": "Name in the report; default raptor-k and the blocks."})
    overwrite: bool = field(default=False, metadata={"help": "Whether to replace a finished run."})
    dry_run: bool = field(
        default=False, metadata={"help": "Print sizes, steps, time, memory and disk of this run, and stop there."}
    )
    card: str | None = field(
        default=None, metadata={"help": "With --dry_run: folder for the model card that the run will have."}
    )


def started(student: StudentArguments) -> RaptorModel | None:
    """The Raptor that `--student` names, in float32."""
    if student.student is None:
        return None
    given = [
        name for name in ("num_blocks", "repeats", "phases", *STUDENT_OPTIONS) if getattr(student, name) is not None
    ]
    if given:
        raise UsageError(f"--student and --{given[0]} exclude each other; the Raptor has its blocks already.")
    load_config(student.student)
    require_weights(student.student)
    return RaptorModel.from_pretrained(student.student, dtype=torch.float32)


def student_options(student: StudentArguments) -> dict[str, Any]:
    """How the student is made from the teacher, see [`~raptor_hf.runs.distill`]."""
    return {"depth_scale": student.depth_scale, **{name: getattr(student, name) for name in STUDENT_OPTIONS}}


def run_phases(
    student: StudentArguments,
    given: Phases | None,
    teacher: Teacher,
    train_images: ImageDataset | ImageStream,
    processor: Any,
    output_dir: Path,
) -> tuple[Phases, dict | None]:
    """Phases that were given, or those found on the training images; the record of the search if there is one."""
    if student.phases is not None:
        record = read_json(_phases_file(student.phases))
    elif given is None:
        pixels = phase_pixels(train_images, processor, student.phase_images)
        with status(f"phases on {len(pixels)} images"), PartialState().main_process_first():
            record = discover_phases(teacher, pixels, (student.num_blocks or 3,), output_dir / PHASES_FILE)
    else:
        return given, None
    return given or _partition(record, student.num_blocks or 3), record


def given_phases(student: StudentArguments, start: RaptorModel | None) -> Phases | None:
    """Phases that the arguments name, or the Raptor that is gone on with has; `None` if they are to be found."""
    if start is not None:
        return Phases.from_schedule(start.config.block_schedule or ())
    given = [name for name in ("num_blocks", "repeats", "phases") if getattr(student, name) is not None]
    if "repeats" in given:
        if len(given) > 1:
            raise UsageError(f"--{given[0]} and --{given[1]} exclude each other; give the repeats alone.")
        return Phases.from_repeats(student.repeats or ())
    if student.phases is None:
        return None
    path, count = _phases_file(student.phases), student.num_blocks or 3
    record = read_json(path)
    if str(count) not in record["partitions"]:
        raise UsageError(f"{path} has no partition into {count} blocks, only {', '.join(record['partitions'])}.")
    return _partition(record, count)


def _phases_file(name: str) -> Path:
    return Path(name) / PHASES_FILE if Path(name).is_dir() else Path(name)


def _partition(record: dict[str, Any], count: int) -> Phases:
    return Phases.from_schedule(record["partitions"][str(count)]["block_schedule"])
