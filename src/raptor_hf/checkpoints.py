"""Which checkpoint of a run can be gone on with: the newest complete one; a half-written one never."""

import json
import shutil
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)


def last_complete_checkpoint(output_dir: str | Path, world_size: int = 1) -> str | None:
    """Newest checkpoint of a run that can be resumed; newer half-written ones are deleted.

    The Trainer writes `trainer_state.json` last, so a checkpoint is complete when that file parses and every rank's
    random state is there.

    Args:
        output_dir: folder that holds `checkpoint-N` folders.
        world_size: number of processes.
    """
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[-1].isdigit()]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        if _is_complete(folder, world_size):
            return str(folder)
        if (folder / "optimizer.pt").exists() or not (folder / "trainer_state.json").exists():
            logger.warning(f"Checkpoint {folder.name} is incomplete, as after an interruption; it is deleted.")
            shutil.rmtree(folder)
    return None


def _is_complete(folder: Path, world_size: int) -> bool:
    try:
        json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    return all((folder / name).is_file() for name in ("optimizer.pt", "scheduler.pt", *names))
