"""How the weight-tied blocks of a student start from the layers of its teacher.

Copied to the Hub with every saved model: imports torch, transformers and flat siblings only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .configuration_raptor import RaptorConfig
from .modeling_raptor_layers import RaptorLinear

logger = logging.get_logger(__name__)

INITS = ("first", "middle", "last", "mean", "random")
ADAPTER_INITS = ("zeros", "svd")


def check_inits(init: str, adapter_init: str) -> None:
    """Raises `ValueError` if a way to start blocks or adapters is unknown."""
    for name, value, allowed in (("init", init, INITS), ("adapter_init", adapter_init, ADAPTER_INITS)):
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}.")


def init_blocks(blocks: nn.ModuleList, config: RaptorConfig, teacher: Any, how: str) -> None:
    """Copies teacher layers into blocks; what has another shape there keeps its random start, with a warning.

    Args:
        blocks: the student's blocks.
        config: the student's configuration, with the schedule.
        teacher: anything with `block_state(layer)`.
        how: the `"first"`, `"middle"` or `"last"` layer that a block makes, or the `"mean"` of all.
    """
    schedule: Any = config.block_schedule
    for number, block in enumerate(blocks):
        layers = [layer for layer, made_by in enumerate(schedule, 1) if made_by == number]
        source, own = _block_source(teacher, layers, how), block.state_dict()
        fitting = {name: value for name, value in source.items() if name in own and own[name].shape == value.shape}
        block.load_state_dict(fitting, strict=False)
        skipped = sorted(set(source) - set(fitting))
        if skipped and not number:
            logger.warning(f"The {config.mlp_type} MLP, unlike the teacher's, starts at random: {skipped}.")


@torch.no_grad()
def init_adapters(blocks: nn.ModuleList, config: RaptorConfig, teacher: Any) -> None:
    """Truncated SVD of what the matrices of every teacher layer differ from its block's by. All of the singular value
    goes into the second factor, so that where nothing differs the first still passes a gradient on.
    """
    schedule: Any = config.block_schedule
    for layer, number in enumerate(schedule, 1):
        application, source = schedule[: layer - 1].count(number), teacher.block_state(layer)
        for name, projection in blocks[number].named_modules():
            target = source.get(f"{name}.weight") if isinstance(projection, RaptorLinear) else None
            if target is None or target.shape != projection.weight.shape:
                continue  # no projection, or the teacher's MLP is another one: no change to start with
            weight, adapters = projection.weight.float(), (projection.adapter_down, projection.adapter_up)
            left, values, right = torch.linalg.svd(target.to(weight) - weight, full_matrices=False)
            down, up = (adapter[application] for adapter in adapters if adapter is not None)
            rank = min(down.shape[0], len(values))
            down[:rank], up[:, :rank] = right[:rank], left[:, :rank] * values[:rank]


def _block_source(teacher: Any, layers: Sequence[int], how: str) -> Mapping[str, torch.Tensor]:
    if how == "mean":
        states = [teacher.block_state(layer) for layer in layers]
        return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    position = {"first": 0, "middle": (len(layers) - 1) // 2, "last": -1}[how]
    return teacher.block_state(layers[position])
