"""Which checkpoint of a run can be gone on with: the newest complete one; a half-written one never."""

import json
import shutil
from pathlib import Path

from transformers.utils import logging

logger = logging.get_logger(__name__)

WORLD_FILE = "world_size.json"
# One of these holds the optimiser: of one process and DDP, of FSDP whole or sharded, of DeepSpeed.
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*")


def last_complete_checkpoint(output_dir: str | Path, world_size: int = 1, *, clean: bool = True) -> str | None:
    """Newest checkpoint of a run that can be resumed.

    The Trainer writes `trainer_state.json` last, so a checkpoint is complete when that file parses and the random state
    of every process that wrote it is there.

    Args:
        output_dir: folder that holds `checkpoint-N` folders.
        world_size: number of processes that a checkpoint is taken to be from if it does not say.
        clean: delete newer half-written ones; of several processes one alone may.
    """
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[-1].isdigit()]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[-1]), reverse=True):
        if _is_complete(folder, world_size):
            return str(folder)
        if clean and (_has_optimizer(folder) or not (folder / "trainer_state.json").exists()):
            logger.warning(f"Checkpoint {folder.name} is incomplete, as after an interruption; it is deleted.")
            shutil.rmtree(folder)
    return None


def mark_world_size(folder: str | Path, world_size: int) -> None:
    """Writes into a checkpoint, before anything else, how many processes are about to write it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / WORLD_FILE).write_text(json.dumps(world_size))


def _is_complete(folder: Path, world_size: int) -> bool:
    try:
        json.loads((folder / "trainer_state.json").read_text())
        if (folder / WORLD_FILE).exists():
            world_size = int(json.loads((folder / WORLD_FILE).read_text()))
    except (OSError, ValueError):
        return False
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    return _has_optimizer(folder) and all((folder / name).is_file() for name in ("scheduler.pt", *names))


def _has_optimizer(folder: Path) -> bool:
    return any(True for pattern in _OPTIMIZERS for _ in folder.glob(pattern))
