"""Pipeline schedules, each written once: which rank runs which stage on which micro-batch, in which order."""

from .basic import gpipe, interleaved, naive, one_f_one_b
from .check import PipelineProof, prove_pipeline
from .order import Action, Kind, Pipeline, Skips, check_skips
from .table import ORDERS, PipelineOrder, check_order, pipeline_order
from .zero_bubble import zero_bubble_h1, zero_bubble_v

__all__ = [
    "ORDERS",
    "Action",
    "Kind",
    "Pipeline",
    "PipelineOrder",
    "PipelineProof",
    "Skips",
    "check_order",
    "check_skips",
    "gpipe",
    "interleaved",
    "naive",
    "one_f_one_b",
    "pipeline_order",
    "prove_pipeline",
    "zero_bubble_h1",
    "zero_bubble_v",
]
