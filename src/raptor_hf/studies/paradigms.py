"""What a Raptor is trained on: its own states or the teacher's, all of them or the last (arXiv 2512.19941, Fig. 5)."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..arguments import DistillationArguments
from ..data import PixelDataset
from ..phases import Phases
from ..runs import distill
from ..teachers import Teacher
from .partitions import finished_run

# Terminal distillation supervises the model's last layer, so its blocks must be connected.
PARADIGMS = {
    "terminal": {"objective": "terminal", "stage": "end_to_end"},
    "teacher forcing": {"objective": "teacher_forcing", "stage": "blocks"},
    "autoregressive": {"objective": "autoregressive", "stage": "blocks"},
    "hybrid": {"objective": "hybrid", "stage": "blocks"},
}


def distil_paradigms(
    teacher: Teacher,
    phases: Phases,
    arguments: Callable[..., DistillationArguments],
    train: PixelDataset,
    evaluation: PixelDataset,
    output_dir: str | Path,
    score: Callable[[Any], float] | None = None,
    *,
    seeds: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """Distils a Raptor by each of `PARADIGMS` with the same budget, and measures its free rollout layer by layer.

    What is finished stands in `output_dir` and is not done again; a run that was interrupted goes on.

    Args:
        teacher, train, evaluation: as for [`~raptor_hf.runs.distill`].
        phases (`Phases`): of every Raptor.
        arguments (`Callable`): of a run, from its folder, its seed, and the keywords `objective` and `stage`.
        output_dir: folder of the runs' folders.
        score (`Callable`, *optional*): Raptor to accuracy, 0..1.
        seeds (`Sequence[int]`): Raptors of each paradigm.

    Returns:
        `list[dict]`: as of [`finished_run`], with `"paradigm"`, `"stage"`, `"block_schedule"` and `"seed"`.

    Raises:
        ValueError: as the trainer does.
    """
    records, schedule = [], list(phases.block_schedule)
    for paradigm, options in PARADIGMS.items():
        for seed in seeds:
            name = f"{paradigm.replace(' ', '-')}-{'.'.join(map(str, schedule))}"
            folder = Path(output_dir) / name / f"seed{seed}"
            own = {"paradigm": paradigm, "stage": options["stage"], "block_schedule": schedule, "seed": seed}
            run = partial(distill, teacher, phases, train=train, evaluation=evaluation, name=name)
            records.append(finished_run(folder, own, run, partial(arguments, str(folder), seed, **options), score))
    return records
