"""Images shared out among the processes of a launch, so that what comes of them is what one process would have made.

Every batch is cut into as many parts as there are processes, and what the processes made of their parts is put together
again in the batch's order. Nothing is counted twice, whatever the numbers of images and of processes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, gather
from torch import nn
from torch.utils.data import DataLoader, Dataset


def own_part(batch: Sequence[int]) -> list[int]:
    """This process's part of the batch's indices, equally long in every process: the last index fills what is missing.

    Raises:
        ValueError: if the batch is empty.
    """
    if len(batch) == 0:
        raise ValueError("an empty batch has no parts; leave it out.")
    processes = PartialState()
    length = -(-len(batch) // processes.num_processes)
    own = list(batch[processes.process_index * length : (processes.process_index + 1) * length])
    return own + [batch[-1]] * (length - len(own))


def shuffled_batches(num_images: int, batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """The images of an epoch in batches, the last of which may be smaller, in an order of seed and epoch alone."""
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    return [batch.tolist() for batch in order.split(batch_size)]


def shared_loader(
    pixels: Dataset, batches: Iterable[Sequence[int]], num_workers: int, collate: Callable[[list[Any]], Any]
) -> DataLoader:
    """Loads this process's part of every batch, [`own_part`]."""
    return DataLoader(
        pixels, batch_sampler=[own_part(batch) for batch in batches], collate_fn=collate, num_workers=num_workers,
        generator=torch.Generator(),  # else workers' seeds would be drawn from the global generator
    )  # fmt: skip


def joined(part: torch.Tensor, count: int) -> torch.Tensor:
    """What all processes made of a batch of `count` images, in its order; of this one it is `part`, along axis 0."""
    return part if PartialState().num_processes == 1 else gather(part.contiguous())[:count]


def summed(values: torch.Tensor) -> torch.Tensor:
    """Sum of the tensors of all processes, in the order of their ranks."""
    if PartialState().num_processes == 1:
        return values
    parts = gather(values.to(PartialState().device)[None])
    return parts.sum(dim=0).to(values.device)


def own_images(count: int) -> range:
    """This process's of `count` images, each of which is one process's; none where there are too few."""
    processes = PartialState()
    return range(processes.process_index, count, processes.num_processes)


def load_first(module: nn.Module) -> None:
    """Gives every process the parameters of the first, so that rounding cannot drive the copies apart."""
    if PartialState().num_processes > 1:
        module.load_state_dict(broadcast(module.state_dict()))


def first_value(value: Any) -> Any:
    """The first process's value, which must be one that pickle takes."""
    if PartialState().num_processes == 1:
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def without_bar() -> bool | None:
    """What tqdm's `disable` must be so that one process shows the bar, and only on a terminal."""
    return None if PartialState().is_main_process else True
