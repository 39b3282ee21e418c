"""Whole experiments of the paper on a model and images: plain records for `results.json` and the report."""

from .complexity import study_complexity
from .flow import compare_flows, study_dynamics
from .paradigms import PARADIGMS, distil_paradigms
from .partitions import boundary_stability, distil_partitions, partition_schemes, partition_scores
from .recurrence import measure_span_maps, study_recurrence
from .swaps import study_swaps

__all__ = [
    "PARADIGMS",
    "boundary_stability",
    "compare_flows",
    "distil_paradigms",
    "distil_partitions",
    "measure_span_maps",
    "partition_schemes",
    "partition_scores",
    "study_complexity",
    "study_dynamics",
    "study_recurrence",
    "study_swaps",
]
