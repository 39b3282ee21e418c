"""The depth flow of a model measured over a stream of images (arXiv 2512.19941, Sec. 4, App. C and D).

[`DynamicsEstimator`] takes the states of batch after batch and keeps sums, so that memory does not grow with the number
of images but for three numbers per image, layer and token group. Everything is float64, computed in pieces that fit a
processor's cache; results lie on the CPU.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..tokens import TokenLayout
from .geometry import (
    RESOLUTION,
    angle_of_updates,
    coherence_of_means,
    effective_rank,
    normalise,
    spectrum_of_gram,
    stable_rank,
    to_float64,
)
from .linear import DynamicModes, modes_of_moments

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_PIECE_BYTES = 4 * 2**20  # of one state in float64 on a CPU: what stays in its cache from one measure to the next
_FLUSH_ROWS = 512  # updates that wait for one matrix product, which single rows would spend on moving the Gram matrix


@dataclass(frozen=True)
class Spread:
    """A value per layer, of images: each image's value is its mean over the tokens of the group.

    Attributes:
        mean (`torch.Tensor` of shape `(num_layers,)`): mean over images.
        std (`torch.Tensor` of shape `(num_layers,)`): standard deviation of the sample; 0 for one image.
        quantiles (`torch.Tensor` of shape `(len(QUANTILES), num_layers)`): at `QUANTILES`, linearly interpolated.
    """

    mean: torch.Tensor
    std: torch.Tensor
    quantiles: torch.Tensor

    def to_dict(self) -> dict[str, Any]:
        """Plain lists; quantiles by their level, `"0.5"` the median."""
        quantiles = dict(zip(QUANTILES, self.quantiles, strict=True))
        return _plain({"mean": self.mean, "std": self.std, "quantiles": quantiles})


@dataclass(frozen=True)
class GroupDynamics:
    """What the states of one token group do over depth. Entry `l` of an update is the step from state `l` to `l + 1`.

    Attributes:
        norm ([`Spread`] of `L + 1` states): ``|x_l|`` (Fig. 9).
        convergence ([`Spread`] of `L + 1` states): ``gamma_l = <x^_l, x^_L>`` (Fig. 8).
        angular_speed ([`Spread`] of `L` updates): angle from ``x^_l`` to ``x^_{l+1}``, radians per layer (Fig. 11).
        coherence (`torch.Tensor` of shape `(L,)`): mean cosine of an update with the mean update (Fig. 12).
        stable_rank, effective_rank (`torch.Tensor` of shape `(L,)`, *optional*): of the updates of all images and
            tokens as rows (Fig. 12); `None` if ranks were not asked for.
        singular_values (`torch.Tensor` of shape `(L, hidden_size)`, *optional*): what both follow from.
        modes ([`DynamicModes`]): DMD of each image's normalised mean token, all images' pairs together (App. D);
            amplitudes and errors are those of `mean_token`.
        mean_token (`torch.Tensor` of shape `(L + 1, hidden_size)`): mean over images of the normalised mean token.
        mean_direction (`torch.Tensor` of shape `(L + 1, hidden_size)`): mean of ``x^_l`` over images and tokens.
    """

    norm: Spread
    convergence: Spread
    angular_speed: Spread
    coherence: torch.Tensor
    stable_rank: torch.Tensor | None
    effective_rank: torch.Tensor | None
    singular_values: torch.Tensor | None
    modes: DynamicModes
    mean_token: torch.Tensor
    mean_direction: torch.Tensor


@dataclass(frozen=True)
class ClassFlow:
    """How classes part over depth, in one token group.

    Attributes:
        paths (`torch.Tensor` of shape `(num_classes, L + 1, hidden_size)`): class means of ``x^_l`` over images and
            tokens, the trajectories of Fig. 8; zero for a class without images.
        within (`torch.Tensor` of shape `(L + 1,)`): mean over classes of one minus the length of the mean of the
            images' normalised mean tokens: 0 if each class points one way (beyond the paper).
        between (`torch.Tensor` of shape `(L + 1,)`): one minus the length of the mean over classes of the directions of
            those means: 0 if all classes point one way, 1 if they cancel.
        counts (`torch.Tensor` of shape `(num_classes,)`): images of each class.
    """

    paths: torch.Tensor
    within: torch.Tensor
    between: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class Dynamics:
    """Measures by token group; a group that the model lacks is absent.

    Attributes:
        groups (`dict[str, GroupDynamics]`): by token group.
        classes (`dict[str, ClassFlow]`): likewise; empty without labels.
        num_images (`int`): images measured.
        num_layers (`int`): `L`.
    """

    groups: dict[str, GroupDynamics]
    classes: dict[str, ClassFlow]
    num_images: int
    num_layers: int

    def to_dict(self) -> dict[str, Any]:
        """Curves and eigenvalues as plain Python values for strict JSON; vectors of features are left out."""
        record: dict[str, Any] = {"num_images": self.num_images, "num_layers": self.num_layers, "groups": {}}
        for name, group in self.groups.items():
            entry: dict[str, Any] = {
                "norm": group.norm.to_dict(),
                "convergence": group.convergence.to_dict(),
                "angular_speed": group.angular_speed.to_dict(),
            }
            entry |= {"coherence": group.coherence, "dmd": _modes_record(group.modes)}
            if group.stable_rank is not None:
                entry |= {"stable_rank": group.stable_rank, "effective_rank": group.effective_rank}
            if name in self.classes:
                flow = self.classes[name]
                entry["class_scatter"] = {"within": flow.within, "between": flow.between}
            record["groups"][name] = entry
        return _plain(record)


class DynamicsEstimator:
    """Measures the dynamics of a stream of images.

    ```python
    estimator = DynamicsEstimator(teacher.layout)
    for pixel_values in batches:
        estimator.update(teacher.hidden_states(pixel_values))
    dynamics = estimator.result()
    ```

    Memory: `num_groups * (L + 2) * hidden_size**2` float64 numbers with `ranks`, 0.2 GB for DINOv2-B and 2.4 GB for
    DINOv2-g; `2 * num_groups * hidden_size**2` without.

    Args:
        layout (`TokenLayout`): where the token groups sit.
        ranks (`bool`): also the ranks of the updates, the larger part of time and memory.
        num_classes (`int`): classes whose paths are kept if labels are given; labels from this number on are left out.

    Raises:
        ValueError: if `num_classes` is negative.
    """

    def __init__(self, layout: TokenLayout, *, ranks: bool = True, num_classes: int = 0) -> None:
        if num_classes < 0:
            raise ValueError(f"num_classes={num_classes} is negative; use 0 for no classes.")
        self.layout, self.ranks, self.num_classes = layout, ranks, num_classes
        self._groups: dict[str, _Group] = {}
        self._shape: tuple[int, int] | None = None  # (L + 1, hidden_size)
        self._num_images = 0

    @torch.no_grad()
    def update(self, hidden_states: Sequence[torch.Tensor], labels: torch.Tensor | None = None) -> None:
        """Adds a batch; nothing is added if it is refused.

        Args:
            hidden_states (sequence of `torch.Tensor`): states `0..L`, each `(batch_size, seq_length, hidden_size)`, any
                floating point type. Batches may differ in `batch_size` and `seq_length`; all images count alike.
            labels (`torch.Tensor` of shape `(batch_size,)`, *optional*): class numbers, for `num_classes`.

        Raises:
            ValueError: if there are fewer than two states, they differ in shape from each other or in number or
                features from earlier batches, hold infinity or NaN or no patch, or labels are of another shape.
        """
        states = self._checked(hidden_states, labels)
        if len(states[0]) == 0:
            return
        if self._shape is None:
            self._shape = (len(states), states[0].shape[-1])
            with torch.inference_mode(False):
                self._groups = {
                    name: _Group(self._shape, self.ranks, self.num_classes, states[0].device)
                    for name in self.layout.groups
                }
        piece = len(states[0])
        if states[0].device.type == "cpu":
            piece = max(1, _PIECE_BYTES // (8 * states[0][0].numel()))
        for start in range(0, len(states[0]), piece):
            rows = slice(start, start + piece)
            self._add([state[rows] for state in states], None if labels is None else labels[rows])
        self._num_images += len(states[0])

    def result(self, rank: int | None = 10) -> Dynamics:
        """What was measured so far; more batches may follow.

        Args:
            rank (`int`, *optional*): modes of the dynamic mode decomposition, the paper's 10; `None` for all.

        Raises:
            ValueError: if no image was seen, or `rank` is below 1.
        """
        if self._num_images == 0 or self._shape is None:
            raise ValueError("no image was measured; call update with at least one batch first.")
        groups = {name: group.result(self._num_images, rank) for name, group in self._groups.items()}
        classes = {name: group.class_flow() for name, group in self._groups.items() if self.num_classes}
        return Dynamics(groups, classes, self._num_images, self._shape[0] - 1)

    def _checked(self, hidden_states: Sequence[torch.Tensor], labels: torch.Tensor | None) -> list[torch.Tensor]:
        states = [state.detach() if torch.is_tensor(state) else state for state in hidden_states]
        shapes = sorted({tuple(state.shape) for state in states})
        if len(states) < 2 or len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][1] <= self.layout.num_prefix_tokens:
            raise ValueError(
                f"{len(states)} states of shapes {shapes}; pass states 0..L of one batch, at least two, each "
                f"(batch_size, seq_length, hidden_size) with more than {self.layout.num_prefix_tokens} tokens."
            )
        shape = (len(states), shapes[0][2])
        if self._shape not in (None, shape):
            raise ValueError(f"states (L + 1, hidden_size) = {shape} after {self._shape}; measure one model at a time.")
        if labels is not None and tuple(labels.shape) != shapes[0][:1]:
            raise ValueError(f"labels of shape {tuple(labels.shape)} for {shapes[0][0]} images; pass one per image.")
        for number, state in enumerate(states):
            if not state.is_floating_point():
                to_float64(state)
            if not bool(torch.isfinite(state.sum(dtype=torch.float64 if state.device.type != "mps" else None))):
                raise ValueError(
                    f"state {number} holds infinity or NaN; compute the states in float32, or leave such images out."
                )
        return states

    def _add(self, states: Sequence[torch.Tensor], labels: torch.Tensor | None) -> None:
        """Adds a piece of a batch, state by state: two states of it are in memory as float64, and the last one."""
        weights = _group_weights(self.layout, states[0])
        last = normalise(states[-1])
        before, values = None, []
        for number, state in enumerate(states):
            tokens = to_float64(state)
            norms = torch.linalg.vector_norm(tokens, dim=-1)
            directions = tokens / torch.where(norms > 0, norms, 1.0).unsqueeze(-1)
            cosines = torch.linalg.vecdot(directions, last).clamp_(-1.0, 1.0)
            angles = torch.zeros_like(norms)
            means = (weights @ tokens, weights @ directions)
            for index, name in enumerate(self.layout.groups):
                self._groups[name].add_state(number, means[0][:, index], means[1][:, index], labels)
            if before is not None:
                updates = directions - before
                chords = torch.linalg.vector_norm(updates, dim=-1)
                angles = angle_of_updates(chords, before, directions)
                for name in self.layout.groups:
                    span = self.layout.span(name)
                    self._groups[name].add_updates(number - 1, updates[:, span], chords[:, span])
            values.append(torch.stack([norms, cosines, angles], dim=-1))
            before = directions
        images = weights @ torch.stack(values)  # (L + 1, batch_size, num_groups, 3)
        for index, name in enumerate(self.layout.groups):
            self._groups[name].add_images(images[:, :, index].transpose(0, 1))


def measure_dynamics(
    hidden_states: Iterable[Sequence[torch.Tensor]],
    layout: TokenLayout | None = None,
    *,
    ranks: bool = True,
    rank: int | None = 10,
) -> Dynamics:
    """[`DynamicsEstimator`] over all batches of an iterable, such as [`~raptor_hf.Teacher.iter_hidden_states`].

    Args:
        hidden_states (iterable of sequence of `torch.Tensor`): per batch the states `0..L`, each
            `(batch_size, seq_length, hidden_size)`.
        layout (`TokenLayout`, *optional*): where the token groups sit, unless `hidden_states.layout` says it.
        ranks, rank: as there.

    Raises:
        ValueError: if no layout is known, there is no image, or as [`DynamicsEstimator.update`].
    """
    layout = getattr(hidden_states, "layout", None) if layout is None else layout
    if layout is None:
        raise ValueError("layout is missing: token groups need it; pass layout=TokenLayout(num_register_tokens).")
    estimator = DynamicsEstimator(layout, ranks=ranks)
    for states in hidden_states:
        estimator.update(states)
    return estimator.result(rank)


class _Group:
    """Sums of one token group."""

    def __init__(self, shape: tuple[int, int], ranks: bool, num_classes: int, device: torch.device) -> None:
        device = torch.device("cpu") if device.type == "mps" else device
        num_states, hidden_size = shape
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.images: list[torch.Tensor] = []  # (batch_size, L + 1, 3): norm, convergence, speed from the state before
        self.update_sums = zeros(num_states - 1, 2, hidden_size)  # of D and of D / |D|
        self.num_updates = [0] * (num_states - 1)
        self.token_sum = zeros(num_states, hidden_size)  # of normalised mean tokens
        self.direction_sum = zeros(num_states, hidden_size)  # of the images' mean directions
        self.gram = zeros(hidden_size, hidden_size)  # X1 X1* of the normalised mean tokens
        self.lagged = zeros(hidden_size, hidden_size)  # X2 X1*
        self.grams = zeros(num_states - 1, hidden_size, hidden_size) if ranks else None
        self.class_sums = zeros(2, num_classes, num_states, hidden_size)  # directions, normalised tokens
        self.class_counts = zeros(num_classes)
        self._waiting: list[list[torch.Tensor]] = [[] for _ in range(num_states - 1)]
        self._path: list[torch.Tensor] = []  # normalised mean tokens of the images being added, state by state
        self._pairs: list[torch.Tensor] = []  # paths that wait for one matrix product

    def add_state(self, number: int, token: torch.Tensor, direction: torch.Tensor, labels: torch.Tensor | None) -> None:
        """Mean token and mean direction `(batch_size, hidden_size)` of each image at one state."""
        token = normalise(token)
        self._path.append(token)
        self.token_sum[number] += token.sum(dim=0)
        self.direction_sum[number] += direction.sum(dim=0)
        if labels is None or not len(self.class_counts):
            return
        labels = labels.to(token.device)
        known = (labels >= 0) & (labels < len(self.class_counts))
        self.class_sums[0, :, number].index_add_(0, labels[known], direction[known])
        self.class_sums[1, :, number].index_add_(0, labels[known], token[known])
        if number == 0:
            self.class_counts.index_add_(0, labels[known], torch.ones_like(labels[known], dtype=torch.float64))

    def add_updates(self, number: int, updates: torch.Tensor, chords: torch.Tensor) -> None:
        """Updates `(batch_size, num_tokens, hidden_size)` of one step and their lengths."""
        moved = chords > RESOLUTION  # shorter ones are rounding: they count as rows, and as none
        scales = torch.stack([moved.to(chords.dtype), torch.where(moved, 1 / torch.where(moved, chords, 1.0), 0.0)])
        rows = updates.flatten(0, 1)
        self.update_sums[number].addmm_(scales.flatten(1), rows)
        self.num_updates[number] += len(rows)
        if self.grams is not None:
            waiting = self._waiting[number]
            waiting.append(rows.clone() if len(rows) < _FLUSH_ROWS else rows)
            if sum(map(len, waiting)) >= _FLUSH_ROWS:
                self._flush(number)

    def add_images(self, values: torch.Tensor) -> None:
        """Norm, convergence and speed `(batch_size, L + 1, 3)` of each image, after all of its states."""
        self.images.append(values.cpu())
        self._pairs.append(torch.stack(self._path, dim=1))
        self._path = []
        if sum(len(path) for path in self._pairs) * values.shape[1] >= _FLUSH_ROWS:
            self._flush_pairs()

    def result(self, num_images: int, rank: int | None) -> GroupDynamics:
        """Measures from the sums; the sums stay."""
        self._flush_pairs()
        means = self.update_sums.cpu() / torch.tensor(self.num_updates, dtype=torch.float64).reshape(-1, 1, 1)
        values = None
        if self.grams is not None:
            for number in range(len(self.grams)):
                self._flush(number)
            values = torch.stack([spectrum_of_gram(gram) for gram in self.grams]).cpu()
        images = torch.cat(self.images)
        mean_token = self.token_sum.cpu() / num_images
        return GroupDynamics(
            norm=_spread(images[:, :, 0]),
            convergence=_spread(images[:, :, 1]),
            angular_speed=_spread(images[:, 1:, 2]),
            coherence=coherence_of_means(means[:, 1], means[:, 0]),
            stable_rank=None if values is None else stable_rank(values),
            effective_rank=None if values is None else effective_rank(values),
            singular_values=values,
            modes=modes_of_moments(self.gram.cpu(), self.lagged.cpu(), mean_token, rank),
            mean_token=mean_token,
            mean_direction=self.direction_sum.cpu() / num_images,
        )

    def class_flow(self) -> ClassFlow:
        """Paths and scatter of the classes seen."""
        counts = self.class_counts.cpu()
        seen = counts > 0
        means = self.class_sums.cpu() / torch.where(seen, counts, 1.0).reshape(-1, 1, 1)
        tokens = means[1][seen]
        if not len(tokens):
            nothing = torch.full((means.shape[2],), math.nan, dtype=torch.float64)
            return ClassFlow(means[0], nothing, nothing.clone(), counts)
        return ClassFlow(
            paths=means[0],
            within=1 - torch.linalg.vector_norm(tokens, dim=-1).mean(dim=0),
            between=1 - torch.linalg.vector_norm(normalise(tokens).mean(dim=0), dim=-1),
            counts=counts,
        )

    def _flush(self, number: int) -> None:
        if self.grams is not None and self._waiting[number]:
            rows = torch.cat(self._waiting[number])
            self.grams[number].addmm_(rows.T, rows)
            self._waiting[number] = []

    def _flush_pairs(self) -> None:
        if self._pairs:
            paths = torch.cat(self._pairs)
            before, after = paths[:, :-1].flatten(0, 1), paths[:, 1:].flatten(0, 1)
            self.gram.addmm_(before.T, before)
            self.lagged.addmm_(after.T, before)
            self._pairs = []


def _group_weights(layout: TokenLayout, state: torch.Tensor) -> torch.Tensor:
    """Weights `(num_groups, seq_length)` that take the mean over the tokens of each group, float64."""
    device = torch.device("cpu") if state.device.type == "mps" else state.device
    weights = torch.zeros(len(layout.groups), state.shape[1], dtype=torch.float64, device=device)
    for row, name in zip(weights, layout.groups, strict=True):
        row[layout.span(name)] = 1.0
    return weights / weights.sum(dim=1, keepdim=True)


def _spread(values: torch.Tensor) -> Spread:
    """Over the first dimension, images, in an order that does not depend on theirs."""
    values = values.sort(dim=0).values
    std = values.std(dim=0) if len(values) > 1 else torch.zeros_like(values[0])
    places = torch.tensor(QUANTILES, dtype=values.dtype) * (len(values) - 1)
    low, high = values[places.floor().long()], values[places.ceil().long()]  # torch.quantile refuses large sets
    return Spread(values.mean(dim=0), std, torch.lerp(low, high, places.frac().unsqueeze(1)))


def _modes_record(modes: DynamicModes) -> dict[str, Any]:
    return {
        "eigenvalues": [[value.real, value.imag] for value in modes.eigenvalues.tolist()],
        "spectral_radius": modes.spectral_radius,
        "median_modulus": modes.median_modulus,
        "numerical_rank": modes.numerical_rank,
        "singular_values": modes.singular_values[: 2 * modes.rank],
        "errors": modes.errors,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if torch.is_tensor(value):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
