"""Linear probes: what a frozen backbone's features are worth (arXiv 2512.19941, App. A.4).

A task is data ([`ProbeTask`]), and one loop ([`LinearProbe`]) trains it for a Raptor and for its teacher alike, so that
both are measured by the same code. Backbone, embeddings and final norm stay as they are; only the head learns.
"""

import copy
import statistics
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import get_scheduler

from .data import ImageDataset, PixelDataset
from .frozen import FrozenBackbone
from .modeling_raptor import RaptorModel
from .probe_features import FeatureExtractor, to_pixels
from .processes import load_first, shuffled_batches, without_bar
from .streams import ImageStream
from .teachers import Teacher
from .tokens import TokenLayout

SELECT = ("last", "best")
SCHEDULES = ("cosine", "constant")
TOP = 5  # the classes among which the labelled one is looked for, beside the first


@dataclass(frozen=True)
class ProbeTask:
    """What is probed.

    Attributes:
        name: of the task, as the Hub calls it.
        features: `(final norm's output (batch_size, seq_length, hidden_size), layout)` to the head's input.
        head: `(features, outputs)` to a module.
        loss: `(head's output, labels)` to a scalar.
        predict: head's output to predictions.
        metric: makes an `evaluate.Metric`.
        primary_metric: the metric's value that counts; greater is better.
    """

    name: str
    features: Callable[[torch.Tensor, TokenLayout], torch.Tensor]
    head: Callable[[int, int], nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    predict: Callable[[torch.Tensor], torch.Tensor]
    metric: Callable[[], Any]
    primary_metric: str


def _accuracy() -> Any:
    from .metrics import RaptorAccuracy

    return RaptorAccuracy()


IMAGE_CLASSIFICATION = ProbeTask(
    name="image-classification",
    features=lambda hidden_states, layout: layout.pool(hidden_states),
    head=nn.Linear,
    loss=nn.functional.cross_entropy,
    predict=lambda logits: logits.argmax(dim=-1),
    metric=_accuracy,
    primary_metric="accuracy",
)


@dataclass(frozen=True)
class ProbeArguments:
    """How a head is trained. The defaults are the paper's for ImageNet-1k; a small set needs a larger learning rate.

    Attributes:
        learning_rate, weight_decay: of AdamW.
        num_epochs: passes over the training images; 0 measures the untrained head.
        batch_size: images per step.
        schedule: `"cosine"`, after a warm-up down to 1 % of the learning rate; or `"constant"`.
        warmup_steps: linear warm-up of the cosine from 1 % of the learning rate, at most a tenth of the run.
        max_grad_norm: gradient clip, 0 for none.
        augment: `"crop_flip"` (RandomResizedCrop and flip, the paper's) runs the backbone anew in every epoch; `"none"`
            runs it once and keeps the features in memory.
        select: `"last"` epoch, or `"best"` on the evaluation set itself, the untrained start included, as the research
            code reports.
        seeds: one head is trained for each; mean and standard deviation are over them.

    Raises:
        ValueError: if a value is out of range or unknown.
    """

    learning_rate: float = 1e-4
    weight_decay: float = 1e-2
    num_epochs: int = 15
    batch_size: int = 512
    warmup_steps: int = 100
    max_grad_norm: float = 1.0
    augment: str = "crop_flip"
    select: str = "last"
    seeds: tuple[int, ...] = (0, 1, 2)
    schedule: str = "cosine"

    def __post_init__(self) -> None:
        if self.select not in SELECT:
            raise ValueError(f"select={self.select!r} is unknown; use one of {', '.join(SELECT)}.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is unknown; use one of {', '.join(SCHEDULES)}.")
        if self.learning_rate <= 0 or self.num_epochs < 0 or self.batch_size < 1:
            raise ValueError(
                f"learning_rate={self.learning_rate}, num_epochs={self.num_epochs}, batch_size={self.batch_size}: a "
                "probe needs a positive learning rate, 0 or more epochs and at least one image per step."
            )
        if not self.seeds:
            raise ValueError("seeds=() trains no head; give at least one seed.")


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of a probe.

    Attributes:
        task: name of the task.
        metric: name of the value that counts.
        values: it, for every seed.
        num_scored: evaluation images that were scored, each once.
        num_skipped: damaged images left out of both sets.
        protocol: the [`ProbeArguments`].
        head: the last head that was trained; not part of the dictionary.
        details: every value of the metric, for every seed, where there is more than one.
        greater_is_better: whether more of the value is better.
    """

    task: str
    metric: str
    values: list[float]
    num_scored: int
    num_skipped: int
    protocol: dict[str, Any]
    head: nn.Module | None = field(default=None, repr=False, compare=False)
    details: list[dict[str, Any]] = field(default_factory=list)
    greater_is_better: bool = True

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Standard deviation over the seeds (of a sample); `None` for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def retained(self, teacher: "ProbeResult") -> float | None:
        """Share of the teacher's mean that this one keeps; of an error, the teacher's as a share of this one's. `None`
        if it would be a share of 0.
        """
        part, whole = (self, teacher) if self.greater_is_better else (teacher, self)
        return part.mean / whole.mean if whole.mean else None

    def to_dict(self, teacher: "ProbeResult | None" = None) -> dict[str, Any]:
        """Plain values, with `"retained"` when the teacher's result is given."""
        values = {self.metric: self.values, "mean": self.mean, "std": self.std, "num_scored": self.num_scored}
        values["num_skipped"] = self.num_skipped
        if self.details:
            values["details"] = self.details
        return values if teacher is None else {**values, "retained": self.retained(teacher)}


class LinearProbe:
    """Trains and scores a head on a frozen backbone: `probe(backbone, processor) -> ProbeResult`.

    Args:
        train_images, eval_images: labelled [`ImageDataset`]s of the same classes; or [`ImageStream`]s, read once for
            every backbone, which need `augment="none"`. Their labels are counted where they have no names.
        arguments: how the head is trained.
        task: what is probed.
        image_size: pixels of a side, in place of the processor's.
        num_workers: processes that read images.
        start: head that training starts from, in place of a random one; with `num_epochs=0` it is measured as it is. It
            stays unchanged.

    Raises:
        ValueError: if a set is empty or unlabelled, the evaluation set has a class that training does not know, or a
            stream is to be augmented.
    """

    greater_is_better = True

    def __init__(
        self,
        train_images: ImageDataset | ImageStream,
        eval_images: ImageDataset | ImageStream,
        arguments: ProbeArguments | None = None,
        *,
        task: ProbeTask = IMAGE_CLASSIFICATION,
        image_size: int | None = None,
        num_workers: int = 0,
        start: nn.Module | None = None,
    ) -> None:
        self.start = start
        self.train_images, self.eval_images, self.task = train_images, eval_images, task
        self.arguments = arguments or ProbeArguments()
        self.image_size, self.num_workers = image_size, num_workers
        if isinstance(train_images, ImageStream) and self.arguments.augment != "none":
            raise ValueError(f"augment={self.arguments.augment!r}: a stream is read once; give augment='none'.")
        self.num_classes = _num_classes(train_images, eval_images)

    @property
    def primary_metric(self) -> str:
        """Name of the value that counts."""
        return self.task.primary_metric

    def get_config_dict(self) -> dict[str, Any]:
        """The protocol, as plain values."""
        return {**asdict(self.arguments), "image_size": self.image_size, "num_classes": self.num_classes}

    def size(self, backbone: RaptorModel | Teacher, processor: Any) -> dict[str, Any]:
        """[`FrozenBackbone.size`] of the backbone at the size of the images that it is probed with."""
        first = next(iter(to_pixels(self.eval_images, processor, self.image_size)))
        return FrozenBackbone(backbone).size(*first["pixel_values"].shape[-2:])

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
            processor: its image processor.
            description: shown beside the progress bar.
            outcomes: what seeds gave, by seed: those that are there are taken from it, the others are put there as soon
                as they are known. A run that is interrupted can go on from it.
            keep: called with every seed and its trained head, before its outcome is put there.
        """
        outcomes = {} if outcomes is None else outcomes
        missing, head = [seed for seed in self.arguments.seeds if seed not in outcomes], None
        if missing:
            head = self._train_seeds(missing, backbone, processor, description, outcomes, keep)
        details = [outcomes[seed] for seed in self.arguments.seeds]
        return ProbeResult(
            self.task.name, self.primary_metric, [values[self.primary_metric] for values in details],
            details[0]["num_images"], details[0]["num_skipped"], self.get_config_dict(), head, details=details,
        )  # fmt: skip

    def _train_seeds(
        self,
        seeds: Sequence[int],
        backbone: RaptorModel | Teacher,
        processor: Any,
        description: str,
        outcomes: MutableMapping[int, Any],
        keep: Callable[[int, nn.Module], None] | None,
    ) -> nn.Module | None:
        """Trains a head for each of the seeds; returns the last one."""
        options = self.arguments
        extract = FeatureExtractor(backbone, self.task.features, options.batch_size, self.num_workers)
        evaluation = to_pixels(self.eval_images, processor, self.image_size)
        training = to_pixels(self.train_images, processor, self.image_size, options.augment)
        eval_features = extract.all(evaluation, f"{description}: evaluation features")
        train_features = None
        if options.augment == "none" and options.num_epochs > 0:
            train_features = extract.all(training, f"{description}: training features")
        self._count_classes(eval_features[1], train_features)
        skipped = self.train_images.num_skipped + self.eval_images.num_skipped
        counts, head = {"num_images": len(eval_features[0]), "num_skipped": skipped}, None
        for seed in seeds:
            batches = self._batches(seed, extract, training, train_features)
            count = len(training if train_features is None else train_features[0])
            head, score = self._train(seed, batches, count, eval_features, f"{description}: seed {seed}")
            if keep is not None:
                keep(seed, head)
            outcomes[seed] = {**score, **counts}
        return head

    def _count_classes(self, wanted: torch.Tensor, train_features: tuple[torch.Tensor, ...] | None) -> None:
        """What a stream did not tell before it was read."""
        if self.num_classes == 0:
            known = wanted if train_features is None else train_features[1]
            self.num_classes = int(known.max()) + 1 if self.start is None else len(next(self.start.parameters()))
        if int(wanted.max()) >= self.num_classes:
            raise ValueError(_unknown_class(int(wanted.max()), self.num_classes - 1))

    def _batches(
        self,
        seed: int,
        extract: FeatureExtractor,
        pixels: PixelDataset,
        features: tuple[torch.Tensor, ...] | None,
    ) -> Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
        """Function of the epoch to that epoch's shuffled batches of features and labels."""

        def epoch_batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            """Batches of one epoch: features computed anew, or those that were kept."""
            count = len(pixels if features is None else features[0])
            batches = shuffled_batches(count, self.arguments.batch_size, seed, epoch)
            if features is not None:
                yield from ((features[0][chosen], features[1][chosen]) for chosen in batches)
                return
            pixels.set_epoch(epoch)
            yield from extract.batches(pixels, batches)

        return epoch_batches

    def _train(
        self,
        seed: int,
        batches: Callable[[int], Iterator[tuple[torch.Tensor, torch.Tensor]]],
        num_images: int,
        evaluation: tuple[torch.Tensor, ...],
        description: str,
    ) -> tuple[nn.Module, dict[str, float]]:
        head = self._new_head(seed, evaluation[0])
        score = train_head(
            head, batches, self.arguments, num_images, loss=self.task.loss,
            score=lambda head: self._score(head, *evaluation), description=description,
            worth=lambda values: values[self.primary_metric],
        )  # fmt: skip
        return head, score

    def _new_head(self, seed: int, features: torch.Tensor) -> nn.Module:
        if self.start is not None:
            return started_head(self.start, features.shape[-1], self.num_classes).to(features.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.task.head(features.shape[-1], self.num_classes).to(features.device)

    @torch.no_grad()
    def _score(self, head: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        metric, predictions, hits = self.task.metric(), [], []
        for start in range(0, len(features), self.arguments.batch_size):
            part = slice(start, start + self.arguments.batch_size)
            outputs, wanted = head(features[part]), labels[part]
            predictions.append(self.task.predict(outputs))
            hits.append((outputs.topk(min(TOP, outputs.shape[-1])).indices == wanted[:, None]).any(dim=-1))
        found = metric.compute(predictions=torch.cat(predictions).cpu(), references=labels.cpu())
        values = {self.primary_metric: found[self.primary_metric]}
        if self.num_classes > TOP:
            values[f"top_{TOP}_accuracy"] = torch.cat(hits).double().mean().item()
        return values


def train_head(
    head: nn.Module,
    batches: Callable[[int], Iterable[tuple[torch.Tensor, torch.Tensor]]],
    options: ProbeArguments,
    num_images: int,
    *,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    score: Callable[[nn.Module], Any],
    description: str,
    worth: Callable[[Any], float] = float,
) -> Any:
    """The loop of every probe: trains `head` in place.

    Args:
        head: features to outputs.
        batches: function of the epoch to its features and labels.
        options: how it is trained.
        num_images: in an epoch.
        loss: `(outputs, labels)` to a scalar.
        score: what the head reaches.
        description: shown beside the progress bar.
        worth: what `score` gave to a number, of which more is better.

    Returns:
        what `score` gave: after the last epoch; with `select="best"` the best of before the first and after every one.
        The head has the weights that it is of.
    """
    optimizer = torch.optim.AdamW(head.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    steps = options.num_epochs * -(-num_images // options.batch_size)
    scheduler = _scheduler(optimizer, options, steps)
    scored, weights = [score(head)] if options.select == "best" or steps == 0 else [], copy.deepcopy(head.state_dict())
    for epoch in tqdm(range(options.num_epochs), desc=description, leave=False, disable=without_bar()):
        for features, labels in batches(epoch):
            loss(head(features), labels).backward()
            if options.max_grad_norm > 0:
                nn.utils.clip_grad_norm_(head.parameters(), options.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if options.select == "best" or epoch == options.num_epochs - 1:
            load_first(head)
            scored.append(score(head))
            if len(scored) == 1 or worth(scored[-1]) > max(map(worth, scored[:-1])):
                weights = copy.deepcopy(head.state_dict())
    head.load_state_dict(weights)
    return max(scored, key=worth)


def started_head(start: nn.Module, num_features: int, num_outputs: int) -> nn.Module:
    """A copy of `start` in float32.

    Raises:
        ValueError: if it does not take `num_features` to `num_outputs`.
    """
    outputs, inputs = next(start.parameters()).shape[:2]
    if (inputs, outputs) != (num_features, num_outputs):
        raise ValueError(
            f"the head takes {inputs} features to {outputs} outputs, but the backbone has {num_features} features and "
            f"the images need {num_outputs} outputs; use a head of such a backbone and these classes."
        )
    return copy.deepcopy(start).float().requires_grad_()


def _scheduler(optimizer: torch.optim.Optimizer, options: ProbeArguments, steps: int) -> Any:
    if options.schedule == "constant":
        return get_scheduler("constant", optimizer)
    return get_scheduler(
        "cosine_warmup_with_min_lr", optimizer, min(options.warmup_steps, steps // 10), max(steps, 1),
        scheduler_specific_kwargs={"min_lr_rate": 0.01, "warmup_lr_rate": 0.01},
    )  # fmt: skip


def _num_classes(train_images: ImageDataset | ImageStream, eval_images: ImageDataset | ImageStream) -> int:
    """How many classes there are, 0 if a stream must be read to know it."""
    for name, images in (("training", train_images), ("evaluation", eval_images)):
        if not images.has_labels:
            raise ValueError(f"the {name} set of a probe needs labelled images; {images.name!r} has none.")
    if train_images.label_names != eval_images.label_names:
        raise ValueError(
            f"training and evaluation set have different classes ({_short(train_images.label_names)} and "
            f"{_short(eval_images.label_names)}); use two splits of one dataset."
        )
    if train_images.label_names is not None:
        return len(train_images.label_names)
    if isinstance(train_images, ImageStream) or isinstance(eval_images, ImageStream):
        return 0
    known, wanted = (max(images.labels or [0]) for images in (train_images, eval_images))
    if wanted > known:
        raise ValueError(_unknown_class(wanted, known))
    return known + 1


def _unknown_class(wanted: int, known: int) -> str:
    return f"the evaluation set has class {wanted}, training ends at {known}; use two splits of one set."


def _short(names: Sequence[str] | None) -> str:
    if names is None:
        return "unnamed"
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
