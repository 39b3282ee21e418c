"""Features that a classification probe learns from: images through a frozen backbone, shared out among processes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .data import ImageDataset, PixelDataset, collate_pixels
from .frozen import FrozenBackbone
from .modeling_raptor import RaptorModel
from .processes import joined, own_part, shared_loader, without_bar
from .streams import ImageStream, PixelStream
from .teachers import Teacher
from .tokens import TokenLayout


class FeatureExtractor:
    """Images to float32 features and labels on the backbone's device, without gradients.

    Args:
        backbone: a Raptor or a [`Teacher`].
        features: `(final norm's output (batch_size, seq_length, hidden_size), layout)` to features, a row an image.
        batch_size: images at a time, over all processes.
        num_workers: processes that read images.
    """

    def __init__(
        self,
        backbone: RaptorModel | Teacher,
        features: Callable[[torch.Tensor, TokenLayout], torch.Tensor],
        batch_size: int,
        num_workers: int = 0,
    ) -> None:
        self.frozen, self.features = FrozenBackbone(backbone), features
        self.batch_size, self.num_workers = batch_size, num_workers

    def batches(
        self, pixels: PixelDataset, batches: Sequence[Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Features and labels of every batch of indices, of which each process computes its part."""
        loader = shared_loader(pixels, batches, self.num_workers, collate_pixels)
        for batch, part in zip(batches, loader, strict=True):
            yield self._of(part["pixel_values"], part["labels"], len(batch))

    def all(self, pixels: PixelDataset | PixelStream, description: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of all images, in their order, a stream's in one pass."""
        if isinstance(pixels, PixelStream):
            found, length = self._streamed(pixels), None
        else:
            batches = [batch.tolist() for batch in torch.arange(len(pixels)).split(self.batch_size)]
            found, length = self.batches(pixels, batches), len(batches)
        features, labels = zip(*tqdm(found, description, length, leave=False, disable=without_bar()), strict=True)
        return torch.cat(features), torch.cat(labels)

    def _streamed(self, pixels: PixelStream) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # Every process reads the whole stream, since none knows what the others' files hold, and computes its part.
        loader = DataLoader(
            pixels, self.batch_size, collate_fn=collate_pixels, num_workers=self.num_workers,
            generator=torch.Generator(),
        )  # fmt: skip
        for batch in loader:
            own = own_part(range(len(batch["labels"])))
            yield self._of(batch["pixel_values"][own], batch["labels"][own], len(batch["labels"]))

    @torch.no_grad()
    def _of(self, pixel_values: torch.Tensor, labels: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.features(self.frozen(pixel_values), self.frozen.layout)
        return joined(found, count), joined(labels.to(self.frozen.device), count)


def to_pixels(images: ImageDataset | ImageStream, processor: Any, image_size: int | None, augment: str = "none") -> Any:
    """Images through `processor`; a stream once, in the order of its files."""
    if isinstance(images, ImageStream):
        return PixelStream(images, processor, image_size=image_size, repeat=False)
    return PixelDataset(images, processor, image_size=image_size, augment=augment)
