"""Whole experiments of the paper on a model and images: plain records for `results.json` and the report."""

from .flow import compare_flows, study_dynamics
from .swaps import study_swaps

__all__ = ["compare_flows", "study_dynamics", "study_swaps"]
