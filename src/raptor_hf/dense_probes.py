"""Linear probes for every pixel: segmentation (ADE20k) and depth (NYUv2) of arXiv 2512.19941, App. A.4.

Two tasks as data ([`DenseTask`]), trained by the loop of [`~raptor_hf.probes`]. Backbone, embeddings and final norm
stay as they are; only the head, one linear map of a patch's features, learns.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from tqdm.auto import tqdm

from .dense_data import ADE_CLASSES, IGNORE_INDEX, DenseDataset
from .dense_metrics import CROPS, DepthRange, DepthScores, SegmentationScores
from .dense_pixels import DensePixels, Frame, collate_dense
from .frozen import FrozenBackbone
from .modeling_raptor import RaptorModel
from .modeling_raptor_dense import DepthBins, depth_loss, patch_and_cls_features, patch_features, segmentation_loss
from .probes import ProbeArguments, ProbeResult, started_head, train_head
from .processes import joined, own_images, shared_loader, shuffled_batches, summed, without_bar
from .teachers import Teacher
from .tokens import TokenLayout

SILOG = ("adabins", "code")
EVAL_SIZES = ("native", "input")


@dataclass(frozen=True)
class DenseProbeArguments(ProbeArguments):
    """How a dense head is trained and scored; [`SEGMENTATION_ARGUMENTS`] and [`DEPTH_ARGUMENTS`] are the paper's.

    Attributes:
        image_size: height and width that images are resized to; padded around to a multiple of the patch.
        scale: share of an image's area that a training crop keeps.
        eval_size: labels are scored at their `"native"` size, or resized to the images' (`"input"`, the research code
            for ADE20k).
        silog: `"adabins"` takes the root as AdaBins defines it, `"code"` does not, as the research code.
        align: see [`~raptor_hf.dense_pixels.Frame`].
        crop: pixels that a depth is scored on, see [`~raptor_hf.dense_metrics.DepthRange`].

    Raises:
        ValueError: if a value is out of range or unknown.
    """

    augment: str = "crop_flip"
    image_size: tuple[int, int] = (518, 518)
    scale: tuple[float, float] = (0.5, 1.0)
    eval_size: str = "native"
    silog: str = "adabins"
    align: str = "padding"
    crop: str = "eigen"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("eval_size", EVAL_SIZES), ("silog", SILOG), ("crop", CROPS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}.")
        Frame(self.image_size, 1, self.align)


SEGMENTATION_ARGUMENTS = DenseProbeArguments(learning_rate=1e-3, weight_decay=1e-2, num_epochs=10, batch_size=32)
DEPTH_ARGUMENTS = DenseProbeArguments(
    learning_rate=1e-3, weight_decay=1e-3, num_epochs=25, batch_size=128, schedule="constant", warmup_steps=0,
    max_grad_norm=0.0, augment="crop_flip_jitter", image_size=(480, 640), scale=(0.5, 2.0),
)  # fmt: skip


@dataclass(frozen=True)
class DenseTask:
    """What is probed.

    Attributes:
        name: of the task, as the Hub calls it.
        features: `(final norm's output (batch_size, seq_length, hidden_size), layout, grid)` to the head's input
            `(batch_size, channels, rows, columns)`.
        num_outputs: channels of the head's output.
        loss: `(head's output, labels (batch_size, height, width), frame, arguments)` to a scalar.
        predict: `(head's output of one image, size, frame)` to a prediction `(height, width)`.
        scores: arguments to what sums the metrics up.
        primary_metric, greater_is_better: the value that counts.
        keep_ratio: whether training crops keep the image's ratio.
    """

    name: str
    features: Callable[[torch.Tensor, TokenLayout, tuple[int, int]], torch.Tensor]
    num_outputs: int
    loss: Callable[[torch.Tensor, torch.Tensor, Frame, DenseProbeArguments], torch.Tensor]
    predict: Callable[[torch.Tensor, tuple[int, int], Frame], torch.Tensor]
    scores: Callable[[DenseProbeArguments], Any]
    primary_metric: str
    greater_is_better: bool
    keep_ratio: bool = False


def probe_bins() -> DepthBins:
    """256 bins of the depths that are scored."""
    valid = DepthRange()
    return DepthBins(256, valid.minimum, valid.maximum)


def _segmentation_loss(
    logits: torch.Tensor, labels: torch.Tensor, frame: Frame, arguments: DenseProbeArguments
) -> torch.Tensor:
    return segmentation_loss(logits, labels, resize=frame.to_labels, ignore_index=IGNORE_INDEX)


def _depth_loss(
    logits: torch.Tensor, labels: torch.Tensor, frame: Frame, arguments: DenseProbeArguments
) -> torch.Tensor:
    return depth_loss(
        logits, labels, probe_bins(), resize=frame.to_labels, pad=lambda depths: frame.pad(depths, 0.0),
        silog_root=arguments.silog == "adabins",
    )  # fmt: skip


SEGMENTATION = DenseTask(
    name="semantic-segmentation",
    features=patch_features,
    num_outputs=ADE_CLASSES,
    loss=_segmentation_loss,
    predict=lambda logits, size, frame: frame.to_labels(logits, size).argmax(dim=1)[0],
    scores=lambda arguments: SegmentationScores(ADE_CLASSES, IGNORE_INDEX),
    primary_metric="mean_iou",
    greater_is_better=True,
)
DEPTH = DenseTask(
    name="depth-estimation",
    features=patch_and_cls_features,
    num_outputs=probe_bins().number,
    loss=_depth_loss,
    predict=lambda logits, size, frame: frame.to_labels(probe_bins().depths(logits), size)[0, 0],
    scores=lambda arguments: DepthScores(DepthRange(crop=arguments.crop)),
    primary_metric="rmse",
    greater_is_better=False,
    keep_ratio=True,
)
DENSE_TASKS = {"segmentation": (SEGMENTATION, SEGMENTATION_ARGUMENTS), "depth": (DEPTH, DEPTH_ARGUMENTS)}


class DenseProbe:
    """Trains and scores a dense head on a frozen backbone: `probe(backbone, processor) -> ProbeResult`.

    Args:
        task: [`SEGMENTATION`] or [`DEPTH`].
        train_pairs, eval_pairs: images with a label for every pixel.
        arguments: how the head is trained; the task's own by default.
        num_workers: processes that read images.
        start: as in [`~raptor_hf.probes.LinearProbe`].

    Raises:
        ValueError: if a set is empty.
    """

    def __init__(
        self,
        task: DenseTask,
        train_pairs: DenseDataset,
        eval_pairs: DenseDataset,
        arguments: DenseProbeArguments | None = None,
        *,
        num_workers: int = 0,
        start: nn.Module | None = None,
    ) -> None:
        for name, pairs in (("training", train_pairs), ("evaluation", eval_pairs)):
            if len(pairs) == 0:
                raise ValueError(f"the {name} set of a probe is empty.")
        default = SEGMENTATION_ARGUMENTS if task.primary_metric == "mean_iou" else DEPTH_ARGUMENTS
        self.task, self.train_pairs, self.eval_pairs = task, train_pairs, eval_pairs
        self.arguments, self.num_workers, self.start = arguments or default, num_workers, start

    @property
    def primary_metric(self) -> str:
        """Name of the value that counts."""
        return self.task.primary_metric

    @property
    def greater_is_better(self) -> bool:
        """Whether more of it is better."""
        return self.task.greater_is_better

    def get_config_dict(self) -> dict[str, Any]:
        """The protocol, as plain values."""
        return asdict(self.arguments)

    def size(self, backbone: RaptorModel | Teacher, processor: Any) -> dict[str, Any]:
        """[`FrozenBackbone.size`] of the backbone at the size of the images that it is probed with."""
        frozen = FrozenBackbone(backbone)
        return frozen.size(*Frame(self.arguments.image_size, frozen.patch_size, self.arguments.align).padded)

    def __call__(
        self,
        backbone: RaptorModel | Teacher,
        processor: Any,
        description: str = "probe",
        outcomes: MutableMapping[int, Any] | None = None,
        keep: Callable[[int, nn.Module], None] | None = None,
    ) -> ProbeResult:
        """Probes `backbone` with images put through `processor`.

        Args:
            backbone: a Raptor or a [`Teacher`], which may be any supported ViT, random ones too.
            processor: its image processor, which normalises.
            description: shown beside the progress bar.
            outcomes, keep: as in [`~raptor_hf.probes.LinearProbe`].
        """
        frozen, options = FrozenBackbone(backbone), self.arguments
        frame = Frame(options.image_size, frozen.patch_size, options.align)
        evaluation = DensePixels(self.eval_pairs, processor, frame, resize_labels=options.eval_size == "input")
        outcomes, head = {} if outcomes is None else outcomes, None
        for seed in (seed for seed in options.seeds if seed not in outcomes):
            training = DensePixels(
                self.train_pairs, processor, frame, augment=options.augment, scale=options.scale,
                keep_ratio=self.task.keep_ratio, resize_labels=True, seed=seed,
            )  # fmt: skip
            head = self._new_head(seed, frozen)
            values = train_head(
                head, self._batches(seed, training, frozen, frame), options, len(self.train_pairs),
                loss=lambda outputs, labels: self.task.loss(outputs, labels, frame, options),
                score=lambda head: self._score(head, evaluation, frozen, frame),
                description=f"{description}: seed {seed}", worth=self._worth,
            )  # fmt: skip
            if keep is not None:
                keep(seed, head)
            outcomes[seed] = values
        details = [outcomes[seed] for seed in options.seeds]
        return ProbeResult(
            self.task.name, self.primary_metric, [values[self.primary_metric] for values in details],
            len(self.eval_pairs), self.train_pairs.num_skipped + self.eval_pairs.num_skipped, self.get_config_dict(),
            head, details=details,
            greater_is_better=self.greater_is_better,
        )  # fmt: skip

    @torch.no_grad()
    def predict(
        self, backbone: RaptorModel | Teacher, processor: Any, head: nn.Module, indices: Sequence[int]
    ) -> list[torch.Tensor]:
        """What `head` makes of evaluation images: classes, int64, or metres, float32, `(height, width)` of each label.

        Args:
            backbone, processor: what the head was trained on.
            head: of [`~raptor_hf.probes.ProbeResult`].
            indices: of the images.
        """
        frozen = FrozenBackbone(backbone)
        frame = Frame(self.arguments.image_size, frozen.patch_size, self.arguments.align)
        found = []
        for item in (DensePixels(self.eval_pairs, processor, frame)[index] for index in indices):
            outputs = head(self._features(item["pixel_values"][None], frozen, frame))
            height, width = item["label"].shape
            found.append(self.task.predict(outputs, (height, width), frame).cpu())
        return found

    def _worth(self, values: dict[str, Any]) -> float:
        """More is better; a value that is not known is worth nothing."""
        value = values[self.primary_metric]
        return (value if self.greater_is_better else -value) if value == value else float("-inf")

    def _new_head(self, seed: int, frozen: FrozenBackbone) -> nn.Module:
        channels = frozen.hidden_size * (2 if self.task.features is patch_and_cls_features else 1)
        if self.start is not None:
            return started_head(self.start, channels, self.task.num_outputs).to(frozen.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Conv2d(channels, self.task.num_outputs, kernel_size=1).to(frozen.device)

    @torch.no_grad()
    def _features(self, pixel_values: torch.Tensor, frozen: FrozenBackbone, frame: Frame) -> torch.Tensor:
        hidden_states = frozen(pixel_values)
        return self.task.features(hidden_states, frozen.layout, frame.grid)

    def _batches(
        self, seed: int, pixels: DensePixels, frozen: FrozenBackbone, frame: Frame
    ) -> Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        """Function of the epoch to that epoch's features and labels, in an order of seed and epoch."""
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def computed(batches: list[list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            """Features and labels of every batch, which the processes share."""
            for batch, part in zip(
                batches, shared_loader(pixels, batches, self.num_workers, collate_dense), strict=True
            ):
                features = self._features(part["pixel_values"], frozen, frame)
                labels = torch.stack(part["labels"]).to(frozen.device)
                yield joined(features, len(batch)), joined(labels, len(batch))

        def epoch_batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            """Batches of one epoch; without augmentation each image goes through the backbone once."""
            batches = shuffled_batches(len(pixels), self.arguments.batch_size, seed, epoch)
            if pixels.augment != "none":
                pixels.set_epoch(epoch)
                yield from computed(batches)
                return
            if not kept:
                in_order = torch.arange(len(pixels)).split(self.arguments.batch_size)
                for found in computed([batch.tolist() for batch in in_order]):
                    kept.extend(zip(*found, strict=True))
            for chosen in batches:
                features, labels = zip(*(kept[index] for index in chosen), strict=True)
                yield torch.stack(features), torch.stack(labels)

        return epoch_batches

    @torch.no_grad()
    def _score(self, head: nn.Module, pixels: DensePixels, frozen: FrozenBackbone, frame: Frame) -> dict[str, Any]:
        """Scores of the evaluation images, of which each process takes its own."""
        scores = self.task.scores(self.arguments)
        own = Subset(pixels, own_images(len(pixels)))
        loader = DataLoader(
            own, self.arguments.batch_size, collate_fn=collate_dense, num_workers=self.num_workers,
            generator=torch.Generator(),
        )  # fmt: skip
        for batch in tqdm(loader, desc="scoring", leave=False, disable=without_bar()):
            outputs = head(self._features(batch["pixel_values"], frozen, frame))
            for output, label in zip(outputs, batch["labels"], strict=True):
                size = (label.shape[0], label.shape[1])
                scores.update(self.task.predict(output[None], size, frame), label)
        scores.load_state(summed(scores.state()))
        return scores.compute()


def scaled(arguments: DenseProbeArguments, **changes: Any) -> DenseProbeArguments:
    """The arguments with those `changes` that are not `None`."""
    return replace(arguments, **{name: value for name, value in changes.items() if value is not None})
