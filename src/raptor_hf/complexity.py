"""How near a Raptor is to being its teacher, and how short it is to write down (arXiv 2512.19941, Def. 1, Claims 1, 2).

A ViT satisfies the eps-Block-Recurrent Hypothesis if a tied composition makes every one of its states with an expected
Frobenius error of at most eps, at the same cost. Its Levin complexity is then bounded by the length of the blocks, of
the schedule, and the logarithm of the running time; the constants cannot be computed, so what is reported are the
parts: bits of the blocks, bits of the schedule in a stated code, log2 of the operations, and the measured eps.
"""

import math
import statistics
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .frozen import FrozenBackbone
from .interventions import Batch, Model, base_states
from .interventions.runs import layout_of, num_layers_of, plain, unpacked
from .teachers import Teacher
from .tokens import schedule_segments

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RecurrenceError:
    """The eps of Def. 1, measured.

    Attributes:
        epsilon (`list[float]`): per layer `1..L`, the mean over images of the Frobenius norm of the difference of the
            two states `(seq_length, hidden_size)`.
        relative (`list[float]`): the mean over images of that norm divided by the teacher's state's; 0 for equal
            states, `inf` for a state of zeros that the other is not.
        num_images (`int`): images measured.
    """

    epsilon: list[float]
    relative: list[float]
    num_images: int

    @property
    def max_epsilon(self) -> float:
        """The smallest eps that all layers keep."""
        return max(self.epsilon)

    @property
    def worst_layer(self) -> int:
        """The first layer, from 1, whose eps is the largest."""
        return 1 + self.epsilon.index(self.max_epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values for strict JSON; numbers that are not finite become `None`."""
        return plain({**asdict(self), "max_epsilon": self.max_epsilon, "worst_layer": self.worst_layer})


def block_recurrence_error(teacher: Teacher, model: Model, batches: Iterable[Batch]) -> RecurrenceError:
    """Rolls both models out on the same images (free-running, Def. 1).

    Args:
        teacher (`Teacher`), model (`RaptorModel` or `Teacher`): of the same layers, features and tokens.
        batches (`Iterable`): as for [`~raptor_hf.interventions.measure_swaps`]; labels are not looked at.

    Raises:
        ValueError: if states differ in number or shape, or there is no image.
    """
    sums = torch.zeros(2, num_layers_of(teacher), dtype=torch.float64)
    num_images = 0
    for pixel_values, _ in unpacked(batches, needs_labels=False):
        targets, states = base_states(teacher, pixel_values), base_states(model, pixel_values)
        shapes = [(len(found), *found[0].shape[1:]) for found in (targets, states)]
        if shapes[0] != shapes[1] or layout_of(teacher) != layout_of(model):
            raise ValueError(
                f"states (L + 1, seq_length, hidden_size) = {shapes[0]} and {shapes[1]}: eps compares layer by layer "
                "and token by token; give a Raptor and the teacher that it was made from."
            )
        for index, (target, state) in enumerate(zip(targets[1:], states[1:], strict=True)):
            exact = target.cpu().double()
            error = torch.linalg.vector_norm(state.cpu().double() - exact, dim=(1, 2))
            norm = torch.linalg.vector_norm(exact, dim=(1, 2))
            sums[0, index] += error.sum()
            sums[1, index] += torch.where(error > 0, error / norm, 0.0).sum()
        num_images += len(pixel_values)
    epsilon, relative = (sums / num_images).tolist()
    return RecurrenceError(epsilon, relative, num_images)


@dataclass(frozen=True)
class DescriptionLength:
    """Parts of the bound of Claim 1, in bits. Embeddings and final norm, which a Raptor shares with its teacher, are
    left out.

    Attributes:
        dtype (`str`): the precision of the weights.
        num_blocks (`int`): blocks that are written down: `k` of a Raptor, the layers of a ViT.
        num_parameters (`int`): their weights, depth scales included.
        block_bits (`int`): `num_parameters` at that precision.
        coded_bits (`int`): the same weights entropy-coded, see [`entropy_coded_bits`].
        schedule_bits (`int`): see [`schedule_bits`].
        flops (`int`): operations for one image of `image_size` `(height, width)`, see
            [`~raptor_hf.frozen.FrozenBackbone.flops`].
    """

    dtype: str
    num_blocks: int
    num_parameters: int
    block_bits: int
    coded_bits: int
    schedule_bits: int
    flops: int
    image_size: tuple[int, int]

    @property
    def levin_bits(self) -> float:
        """`coded_bits + schedule_bits + log2(flops)`: the bound of Claim 1 without its constant."""
        return self.coded_bits + self.schedule_bits + math.log2(self.flops)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values for strict JSON, `log2_flops` and `levin_bits` among them."""
        return plain({**asdict(self), "log2_flops": math.log2(self.flops), "levin_bits": self.levin_bits})


def description_length(model: Model, image_size: tuple[int, int], dtype: str = "float32") -> DescriptionLength:
    """How long a model's blocks and schedule are.

    Args:
        model (`Teacher` or `RaptorModel`): a ViT counts as one block per layer.
        image_size (`(height, width)`): of the images that operations are counted for, in pixels.
        dtype (`str`): `"float32"`, `"bfloat16"` or `"float16"`; weights are rounded to it first.

    Raises:
        ValueError: if `dtype` is none of these.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: bits of the blocks are counted in {', '.join(DTYPES)}; use one of these.")
    if isinstance(model, Teacher):
        layers = range(1, model.num_layers + 1)
        weights = [weight for layer in layers for weight in model.block_state(layer).values()]
        schedule = list(range(model.num_layers))
    else:
        weights = [weight.detach() for weight in model.blocks.parameters()]
        schedule = list(model.config.block_schedule or ())
    flat = torch.cat([weight.detach().cpu().flatten().to(DTYPES[dtype]) for weight in weights])
    return DescriptionLength(
        dtype=dtype,
        num_blocks=len(set(schedule)),
        num_parameters=len(flat),
        block_bits=len(flat) * 8 * flat.element_size(),
        coded_bits=entropy_coded_bits(flat),
        schedule_bits=schedule_bits(schedule),
        flops=FrozenBackbone(model).flops(*image_size),
        image_size=image_size,
    )


def entropy_coded_bits(weights: torch.Tensor) -> int:
    """Size of weights of any floating point type, Huffman-coded byte plane by byte plane with zlib.

    First all first bytes, then all second ones, ...: signs and exponents are far from uniform, mantissas nearly are.
    On a Raptor's blocks this is within 1 % of the order-0 entropy, and below what lzma, bz2 and zlib's own matching
    make of the same bytes.
    """
    planes = weights.detach().cpu().contiguous().view(torch.uint8).reshape(weights.numel(), -1).T
    total = 0
    for plane in planes:
        coder = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
        total += len(coder.compress(plane.contiguous().numpy().tobytes())) + len(coder.flush())
    return 8 * total


def schedule_bits(block_schedule: Sequence[int]) -> int:
    """Bits of a block schedule in a prefix code.

    One bit says whether every block has one run of layers, in the order of the blocks. If so: Elias gamma of `k`, then
    of every `n_j`. Else: Elias gamma of `k` and of the number of runs, and for each run that of its length and the
    number of its block in `ceil(log2 k)` bits.

    Raises:
        ValueError: if the schedule is empty.
    """
    if not block_schedule:
        raise ValueError("an empty schedule has no length; give the block of every layer.")
    segments = schedule_segments(block_schedule)
    num_blocks = len(set(block_schedule))
    bits = 1 + elias_gamma_bits(num_blocks) + sum(elias_gamma_bits(segment.num_layers) for segment in segments)
    if [segment.block for segment in segments] == list(range(num_blocks)):
        return bits
    return bits + elias_gamma_bits(len(segments)) + len(segments) * math.ceil(math.log2(num_blocks))


def elias_gamma_bits(number: int) -> int:
    """Length of the Elias gamma code of a whole number from 1 on: `2 floor(log2 number) + 1`.

    Raises:
        ValueError: if `number` is below 1.
    """
    if number < 1:
        raise ValueError(f"number={number}: Elias gamma codes whole numbers from 1 on.")
    return 2 * number.bit_length() - 1


@dataclass(frozen=True)
class RuntimeRatio:
    """Time of one model relative to another's, by pairs of runs in turn.

    Attributes:
        median, low, high (`float`): of the pairs' ratios; `low` and `high` are the smallest and the largest.
        num_pairs (`int`), batch_size (`int`): pairs, and images of each run.
    """

    median: float
    low: float
    high: float
    num_pairs: int
    batch_size: int

    @property
    def delta(self) -> float:
        """`median - 1`: the delta of Claim 2, what a run of the Raptor takes longer."""
        return self.median - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values for strict JSON."""
        return {**asdict(self), "delta": self.delta}


def runtime_ratio(teacher: Model, model: Model, pixel_values: torch.Tensor, num_pairs: int = 9) -> RuntimeRatio:
    """Times a forward pass of both models in turn, after one of each that does not count.

    Args:
        pixel_values (`torch.Tensor` of shape `(batch_size, num_channels, height, width)`): the images of every pass.
        num_pairs (`int`): pairs of passes, 1 or more.

    Raises:
        ValueError: if `num_pairs` is below 1.
    """
    if num_pairs < 1:
        raise ValueError(f"num_pairs={num_pairs}: time at least one pair, better nine.")
    both = FrozenBackbone(teacher), FrozenBackbone(model)
    times: list[list[float]] = [[], []]
    for _ in range(num_pairs + 1):
        for backbone, seconds in zip(both, times, strict=True):
            _synchronise(backbone.device)
            start = time.perf_counter()
            backbone(pixel_values)
            _synchronise(backbone.device)
            seconds.append(time.perf_counter() - start)
    ratios = [ours / theirs for theirs, ours in zip(times[0][1:], times[1][1:], strict=True)]
    return RuntimeRatio(statistics.median(ratios), min(ratios), max(ratios), num_pairs, len(pixel_values))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
