"""Muon on the blocks' matrices and AdamW on everything else, as one optimiser with one state.

Both are torch's own; this file only decides which parameter goes where, and cuts stacked projections apart.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

BLOCK_OPTIMIZERS = ("adamw", "muon")
_MATRIX = re.compile(r"(^|\.)blocks\.\d+\.(attention\.(qkv|proj)|mlp\.(fc1|fc2))\.weight$")


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups with `num_parts >= 1`, `torch.optim.AdamW` for groups with `num_parts = 0`.

    Muon orthogonalises each of a matrix's `num_parts` equal blocks of rows on its own: the rows of `qkv` are three
    matrices, those of a SwiGLU `fc1` two. Its step has the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`, arXiv
    2502.16982), so that both share one learning rate and schedule. All state lies in this optimiser: one `state_dict`,
    resumed bit for bit. Matrices must be whole on their process, as under DDP.

    Args:
        params: groups, dicts with `params`, `num_parts`, and optionally `lr`, `weight_decay`.
        lr: learning rate.
        weight_decay: decoupled decay.
        betas, eps: AdamW's.
        momentum: Muon's, with Nesterov's step.

    Raises:
        ValueError: if a matrix's rows cannot be cut into its group's `num_parts`, or torch refuses a value.
    """

    def __init__(
        self,
        params: Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ) -> None:
        groups = []
        for group in params:
            own = {"lr": lr, "weight_decay": weight_decay, **group}
            members, num_parts = list(own.pop("params")), own.pop("num_parts", 0)
            inner: torch.optim.Optimizer
            if num_parts:
                inner = torch.optim.Muon(members, momentum=momentum, adjust_lr_fn="match_rms_adamw", **own)
                _check_parts(members, num_parts)
            else:
                inner = torch.optim.AdamW(members, betas=betas, eps=eps, **own)
            groups.append({**inner.param_groups[0], "num_parts": num_parts})
        super().__init__(groups, {"lr": lr})
        placeholder = [nn.Parameter(torch.empty(1, 1))]
        self._muon, self._adamw = torch.optim.Muon(placeholder), torch.optim.AdamW(placeholder)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. `closure` evaluates the loss anew, as in every torch optimiser."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["num_parts"]:
                self._step_muon(group)
            else:
                self._adamw.param_groups, self._adamw.state = [group], self.state
                self._adamw.step()
        return loss

    def _step_muon(self, group: dict[str, Any]) -> None:
        """Steps the row blocks of the group's matrices: views of weight, gradient and momentum."""
        parts, state = [], {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            own = self.state[parameter]
            if "momentum_buffer" not in own:
                own["momentum_buffer"] = torch.zeros_like(parameter.grad)
            tensors = (parameter.detach(), parameter.grad, own["momentum_buffer"])
            for weight, gradient, momentum in zip(*(t.chunk(group["num_parts"]) for t in tensors), strict=True):
                part = nn.Parameter(weight)
                part.grad = gradient
                parts.append(part)
                state[part] = {"momentum_buffer": momentum}
        self._muon.param_groups, self._muon.state = [{**group, "params": parts}], state  # type: ignore[assignment]
        self._muon.step()


def block_parameter_groups(module: nn.Module, decayed: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for [`MuonAdamW`]: the matrices of a Raptor's blocks by their number of parts, and the rest.

    Args:
        module: a Raptor, or anything that holds one; parameters without gradient are left out.
        decayed: names of the parameters that `weight_decay` acts on.
        weight_decay: of the decayed ones.
    """
    names, groups = set(decayed), dict[tuple[int, float], list[nn.Parameter]]()
    gated = {name for name, part in module.named_modules() if getattr(part, "is_gated", False)}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            key = (_num_parts(name, gated), weight_decay if name in names else 0.0)
            groups.setdefault(key, []).append(parameter)
    return [
        {"params": members, "num_parts": num_parts, "weight_decay": decay}
        for (num_parts, decay), members in groups.items()
    ]


def _num_parts(name: str, gated: set[str]) -> int:
    """Projections that are stacked in a parameter; 0 if it is no matrix of a block."""
    if not _MATRIX.search(name):
        return 0
    owner, projection, _ = name.rsplit(".", 2)
    if projection == "qkv":
        return 3
    return 2 if projection == "fc1" and owner in gated else 1


def _check_parts(members: Iterable[torch.Tensor], num_parts: int) -> None:
    for parameter in members:
        if len(parameter) % num_parts:
            raise ValueError(
                f"a matrix of {len(parameter)} rows cannot be cut into num_parts={num_parts} equal blocks of rows."
            )
