"""The dynamics of token states over depth, on hidden states alone: no model is needed (arXiv 2512.19941, Sec. 4).

[`measure_dynamics`] measures a stream of images; the measures themselves are functions of tensors
([`angular_speed`], [`stable_rank`], [`coherence`], ...). Linear pictures are [`principal_components`],
[`dynamic_mode_decomposition`] and [`fit_span_map`]. [`tangent_growth`] takes displacements along maps, [`recurrence`]
looks for rest and cycles. What goes through a model is in `raptor_hf.interventions`.
"""

from .flow import (
    QUANTILES,
    ClassFlow,
    Dynamics,
    DynamicsEstimator,
    GroupDynamics,
    Spread,
    measure_dynamics,
)
from .geometry import (
    angle,
    angular_speed,
    angular_updates,
    coherence,
    directional_convergence,
    effective_rank,
    normalise,
    singular_spectrum,
    spectrum_of_gram,
    stable_rank,
)
from .linear import (
    DynamicModes,
    PrincipalComponents,
    dynamic_mode_decomposition,
    modes_of_moments,
    principal_components,
)
from .recurrence import MAX_PERIOD, Recurrence, recurrence
from .spans import SPAN_METHODS, Agreement, SpanMap, SpanMapEstimator, compare_tokens, fit_span_map
from .tangents import TangentGrowth, tangent_growth

__all__ = [
    "MAX_PERIOD",
    "QUANTILES",
    "SPAN_METHODS",
    "Agreement",
    "ClassFlow",
    "DynamicModes",
    "Dynamics",
    "DynamicsEstimator",
    "GroupDynamics",
    "PrincipalComponents",
    "Recurrence",
    "SpanMap",
    "SpanMapEstimator",
    "Spread",
    "TangentGrowth",
    "angle",
    "angular_speed",
    "angular_updates",
    "coherence",
    "compare_tokens",
    "directional_convergence",
    "dynamic_mode_decomposition",
    "effective_rank",
    "fit_span_map",
    "measure_dynamics",
    "modes_of_moments",
    "normalise",
    "principal_components",
    "recurrence",
    "singular_spectrum",
    "spectrum_of_gram",
    "stable_rank",
    "tangent_growth",
]
