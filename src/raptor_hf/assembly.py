"""Blocks that were trained apart, each in a run of its own, become one Raptor."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .cards import load_config
from .modeling_raptor import RaptorModel
from .results import RESULTS_FILE, read_json

_OWN_FIELDS = ("_name_or_path", "transformers_version", "dtype", "architectures", "auto_map")


def trained_blocks(run: str | Path) -> tuple[Path, list[int]]:
    """Folder of the model that a finished run of `raptor-hf distill --blocks` left, and the blocks it trained.

    Raises:
        ValueError: if the run is not finished, or trained all blocks.
    """
    run = Path(run)
    if not (run / RESULTS_FILE).is_file():
        raise ValueError(f"{run} holds no finished run; run its command again, and name the folder of --output_dir.")
    (model, *_) = read_json(run / RESULTS_FILE)["models"]
    if model.get("trained_blocks") is None:
        raise ValueError(f"{run} trained all blocks, not some of them; name runs of distill --blocks.")
    return run / model["path"], list(model["trained_blocks"])


def assemble_blocks(parts: Sequence[tuple[str | Path, Sequence[int]]]) -> RaptorModel:
    """One Raptor of blocks trained apart: equal to the one whose blocks were trained together in stage 1.

    Args:
        parts: folder of a saved Raptor and the numbers of the blocks to take from it, for every run.

    Returns:
        the Raptor; embeddings and final norm are the same in all parts.

    Raises:
        ValueError: if a block is missing or given twice, or the parts differ in configuration, embeddings or final
            norm.
    """
    if not parts:
        raise ValueError("no runs to assemble; name the folders of the runs of distill --blocks.")
    configs = {Path(folder): load_config(folder) for folder, _ in parts}
    first, *others = configs
    num_blocks = configs[first].num_blocks
    for other in others:
        _check_same_config(configs[first].to_dict(), configs[other].to_dict(), first, other)
    _check_blocks(parts, num_blocks)
    model = RaptorModel.from_pretrained(first)
    state = model.state_dict()
    for folder, blocks in parts:
        own = RaptorModel.from_pretrained(folder).state_dict()
        for name, value in own.items():
            if not name.startswith("blocks."):
                if not torch.equal(value, state[name]):
                    raise ValueError(f"{name} of {folder} differs from that of {first}: they have different teachers.")
            elif int(name.split(".")[1]) in blocks:
                state[name] = value
    model.load_state_dict(state)
    return model


def _check_same_config(one: Mapping[str, Any], other: Mapping[str, Any], first: Path, second: Path) -> None:
    differing = sorted(
        name for name in one.keys() | other.keys() if name not in _OWN_FIELDS and one.get(name) != other.get(name)
    )
    if differing:
        name = differing[0]
        raise ValueError(
            f"{first} has {name}={one.get(name)} and {second} has {name}={other.get(name)}; blocks of one Raptor are "
            "trained with the same teacher, phases and student options."
        )


def _check_blocks(parts: Sequence[tuple[str | Path, Sequence[int]]], num_blocks: int) -> None:
    owners: dict[int, list[str]] = {block: [] for block in range(num_blocks)}
    for folder, blocks in parts:
        for block in blocks:
            if block not in owners:
                raise ValueError(f"block {block} of {folder}: these Raptors have the blocks 0 to {num_blocks - 1}.")
            owners[block].append(str(folder))
    missing = [block for block, folders in owners.items() if not folders]
    doubled = {block: folders for block, folders in owners.items() if len(folders) > 1}
    if missing:
        names = ", ".join(map(str, missing))
        raise ValueError(
            f"block {names} of {num_blocks} is in none of the runs; train it with distill --blocks {names}."
        )
    if doubled:
        block, folders = next(iter(doubled.items()))
        raise ValueError(f"block {block} was trained in {' and in '.join(folders)}; leave one of them out.")
