"""Interventions on a trained model: layers replaced, token groups pushed off their path, phases of another length.

If a phase is one recurrent block, its layers are interchangeable: replaced by another layer of their phase (intra) they
leave the final state and the accuracy as they were, replaced by one of another phase (inter) they do not (arXiv
2512.19941, Fig. 15). And if the dynamics are attracting, a perturbation of a token group fades (Fig. 10).

Everything runs on a [`~raptor_hf.Teacher`] or a [`~raptor_hf.RaptorModel`], whose weights stay untouched: states are
taken through the layers one by one, in any order. A layer of a Raptor is its block at that layer's depth, so a swap
inside a phase changes the depth scale (and the adapters) alone, and nothing in a model without. Layers, states, shapes
and token groups are those of `raptor_hf.tokens`; states are **before** the final LayerNorm.
"""

from .exponents import LyapunovExponents, lyapunov_exponents
from .iterations import OFFSETS, IterationStudy, LengthEffect, PhaseIteration, measure_phase_lengths
from .perturbations import EPS_SCALES, Sensitivity, perturb, sensitivity_curve
from .runs import Batch, Head, Model, base_states, run_layers
from .swaps import SCOPES, Swap, SwapEffect, SwapStudy, count_swaps, layer_swaps, measure_swaps, swapped_states

__all__ = [
    "EPS_SCALES",
    "OFFSETS",
    "SCOPES",
    "Batch",
    "Head",
    "IterationStudy",
    "LengthEffect",
    "LyapunovExponents",
    "Model",
    "PhaseIteration",
    "Sensitivity",
    "Swap",
    "SwapEffect",
    "SwapStudy",
    "base_states",
    "count_swaps",
    "layer_swaps",
    "lyapunov_exponents",
    "measure_phase_lengths",
    "measure_swaps",
    "perturb",
    "run_layers",
    "sensitivity_curve",
    "swapped_states",
]
