"""Schedules are data: collectives and pipeline orders, written once, for many readers."""

from .check import PipelineProof, Proof, prove, prove_pipeline
from .collectives import (
    ALGORITHMS,
    binomial_broadcast,
    collective_schedule,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from .pipeline import ORDERS, Action, Pipeline, one_f_one_b, pipeline_order
from .spec import Contract, Round, Rounds, Schedule, Send, Traffic, messages

__all__ = [
    "ALGORITHMS",
    "ORDERS",
    "Action",
    "Contract",
    "Pipeline",
    "PipelineProof",
    "Proof",
    "Round",
    "Rounds",
    "Schedule",
    "Send",
    "Traffic",
    "binomial_broadcast",
    "collective_schedule",
    "messages",
    "one_f_one_b",
    "pipeline_order",
    "prove",
    "prove_pipeline",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
]
