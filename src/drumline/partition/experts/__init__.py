"""Mixtures of experts: a layer to write one with, and expert parallelism for it and for those of transformers."""

from .layer import Experts
from .shard import AbsentParameter, ExpertRows, ShardedExperts, expert_count, expert_modules, shard_experts

__all__ = [
    "AbsentParameter",
    "ExpertRows",
    "Experts",
    "ShardedExperts",
    "expert_count",
    "expert_modules",
    "shard_experts",
]
