"""How closely the student's states follow the teacher's: R2 and cosine per layer and token group.

The states of an evaluation set are far too many to keep (images x layers x tokens x features), so everything here is a
sum that can be added up over batches, shards and processes: memory does not depend on the number of images, and the
distributed result is the plain sum of the ranks' vectors. Metrics are those of arXiv 2512.19941, Sec. 3, Fig. 7 and 14
and App. A.2; shapes and layer numbers follow the glossary of `raptor_hf.tokens`.

The paper speaks of R2 without saying which. With ``SSE_f`` the squared error and ``SST_f`` the squared deviation of
the teacher's feature ``f`` from its mean over all images and tokens of the group, each summed over the same, the
definitions are
    variance_weighted   ``1 - sum_f SSE_f / sum_f SST_f``, scikit-learn's of that name; the default
    uniform_average     ``mean_f (1 - SSE_f / SST_f)``, scikit-learn's default: a feature that hardly varies counts as
                        much as one that dominates the state
    global_mean         ``1 - sum_f SSE_f / SST``, ``SST`` about one mean over the whole tensor: the research code's
                        ``r2_score``. Never below variance_weighted, since differences between the features' means
                        count as variance that the student explains
    ols                 App. A.2, for small models: per token the teacher's vector is regressed on the student's with
                        slope and bias over the features, the tokens' R2 are averaged. In 0..1 and blind to scale,
                        offset and sign, so high values do not mean that the states agree

A feature that is constant over the evaluation set (``SST_f`` at most `CONSTANT_SHARE` of its sum of squares, which
float64 sums cannot tell from zero) scores 1 if it is reproduced exactly and 0 otherwise, as in scikit-learn. Unlike
there its error still counts in variance_weighted, as the formula says. Fewer than two tokens have no variance: NaN.
Infinite or NaN states give NaN rather than being left out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .tokens import TokenLayout

R2_DEFINITIONS = ("variance_weighted", "uniform_average", "global_mean", "ols")
CONSTANT_SHARE = 1e-12
_NUM_SCALARS = 3  # tokens, sum of cosines, sum of the tokens' OLS R2
_NUM_VECTORS = 3  # per feature: sum of the teacher, of its square, of the squared error


@torch.no_grad()
def token_sums(student: torch.Tensor, teacher: torch.Tensor, with_ols: bool = False) -> torch.Tensor:
    """Sums from which every score of one token group follows; they add up over batches.

    Elements are handled in float32 (float64 if either input is), tokens of an image are added in that precision and
    images in float64. The teacher is centred on each image's own mean first, so that a feature with a large mean and
    a small variance keeps its digits, without a float64 copy of the states.

    Args:
        student (`torch.Tensor` of shape `(batch_size, num_tokens, hidden_size)`): any floating point type.
        teacher (`torch.Tensor` of the same shape): moved to the student's device if needed.
        with_ols (`bool`): also fit the regression of every token, at several times the cost.

    Returns:
        `torch.Tensor` of shape `(3 + 3 * hidden_size,)`, float64: number of tokens, sum of the tokens' cosines, sum of
        their OLS R2 (0 without `with_ols`), then per feature the sum of the teacher, of its square, and of the
        squared error.
    """
    dtype = torch.float64 if torch.float64 in (student.dtype, teacher.dtype) else torch.float32
    student = student.to(dtype)
    teacher = teacher.to(device=student.device, dtype=dtype)
    batch_size, num_tokens, _ = student.shape

    squared_error = _to_float64((student - teacher).square_().sum(dim=1)).sum(dim=0)
    mean = teacher.mean(dim=1, keepdim=True)
    deviation = teacher - mean
    rest = _to_float64(deviation.sum(dim=1))  # what rounding left out of the mean
    square = _to_float64(deviation.square_().sum(dim=1))
    mean = _to_float64(mean.squeeze(1))
    total = (num_tokens * mean + rest).sum(dim=0)
    total_square = (square + 2 * mean * rest + num_tokens * mean.square()).sum(dim=0)

    cosine = _to_float64(_token_cosine(student, teacher)).sum()
    ols = _to_float64(_token_ols_r2(student, teacher)).sum() if with_ols else torch.zeros_like(cosine)
    scalars = torch.stack([torch.full_like(cosine, batch_size * num_tokens), cosine, ols])
    return torch.cat([scalars, total, total_square, squared_error])


def r2_from_sums(sums: torch.Tensor, definition: str = "variance_weighted") -> float:
    """R2 from what [`token_sums`] returned, or from the sum of such vectors.

    Args:
        sums (`torch.Tensor` of shape `(3 + 3 * hidden_size,)`): float64.
        definition (`str`): one of `R2_DEFINITIONS`, explained at the head of this module; `"ols"` needs sums made with
            `with_ols=True`.

    Returns:
        `float`: at most 1; NaN where the definition has no value.

    Raises:
        ValueError: if `definition` is unknown.
    """
    _check_definitions((definition,))
    count = float(sums[0])
    if definition == "ols":
        return float(sums[2] / sums[0])
    moments = sums[_NUM_SCALARS:].view(_NUM_VECTORS, -1)
    if definition == "global_mean":
        count *= moments.shape[1]
        moments = moments.sum(dim=1, keepdim=True)
    if count < 2:
        return math.nan
    total, total_square, squared_error = moments
    variation = total_square - total.square() / count
    variation = torch.where(variation <= CONSTANT_SHARE * total_square, 0.0, variation)
    if definition == "variance_weighted":
        squared_error, variation = squared_error.sum(), variation.sum()
    without_variation = torch.where(squared_error > 0, 0.0, 1.0 + squared_error)  # 1 for no error, NaN for NaN
    r2 = torch.where(variation == 0, without_variation, 1.0 - squared_error / variation)
    return float(r2.mean())


def cosine_from_sums(sums: torch.Tensor) -> float:
    """Mean over tokens of the cosine between student and teacher (Fig. 14), from sums as in [`r2_from_sums`].

    A token whose vector is zero on either side has cosine 0. NaN if there is no token.
    """
    return float(sums[1] / sums[0])


@dataclass(frozen=True)
class Fidelity:
    """Agreement of a student with its teacher, per token group (`"all"` and the layout's groups) and layer `1..L`.

    Attributes:
        r2 (`dict[str, list[float]]`): R2 in the sense of `definition`, one value per layer; entry `l - 1` is layer `l`.
        cosine (`dict[str, list[float]]`): mean cosine over the tokens of the group, likewise.
        num_images (`int`): images that were measured.
        num_layers (`int`): `L`.
        definition (`str`): which R2 `r2` is, one of `R2_DEFINITIONS`.
        other (`dict[str, dict[str, list[float]]]`): R2 by further definitions, `other[definition][group]`.
    """

    r2: dict[str, list[float]]
    cosine: dict[str, list[float]]
    num_images: int
    num_layers: int
    definition: str
    other: dict[str, dict[str, list[float]]]

    def mean_r2(self, group: str = "all") -> float:
        """Mean of `r2` over the layers; NaN if a layer's is.

        Raises:
            ValueError: if `group` was not measured.
        """
        return math.fsum(self._layers(group)) / self.num_layers

    def last_r2(self, group: str = "all") -> float:
        """`r2` of layer `L`, the state that heads and probes read.

        Raises:
            ValueError: if `group` was not measured.
        """
        return self._layers(group)[-1]

    def _layers(self, group: str) -> list[float]:
        if group not in self.r2:
            raise ValueError(f"group={group!r} was not measured; use one of {', '.join(map(repr, self.r2))}.")
        return self.r2[group]

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain Python values for strict JSON: NaN and infinity become `None`."""
        return _replace_floats(asdict(self), lambda value: value if math.isfinite(value) else None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Fidelity":
        """Inverse of [`Fidelity.to_dict`]; `None` becomes NaN.

        Raises:
            ValueError: if a field is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(
                f"fields {sorted(set(values) ^ names)} are missing or unknown; a Fidelity has exactly {sorted(names)}."
            )
        return cls(**_replace_floats(dict(values), lambda value: math.nan if value is None else value))


class FidelityAccumulator:
    """Adds up the fidelity of batches; [`FidelityAccumulator.compute`] may be called at any time.

    In a distributed run every rank updates its own accumulator with the images that are its own (without the samples
    that pad its last batch) and the vectors are added:

    ```python
    fidelity = FidelityAccumulator(num_layers, layout, hidden_size=model.config.hidden_size)
    for student_states, teacher_states in batches:
        fidelity.update(student_states, teacher_states)
    fidelity.reduce(lambda sums: accelerator.reduce(sums.to(accelerator.device), "sum"))
    fidelity.compute().mean_r2()
    ```

    Args:
        num_layers (`int`): `L`.
        layout (`TokenLayout`): where the token groups sit.
        definitions (`Sequence[str]`): the R2 definitions wanted, from `R2_DEFINITIONS`; the first is reported as `r2`,
            the others in `other`. Only `"ols"` costs more, several times as much.
        hidden_size (`int`, *optional*): taken from the first batch if not given; needed by a rank that may have none.

    Raises:
        ValueError: if `num_layers` or `hidden_size` is below 1, or a definition is unknown or none is given.
    """

    def __init__(
        self,
        num_layers: int,
        layout: TokenLayout,
        definitions: Sequence[str] = ("variance_weighted",),
        hidden_size: int | None = None,
    ) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers={num_layers} is below 1; give the number of the teacher's layers.")
        if hidden_size is not None and hidden_size < 1:
            raise ValueError(f"hidden_size={hidden_size} is below 1; give the width of a token or leave it out.")
        _check_definitions(definitions)
        self.num_layers = num_layers
        self.layout = layout
        self.definitions = tuple(definitions)
        self._num_images = 0
        self._rows: torch.Tensor | None = None  # (num_layers, num_groups, 3 + 3 * hidden_size)
        if hidden_size is not None:
            self._rows = self._zeros(hidden_size, torch.device("cpu"))

    @property
    def hidden_size(self) -> int | None:
        """Features of a token; `None` before the first batch if it was not given."""
        return None if self._rows is None else (self._rows.shape[-1] - _NUM_SCALARS) // _NUM_VECTORS

    @property
    def num_images(self) -> int:
        """Images seen so far."""
        return self._num_images

    def update(self, student_states: Sequence[torch.Tensor], teacher_states: Sequence[torch.Tensor]) -> None:
        """Adds a batch. No reference to the states is kept.

        Args:
            student_states (`Sequence[torch.Tensor]`): states `0..L`, each `(batch_size, seq_length, hidden_size)` in
                any floating point type. State 0 is the teacher's by construction and is not looked at.
            teacher_states (`Sequence[torch.Tensor]`): the same of the teacher.

        Raises:
            ValueError: if the number of states, a shape or a type is wrong; nothing is added then.
        """
        shape = self._check_states(student_states, teacher_states)
        if self._rows is None or self._num_images == 0:
            self._rows = self._zeros(shape[-1], student_states[1].device)
        self._num_images += shape[0]
        for layer in range(1, self.num_layers + 1):
            for index, group in enumerate(self.layout.groups):
                student = self.layout.select(student_states[layer], group)
                teacher = self.layout.select(teacher_states[layer], group)
                sums = token_sums(student, teacher, with_ols="ols" in self.definitions)
                self._rows[layer - 1, index] += sums.to(self._rows.device)

    def sums(self) -> torch.Tensor:
        """Everything seen so far as one vector that adds up: the sum over ranks is what one process would have.

        Returns:
            `torch.Tensor` of shape `(1 + num_layers * num_groups * (3 + 3 * hidden_size),)`, float64, a copy: number of
            images, then layer by layer and group by group (in the order of `layout.groups`) what [`token_sums`]
            returns. Group `"all"` is not in it, it is the sum of the groups.

        Raises:
            ValueError: if `hidden_size` is still unknown.
        """
        if self._rows is None:
            raise ValueError("hidden_size is unknown before the first update; give FidelityAccumulator hidden_size=...")
        return torch.cat([self._rows.new_tensor([self._num_images]), self._rows.flatten()])

    def load_sums(self, sums: torch.Tensor) -> None:
        """Replaces what was seen by a vector as [`FidelityAccumulator.sums`] returns it.

        Raises:
            ValueError: if the vector is not float64 or its length does not fit the layers, groups and features.
        """
        if sums.dtype != torch.float64 or sums.ndim != 1:
            raise ValueError(
                f"sums of {sums.dtype} in {sums.ndim} dimensions; add up the float64 vectors of sums() as they are."
            )
        num_rows = self.num_layers * len(self.layout.groups)
        hidden_size, rest = divmod((len(sums) - 1) // num_rows - _NUM_SCALARS, _NUM_VECTORS)
        exact = (len(sums) - 1) % num_rows == 0 and rest == 0 and hidden_size > 0
        if not exact or self.hidden_size not in (None, hidden_size):
            raise ValueError(
                f"{len(sums)} sums do not belong to {self.num_layers} layers, groups {self.layout.groups} and "
                f"hidden_size={self.hidden_size}; make all accumulators with the same arguments."
            )
        self._num_images = int(sums[0])
        rows = self._zeros(hidden_size, sums.device)
        self._rows = rows.copy_(sums[1:].view_as(rows))

    def reduce(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the sums by `function(sums)`, for example an all-reduce that returns its result.

        Raises:
            ValueError: as [`FidelityAccumulator.sums`] and [`FidelityAccumulator.load_sums`].
        """
        self.load_sums(function(self.sums()))

    def merge(self, other: "FidelityAccumulator") -> None:
        """Adds what `other` has seen; `other` stays as it is.

        Raises:
            ValueError: if `other` measures other layers, groups, definitions or features.
        """
        mine = (self.num_layers, self.layout, self.definitions, self.hidden_size)
        theirs = (other.num_layers, other.layout, other.definitions, other.hidden_size)
        if mine[:3] != theirs[:3] or (mine[3] != theirs[3] and None not in (mine[3], theirs[3])):
            raise ValueError(f"accumulators differ: {mine} and {theirs}; make both with the same arguments.")
        if other.hidden_size is not None:
            sums = other.sums()
            self.load_sums(sums if self.hidden_size is None else self.sums().to(sums.device) + sums)

    def compute(self) -> Fidelity:
        """Scores of everything seen so far.

        Raises:
            ValueError: if no image was seen.
        """
        if self._rows is None or self._num_images == 0:
            raise ValueError("no image was measured; call update at least once before compute.")
        rows = self._rows.cpu()
        groups = {"all": rows.sum(dim=1)} | dict(zip(self.layout.groups, rows.unbind(1), strict=True))
        r2 = {
            definition: {name: [r2_from_sums(row, definition) for row in layers] for name, layers in groups.items()}
            for definition in self.definitions
        }
        cosine = {name: [cosine_from_sums(row) for row in layers] for name, layers in groups.items()}
        main = self.definitions[0]
        return Fidelity(
            r2=r2.pop(main),
            cosine=cosine,
            num_images=self.num_images,
            num_layers=self.num_layers,
            definition=main,
            other=r2,
        )

    def _check_states(
        self, student_states: Sequence[torch.Tensor], teacher_states: Sequence[torch.Tensor]
    ) -> torch.Size:
        expected = self.num_layers + 1
        if len(student_states) != expected or len(teacher_states) != expected:
            raise ValueError(
                f"{len(student_states)} student and {len(teacher_states)} teacher states for {self.num_layers} layers; "
                f"pass states 0..{self.num_layers}, {expected} of each."
            )
        shape = student_states[1].shape
        if len(shape) != 3 or shape[1] <= self.layout.num_prefix_tokens:
            raise ValueError(
                f"states of shape {tuple(shape)}; pass (batch_size, seq_length, hidden_size) with a cls token, "
                f"{self.layout.num_register_tokens} registers and at least one patch."
            )
        if self.hidden_size not in (None, shape[-1]):
            raise ValueError(
                f"states with {shape[-1]} features where hidden_size={self.hidden_size}; measure one model."
            )
        for name, states in (("student", student_states), ("teacher", teacher_states)):
            for number, state in enumerate(states[1:], start=1):
                if state.shape != shape or not state.is_floating_point():
                    raise ValueError(
                        f"{name} state {number} is {state.dtype} of shape {tuple(state.shape)}, student state 1 has "
                        f"{tuple(shape)}; pass floating point states of one shape for the same images."
                    )
        return shape

    def _zeros(self, hidden_size: int, device: torch.device) -> torch.Tensor:
        shape = (self.num_layers, len(self.layout.groups), _NUM_SCALARS + _NUM_VECTORS * hidden_size)
        with torch.inference_mode(False):  # else sums started under inference_mode could not be changed outside it
            return torch.zeros(shape, dtype=torch.float64, device=_sum_device(device))


def measure_fidelity(
    pairs: Iterable[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    layout: TokenLayout,
    definitions: Sequence[str] = ("variance_weighted",),
) -> Fidelity:
    """Fidelity over a stream of batches, in one pass; the number of layers is taken from the first.

    Args:
        pairs (iterable of `(student_states, teacher_states)`): as for [`FidelityAccumulator.update`].
        layout (`TokenLayout`): where the token groups sit.
        definitions (`Sequence[str]`): as for [`FidelityAccumulator`].

    Raises:
        ValueError: as [`FidelityAccumulator`] and its `update`; if there is no batch.
    """
    accumulator: FidelityAccumulator | None = None
    for student_states, teacher_states in pairs:
        if accumulator is None:
            accumulator = FidelityAccumulator(len(teacher_states) - 1, layout, definitions)
        accumulator.update(student_states, teacher_states)
    if accumulator is None:
        raise ValueError("no batch of states was given; is the evaluation set empty?")
    return accumulator.compute()


def _check_definitions(definitions: Sequence[str]) -> None:
    if not definitions or not set(definitions) <= set(R2_DEFINITIONS):
        raise ValueError(
            f"definitions={definitions!r} are not all R2 definitions; use one or more of {', '.join(R2_DEFINITIONS)}."
        )


def _token_cosine(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Cosine of every token, `(batch_size, num_tokens)`; no matrix product, which TF32 would round."""
    norms = torch.linalg.vector_norm(student, dim=-1) * torch.linalg.vector_norm(teacher, dim=-1)
    cosine = (student * teacher).sum(dim=-1) / norms
    return torch.where(norms == 0, 0.0, cosine).clamp_(-1.0, 1.0)


def _token_ols_r2(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """R2 of `teacher = slope * student + bias` over the features of every token: their squared correlation.

    A constant teacher vector is fitted exactly by the bias (1), a constant student explains nothing else (0).
    """
    student_constant, student = _centred(student)
    teacher_constant, teacher = _centred(teacher)
    r2 = _token_cosine(student, teacher).square_()
    return torch.where(teacher_constant, 1.0, torch.where(student_constant, 0.0, r2))


def _centred(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each token is constant over its features to rounding, and the tokens minus their mean."""
    centred = tokens - tokens.mean(dim=-1, keepdim=True)
    resolution = 4 * torch.finfo(tokens.dtype).eps * torch.linalg.vector_norm(tokens, dim=-1)
    return torch.linalg.vector_norm(centred, dim=-1) <= resolution, centred


def _sum_device(device: torch.device) -> torch.device:
    """Where sums of states on `device` are kept: Apple's GPUs have no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_sum_device(tensor.device)).to(torch.float64)


def _replace_floats(value: Any, function: Callable[[Any], Any]) -> Any:
    """Applies `function` to the floats and `None`s in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _replace_floats(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_floats(item, function) for item in value]
    return function(value) if value is None or isinstance(value, float) else value
