"""How the directions around a state grow over depth: finite-time Lyapunov exponents, by Jacobian-vector products.

Not in the Raptor paper. Layer `l` is a map `f_l`; a small displacement `v` of state `l - 1` is `J_l v` after it. A
frame of displacements is taken along the rollout and made orthonormal again behind every layer (Benettin et al. 1980):
the logarithms of the diagonal of `R` are what the first, the second, ... direction grew by, and their mean over layers
is the finite-time exponent, in nats per layer. Above 0, neighbours part; below, the layers contract.

States grow by themselves, and what counts for a normalised state is a displacement relative to it: subtract
`state_growth`. The paper's perturbations (Fig. 10) have a size and a random direction; this is their limit of size 0,
in the directions that grow most.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..tokens import TokenLayout

Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TangentGrowth:
    """Growth of a frame along one rollout of a batch, float64 on the CPU.

    Attributes:
        rates (`torch.Tensor` of shape `(batch_size, num_layers, num_exponents)`): logarithm of what each layer
            stretches the first, second, ... direction by, in nats; `-inf` where it is flattened.
        state_growth (`torch.Tensor` of shape `(batch_size, num_layers)`): logarithm of the ratio of the states'
            Frobenius norms.
        shares (`dict[str, torch.Tensor]` of shape `(batch_size, num_layers)`): squared share that the tokens of a group
            have in the first direction behind each layer; empty without a layout.
    """

    rates: torch.Tensor
    state_growth: torch.Tensor
    shares: dict[str, torch.Tensor]


def tangent_growth(
    steps: Iterable[Step],
    hidden_states: torch.Tensor,
    tangents: torch.Tensor,
    layout: TokenLayout | None = None,
) -> TangentGrowth:
    """Takes a frame of displacements along a rollout.

    Cost: per layer, `num_exponents` Jacobian-vector products, each about two forward passes; memory of two of them.

    Args:
        steps (`Iterable[Callable]`): the layers, each from states `(batch_size, seq_length, hidden_size)` to states of
            that shape. Samples of a batch must not act on each other.
        hidden_states (`torch.Tensor` of shape `(batch_size, seq_length, hidden_size)`): where the rollout starts.
        tangents (`torch.Tensor` of shape `(num_exponents, batch_size, seq_length, hidden_size)`): where the frame
            starts; any independent displacements. Random ones find the growing directions within some layers: the
            first rates are those of a random direction.
        layout ([`~raptor_hf.TokenLayout`], *optional*): to say in which token group the first direction lies.

    Raises:
        ValueError: if shapes do not fit, there are more displacements than dimensions, or no step.
    """
    shape = hidden_states.shape
    if hidden_states.ndim != 3 or tangents.ndim != 4 or tangents.shape[1:] != shape:
        raise ValueError(
            f"tangents of shape {tuple(tangents.shape)} for states of shape {tuple(shape)}; pass "
            "(num_exponents, batch_size, seq_length, hidden_size) for (batch_size, seq_length, hidden_size)."
        )
    if not 1 <= len(tangents) <= shape[1:].numel():
        raise ValueError(f"{len(tangents)} tangents for {shape[1:].numel()} dimensions; use 1 to that many.")
    frame, _ = _orthonormal(tangents)
    spans = {name: layout.span(name) for name in layout.groups} if layout else {}
    rates, growth = [], []
    shares: dict[str, list[torch.Tensor]] = {name: [] for name in spans}
    norm = _norms(hidden_states)
    for step in steps:
        hidden_states, frame = _push(step, hidden_states, frame.to(hidden_states))
        frame, lengths = _orthonormal(frame)
        rates.append(lengths.log())
        before, norm = norm, _norms(hidden_states)
        growth.append((norm / before).log())
        for name, share in shares.items():
            share.append(frame[0][:, spans[name]].square().sum(dim=(1, 2)).cpu())
    if not rates:
        raise ValueError("no step was given; pass the layers of a model.")
    return TangentGrowth(
        torch.stack(rates, dim=1),
        torch.stack(growth, dim=1),
        {name: torch.stack(share, dim=1) for name, share in shares.items()},
    )


def _push(step: Step, states: torch.Tensor, frame: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next state, and `J v` of each displacement; fused attention kernels have no forward derivative."""
    pushed = []
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        for tangent in frame:
            with warnings.catch_warnings():  # the first dual number loads what torch itself calls deprecated
                warnings.filterwarnings("ignore", ".torch.jit.script", FutureWarning)
                dual = forward_ad.make_dual(states, tangent)
            after, moved = forward_ad.unpack_dual(step(dual))
            pushed.append(torch.zeros_like(after) if moved is None else moved)
    return after, torch.stack(pushed)


def _orthonormal(frame: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An orthonormal frame, float64, and the lengths `(batch_size, num_exponents)` that made it, on the CPU."""
    device = torch.device("cpu") if frame.device.type == "mps" else frame.device  # Apple's GPUs have no float64
    columns = frame.to(device, torch.float64).flatten(2).permute(1, 2, 0)
    q, r = torch.linalg.qr(columns)
    return q.permute(2, 0, 1).unflatten(2, frame.shape[2:]), r.diagonal(dim1=1, dim2=2).abs().cpu()


def _norms(states: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(states.cpu().double(), dim=(1, 2))
