"""One linear map for a run of layers: the step map applied ``p`` times, beside the map of both ends and no map at all.

Dynamic mode decomposition along a span (arXiv 2605.07556; not in the Raptor paper) asks whether the layers of a span
act on tokens as one matrix ``K``, so that ``a_{l+p} = K^p a_l``. How good that is only shows beside two baselines,
fitted on the same tokens: a map ``E`` from the first to the last state of the span, which need not be a power of
anything, and the identity, which skips the layers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .geometry import to_float64

SPAN_METHODS = ("step", "endpoint", "identity")


@dataclass(frozen=True)
class Agreement:
    """How near predicted tokens are to the real ones, mean over the tokens.

    Attributes:
        cosine (`float`): 0 for a token where either vector is zero.
        relative_error (`float`): ``|prediction - target| / |target|``; a zero target counts 0 if it is met, else 1.
        num_tokens (`int`): tokens compared.
    """

    cosine: float
    relative_error: float
    num_tokens: int


def compare_tokens(prediction: torch.Tensor, target: torch.Tensor) -> Agreement:
    """Mean cosine and mean relative error of tokens of shape `(..., hidden_size)`.

    Serves both questions: the prediction of [`SpanMap.predict`] against state ``l + p``, and the final state after
    running the remaining real layers from it against the final state of the untouched model.

    Raises:
        ValueError: if the shapes differ, there is no token, or an input is no floating point tensor.
    """
    prediction, target = to_float64(prediction, "prediction"), to_float64(target, "target")
    if prediction.shape != target.shape or target.ndim < 1 or target.numel() == 0:
        raise ValueError(
            f"prediction of shape {tuple(prediction.shape)} and target of {tuple(target.shape)}; pass the same tokens."
        )
    error = torch.linalg.vector_norm(prediction - target, dim=-1)
    norm = torch.linalg.vector_norm(target, dim=-1)
    relative = torch.where(norm > 0, error / torch.where(norm > 0, norm, 1.0), (error > 0).to(error.dtype))
    norms = norm * torch.linalg.vector_norm(prediction, dim=-1)
    cosine = (prediction * target).sum(dim=-1) / torch.where(norms > 0, norms, 1.0)
    return Agreement(float(cosine.clamp(-1.0, 1.0).mean()), float(relative.mean()), error.numel())


@dataclass(frozen=True)
class SpanMap:
    """Maps of a span of ``p`` layers; row vectors are tokens, so a step is ``a @ step.T``.

    Attributes:
        step (`torch.Tensor` of shape `(hidden_size, hidden_size)`): ``K``, one layer of the span, float64.
        endpoint (`torch.Tensor` of the same shape): ``E``, all of its layers at once.
        num_layers (`int`): ``p``.
        ridge (`float`): penalty ``alpha`` they were fitted with.
        rank (`int`, *optional*): directions of the inputs that were kept, `None` for all.
        num_tokens (`int`): tokens they were fitted on.
    """

    step: torch.Tensor
    endpoint: torch.Tensor
    num_layers: int
    ridge: float
    rank: int | None
    num_tokens: int

    def predict(self, states: torch.Tensor, method: str = "step", num_layers: int | None = None) -> torch.Tensor:
        """Tokens at the end of the span from those at its start.

        Args:
            states (`torch.Tensor` of shape `(..., hidden_size)`): any floating point type.
            method (`str`): `"step"` for ``K^p``, `"endpoint"` for ``E``, `"identity"`.
            num_layers (`int`, *optional*): for `"step"` alone, steps other than ``p``.

        Returns:
            `torch.Tensor`: like `states`, in its type and on its device.

        Raises:
            ValueError: if `method` is unknown, `num_layers` is negative or given with another method, or `states` is no
                floating point tensor of `hidden_size` features.
        """
        if method not in SPAN_METHODS:
            raise ValueError(f"method={method!r} is no map of a span; use one of {', '.join(SPAN_METHODS)}.")
        if num_layers is not None and (method != "step" or num_layers < 0):
            raise ValueError(
                f"num_layers={num_layers} with method={method!r}; give 0 or more with 'step', else leave it out."
            )
        tokens = to_float64(states)
        if tokens.ndim < 1 or tokens.shape[-1] != len(self.step):
            raise ValueError(
                f"states of shape {tuple(states.shape)} for a map of {len(self.step)} features; pass states of the "
                "model that it was fitted on."
            )
        if method == "endpoint":
            tokens = tokens @ self.endpoint.T.to(tokens.device)
        elif method == "step":
            step = self.step.T.to(tokens.device)
            for _ in range(self.num_layers if num_layers is None else num_layers):
                tokens = tokens @ step
        return tokens.to(device=states.device, dtype=states.dtype)

    def evaluate(self, start: torch.Tensor, end: torch.Tensor) -> dict[str, Agreement]:
        """All of `SPAN_METHODS` on held-out tokens `start` at the head and `end` at the foot of the span.

        Raises:
            ValueError: as [`SpanMap.predict`] and [`compare_tokens`].
        """
        return {method: compare_tokens(self.predict(to_float64(start), method), end) for method in SPAN_METHODS}


class SpanMapEstimator:
    """Fits a [`SpanMap`] to a stream of calibration images; memory is four matrices, whatever their number.

    ```python
    estimator = SpanMapEstimator()
    for hidden_states in batches:
        estimator.update(hidden_states[4:8])  # layers 5, 6, 7
    span_map = estimator.fit(ridge=1.0)
    ```

    All pairs of the span's states count for ``K``, first and last state for ``E``. Pass the tokens of one group, or
    all of them.
    """

    def __init__(self) -> None:
        self._num_layers = 0
        self._num_tokens = 0
        self._sums: torch.Tensor | None = None  # (4, D, D): X1 X1*, X2 X1* of the steps, the same of the ends

    def update(self, hidden_states: Sequence[torch.Tensor]) -> None:
        """Adds a batch.

        Args:
            hidden_states (sequence of `torch.Tensor`): the ``p + 1`` states of the span, each `(..., hidden_size)`.

        Raises:
            ValueError: if there are fewer than two states, or number, shapes or types differ from each other or from
                those of earlier batches; nothing is added then.
        """
        shapes = {tuple(state.shape) for state in hidden_states}
        if len(hidden_states) < 2 or len(shapes) != 1 or self._num_layers not in (0, len(hidden_states) - 1):
            raise ValueError(
                f"{len(hidden_states)} states of shapes {sorted(shapes)} after spans of {self._num_layers or 'any'} "
                "layers; pass the states l..l+p of one span, two or more of one shape."
            )
        states = [to_float64(state).reshape(-1, state.shape[-1]) for state in hidden_states]
        hidden_size = states[0].shape[1]
        if self._sums is not None and self._sums.shape[-1] != hidden_size:
            raise ValueError(f"states of {hidden_size} features after {self._sums.shape[-1]}; fit one model at a time.")
        if self._sums is None:
            with torch.inference_mode(False):
                self._sums = states[0].new_zeros(4, hidden_size, hidden_size)
        self._num_layers = len(states) - 1
        self._num_tokens += len(states[0])
        for before, after in itertools.pairwise(states):
            self._sums[0].addmm_(before.T, before)
            self._sums[1].addmm_(after.T, before)
        self._sums[2].addmm_(states[0].T, states[0])
        self._sums[3].addmm_(states[-1].T, states[0])

    def fit(self, ridge: float = 0.0, rank: int | None = None) -> SpanMap:
        """Minimises ``|X2 - K X1|_F^2 + ridge |K|_F^2``, and the same for the map of the ends.

        With ``X1 = U S V*`` the solution is ``K = X2 V S (S^2 + ridge)^-1 U*``; `rank` keeps the leading directions of
        ``U`` alone, those along which the inputs are largest. Directions that are rounding (``S^2`` at most
        ``hidden_size * eps`` of the largest) are left out unless `ridge` is above 0.

        Args:
            ridge (`float`): ``alpha``, 0 or more, in the units of a sum of squares over all tokens (and, for ``K``,
                over the steps): scale it with the number of tokens.
            rank (`int`, *optional*): 1 to `hidden_size`.

        Raises:
            ValueError: if no token was seen, sums are infinite or NaN, or an argument is out of range.
        """
        if self._sums is None or self._num_tokens == 0:
            raise ValueError("no token was seen; call update at least once before fit.")
        if not 0 <= ridge < float("inf"):
            raise ValueError(f"ridge={ridge} is no penalty; use 0 or a finite number above it.")
        if rank is not None and not 1 <= rank <= self._sums.shape[-1]:
            raise ValueError(f"rank={rank} for {self._sums.shape[-1]} features; use 1 to that number, or None.")
        if not bool(torch.isfinite(self._sums).all()):
            raise ValueError("states of the span hold infinity or NaN; leave such images out, or compute in float32.")
        return SpanMap(
            step=_ridge_solution(self._sums[0], self._sums[1], ridge, rank).cpu(),
            endpoint=_ridge_solution(self._sums[2], self._sums[3], ridge, rank).cpu(),
            num_layers=self._num_layers,
            ridge=ridge,
            rank=rank,
            num_tokens=self._num_tokens,
        )


def fit_span_map(hidden_states: Sequence[torch.Tensor], ridge: float = 0.0, rank: int | None = None) -> SpanMap:
    """[`SpanMapEstimator`] on one batch: the ``p + 1`` states of a span, each `(..., hidden_size)`.

    Raises:
        ValueError: as [`SpanMapEstimator.update`] and [`SpanMapEstimator.fit`].
    """
    estimator = SpanMapEstimator()
    estimator.update(hidden_states)
    return estimator.fit(ridge, rank)


def _ridge_solution(gram: torch.Tensor, lagged: torch.Tensor, ridge: float, rank: int | None) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(gram)
    kept = torch.ones_like(values, dtype=torch.bool)
    if rank is not None:
        kept[: len(values) - rank] = False
    if ridge == 0:
        kept &= values > len(values) * torch.finfo(torch.float64).eps * values[-1]
    inverse = torch.where(kept, 1 / torch.where(kept, values.clamp_min(0.0) + ridge, 1.0), 0.0)
    return (lagged @ vectors * inverse) @ vectors.T
