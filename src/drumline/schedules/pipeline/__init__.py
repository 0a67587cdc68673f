"""Pipeline orders, each written once: which rank runs which stage on which micro-batch, in which order."""

from .check import PipelineProof, prove_pipeline
from .h1 import zero_bubble_h1
from .interleaved import interleaved
from .order import Action, Kind, Pipeline, Skips, check_skips
from .plain import gpipe, naive, one_f_one_b
from .table import ORDERS, Order, check_order, pipeline_order
from .vshape import zero_bubble_v

__all__ = [
    "ORDERS",
    "Action",
    "Kind",
    "Order",
    "Pipeline",
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
