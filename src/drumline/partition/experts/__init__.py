"""Mixtures of experts: a layer to write one with, and expert parallelism for it and for those of transformers."""

from .layer import Experts
from .shard import Away, Rows, Sharded, expert_count, expert_modules, shard_experts

__all__ = ["Away", "Experts", "Rows", "Sharded", "expert_count", "expert_modules", "shard_experts"]
