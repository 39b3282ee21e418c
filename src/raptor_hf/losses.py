"""The distillation objectives: how far the student's states are from the teacher's, and which states are compared.

[`StateError`] measures one layer. Four objectives decide where the student's states come from; all have the signature
`objective(step, states, segments, error) -> LayerErrors`, with

    step       `step(block, hidden_states, depth) -> hidden_states`, one application of a block; `depth` is a layer
               number or a tensor with one per sample
    states     the teacher's `a_0 .. a_L`, each `(batch_size, seq_length, hidden_size)`
    segments   the path: consecutive [`~raptor_hf.tokens.Segment`]s; it starts at the teacher's state
               `segments[0].start_layer`
    error      a [`StateError`]

Source: arXiv 2512.19941, Eq. 2, Eq. 3, Fig. 5 and 6. This module knows neither model nor trainer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .tokens import TOKEN_GROUPS, Segment, TokenLayout

BlockStep = Callable[[int, torch.Tensor, int | torch.Tensor], torch.Tensor]
ERRORS = ("mse", "squared", "frobenius")
LAYER_REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class StateError:
    """Error between two states of one layer, weighted by token group.

    Args:
        layout: positions of cls, registers and patches.
        error: `"mse"`, the mean over elements (research code), free of the number of images, tokens and features;
            `"squared"`, the squared Frobenius norm of an image, averaged over images (Eq. 3); `"frobenius"`, the norm
            itself (Eq. 2).
        token_weights: weights of the errors of the groups `"cls"`, `"registers"`, `"patch"`, each group on its own;
            `None` takes the plain error over all tokens. A group that the model does not have is left out and the
            others are renormalised to the same sum.
        scale: variances by which errors are divided, by group (with `"all"` for the plain error) and layer `1..L`; a
            norm is divided by the standard deviation.
        direction_weight: weight of `1 - cos`, averaged over tokens and added to every error: it sees the direction of
            a token alone (beyond the paper).

    Raises:
        ValueError: if the error is unknown, a weight is negative, of an unknown group, or all are 0.
    """

    layout: TokenLayout
    error: str = "mse"
    token_weights: Mapping[str, float] | None = None
    scale: Mapping[str, Sequence[float]] | None = None
    direction_weight: float = 0.0
    weights: dict[str, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.error not in ERRORS:
            raise ValueError(f"error={self.error!r} is unknown; use one of {', '.join(ERRORS)}.")
        if self.direction_weight < 0:
            raise ValueError(f"direction_weight={self.direction_weight} must be 0 or more.")
        object.__setattr__(self, "weights", _present_weights(self.token_weights, self.layout))

    def group_errors(self, student: torch.Tensor, teacher: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
        """Error of every token group of two states `(batch_size, seq_length, hidden_size)` of layer `layer`.

        Computed in float32 (float64 for float64 states) in one pass; scalars by group, `"all"` among them.
        """
        dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
        student, teacher = student.to(dtype), teacher.to(dtype)
        per_token = (student - teacher).square().sum(dim=-1)
        angles = None
        if self.direction_weight:
            angles = 1 - nn.functional.cosine_similarity(student, teacher, dim=-1)
        errors = {}
        for group in ("all", *self.layout.groups):
            of_group = per_token[:, self.layout.span(group)]
            value = self._reduce(of_group, student.shape[-1])
            if self.scale is not None:
                variance = self.scale[group][layer - 1]
                value = value / (variance**0.5 if self.error == "frobenius" else variance)
            if angles is not None:
                value = value + self.direction_weight * angles[:, self.layout.span(group)].mean()
            errors[group] = value
        return errors

    def _reduce(self, per_token: torch.Tensor, hidden_size: int) -> torch.Tensor:
        if self.error == "mse":
            return per_token.mean() / hidden_size
        squared = per_token.sum(dim=1)
        if self.error == "squared":
            return squared.mean()
        tiny = torch.finfo(squared.dtype).tiny  # the norm has no gradient at 0; take 0 there
        return squared.clamp_min(tiny).sqrt().mean()

    def total(self, group_errors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Weighted sum of [`StateError.group_errors`], a scalar."""
        return torch.stack([weight * group_errors[group] for group, weight in self.weights.items()]).sum()


@dataclass
class LayerErrors:
    """Errors of the layers that an objective compared.

    Attributes:
        layers: layer numbers, counted from 1.
        totals: weighted error of each, scalars.
        groups: errors by token group of each, scalars.
        states: the student's states of each, `(batch_size, seq_length, hidden_size)`.
    """

    layers: list[int] = field(default_factory=list)
    totals: list[torch.Tensor] = field(default_factory=list)
    groups: list[dict[str, torch.Tensor]] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    def add(self, error: StateError, layer: int, student: torch.Tensor, teacher: torch.Tensor) -> None:
        """Compares the student's state of layer `layer` with the teacher's."""
        groups = error.group_errors(student, teacher, layer)
        self.layers.append(layer)
        self.groups.append(groups)
        self.totals.append(error.total(groups))
        self.states.append(student)

    def reduce(self, reduction: str) -> torch.Tensor:
        """Loss over the layers: Eq. 2 takes the `"sum"`, the research code the `"mean"`, which keeps the learning rate
        free of the depth.

        Raises:
            ValueError: if the reduction is unknown.
        """
        if reduction not in LAYER_REDUCTIONS:
            raise ValueError(f"layer_reduction={reduction!r} is unknown; use one of {', '.join(LAYER_REDUCTIONS)}.")
        total = torch.stack(self.totals)
        return total.mean() if reduction == "mean" else total.sum()

    def group_mean(self) -> dict[str, torch.Tensor]:
        """Mean error over the layers by token group, detached."""
        return {
            group: torch.stack([errors[group].detach() for errors in self.groups]).mean() for group in self.groups[0]
        }


def teacher_forcing(
    step: BlockStep, states: Sequence[torch.Tensor], segments: Sequence[Segment], error: StateError
) -> LayerErrors:
    """`B(a_{l-1})` against `a_l` for every layer of the path; the layers of a segment share one stacked batch."""
    errors = LayerErrors()
    for segment in segments:
        layers = range(segment.start_layer + 1, segment.end_layer + 1)
        batch_size = states[segment.start_layer].shape[0]
        inputs = torch.cat([states[layer - 1] for layer in layers])
        depth = torch.tensor(list(layers), device=inputs.device).repeat_interleave(batch_size)
        outputs = step(segment.block, inputs, depth).split(batch_size)
        for layer, output in zip(layers, outputs, strict=True):
            errors.add(error, layer, output, states[layer])
    return errors


def autoregressive(
    step: BlockStep,
    states: Sequence[torch.Tensor],
    segments: Sequence[Segment],
    error: StateError,
    horizon: int | None = None,
) -> LayerErrors:
    """`B(s_{l-1})` against `a_l`, the student running on its own states, for the first `horizon` layers of the path."""
    errors = LayerErrors()
    for layer, state in _rollout(step, states, segments, horizon):
        errors.add(error, layer, state, states[layer])
    return errors


def terminal(
    step: BlockStep, states: Sequence[torch.Tensor], segments: Sequence[Segment], error: StateError
) -> LayerErrors:
    """As [`autoregressive`], but the path's last layer alone is compared."""
    errors = LayerErrors()
    for layer, state in _rollout(step, states, segments, None):
        if layer == segments[-1].end_layer:
            errors.add(error, layer, state, states[layer])
    return errors


def layer_variances(hidden_states: Iterable[Sequence[torch.Tensor]], layout: TokenLayout) -> dict[str, list[float]]:
    """Variance of the teacher's states by token group and layer, the scale of `loss_scale`.

    Feature norms grow with depth, so that an unscaled error is nearly all last layer. The variance is taken about every
    feature's mean over images and tokens of the group and averaged over features: an `"mse"` divided by it is 1 - R2.

    Args:
        hidden_states: batches of states `a_0 .. a_L`, each `(batch_size, seq_length, hidden_size)`; summed in float64.
        layout: positions of cls, registers and patches.

    Returns:
        group (`"all"` among them) to the variances of layers `1..L`.

    Raises:
        ValueError: if there is no image, or a layer does not vary over them.
    """
    groups = ("all", *layout.groups)
    counts: dict[str, int] = dict.fromkeys(groups, 0)
    sums: dict[str, torch.Tensor] = {}
    for states in hidden_states:
        for group in groups:
            tokens = torch.stack([layout.select(state, group).flatten(0, 1) for state in states[1:]]).double()
            moments = torch.stack([tokens.sum(dim=1), tokens.square().sum(dim=1)])
            sums[group] = sums[group] + moments if group in sums else moments
            counts[group] += tokens.shape[1]
    if not sums:
        raise ValueError("layer variances of no images; give at least two.")
    variances = {}
    for group, (first, second) in sums.items():
        mean = first / counts[group]
        variances[group] = (second / counts[group] - mean.square()).mean(dim=-1).tolist()
        if min(variances[group]) <= 0:
            raise ValueError(
                f"a layer's {group} tokens do not vary over the images of loss_scale_images; use more and different "
                "images, or loss_scale='none'."
            )
    return variances


def _rollout(
    step: BlockStep, states: Sequence[torch.Tensor], segments: Sequence[Segment], horizon: int | None
) -> list[tuple[int, torch.Tensor]]:
    start = segments[0].start_layer
    last = segments[-1].end_layer if horizon is None else min(segments[-1].end_layer, start + horizon)
    state, rollout = states[start], []
    for segment in segments:
        for layer in range(segment.start_layer + 1, min(segment.end_layer, last) + 1):
            state = step(segment.block, state, layer)
            rollout.append((layer, state))
    return rollout


def _present_weights(token_weights: Mapping[str, float] | None, layout: TokenLayout) -> dict[str, float]:
    if token_weights is None:
        return {"all": 1.0}
    unknown = set(token_weights) - set(TOKEN_GROUPS)
    if unknown or any(weight < 0 for weight in token_weights.values()):
        raise ValueError(
            f"token_weights={dict(token_weights)}: weights must be 0 or more, of the groups {', '.join(TOKEN_GROUPS)}."
        )
    present = {group: token_weights.get(group, 0.0) for group in layout.groups}
    total, left = sum(token_weights.values()), sum(present.values())
    if left == 0:
        raise ValueError(
            f"token_weights={dict(token_weights)} leaves no token group with a weight; this model has "
            f"{', '.join(layout.groups)}."
        )
    return {group: weight * total / left for group, weight in present.items() if weight > 0}
