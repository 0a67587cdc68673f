"""Pipeline schedules, each written once: which rank runs which stage on which micro-batch, in which order."""

from .asynchronous import (
    ASYNCHRONOUS,
    PIPEDREAM,
    AsynchronousLane,
    batches_in_flight,
    expected_staleness,
    joins_updates,
    pipedream,
    pipedream_2bw,
    update_delay,
)
from .basic import gpipe, interleaved, naive, one_f_one_b
from .check import PipelineProof, prove_pipeline
from .order import Action, Kind, Pipeline, Skips, check_skips
from .table import ORDERS, PipelineOrder, check_order, pipeline_order
from .update_check import UpdateProof, prove_updates
from .zero_bubble import zero_bubble_h1, zero_bubble_h2, zero_bubble_v

__all__ = [
    "ASYNCHRONOUS",
    "ORDERS",
    "PIPEDREAM",
    "Action",
    "AsynchronousLane",
    "Kind",
    "Pipeline",
    "PipelineOrder",
    "PipelineProof",
    "Skips",
    "UpdateProof",
    "batches_in_flight",
    "check_order",
    "check_skips",
    "expected_staleness",
    "gpipe",
    "interleaved",
    "joins_updates",
    "naive",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "pipeline_order",
    "prove_pipeline",
    "prove_updates",
    "update_delay",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zero_bubble_v",
]
