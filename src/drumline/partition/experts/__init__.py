"""Mixtures of experts: a layer to write one with, and expert parallelism for it and for those of transformers."""

from ...tracing.expert_list import Experts
from ...tracing.expert_modules import expert_count, expert_modules
from .shard import AbsentParameter, ExpertRows, ShardedExperts, shard_experts

__all__ = [
    "AbsentParameter",
    "ExpertRows",
    "Experts",
    "ShardedExperts",
    "expert_count",
    "expert_modules",
    "shard_experts",
]
