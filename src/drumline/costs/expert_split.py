"""Expert parallelism: one rank's experts, and the rows that it exchanges with the ranks of the others."""

from __future__ import annotations

from dataclasses import replace

from ..models.profile import Layer, ProfiledOp
from .rank_model import LayerActivationMemory, LayerMessage, LayerMessages, RankModel, map_layers, not_split, scaled

IMBALANCE = 1.1
"""Rows of the busiest rank of a group over their mean: an assumption, for a router that is kept balanced."""
GROUPED = ("grouped_mm", "_grouped_mm")
"""Operators that multiply by the matrices of all experts at once."""


def split_experts(rank: RankModel, n: int) -> RankModel:
    """The part of the busiest of n ranks that share one set of experts.

    A rank has 1/n of the experts and gets the rows of n ranks for them, so its work stays the same but for imbalance.
    A token goes to each rank that has any of its experts once.
    """
    if n == 1:
        return rank
    if not any(x.experts for x in rank.profile.layers):
        return not_split(rank, f"ep={n}", "experts")

    def change(layer: Layer, memory: LayerActivationMemory) -> tuple[Layer, LayerActivationMemory, LayerMessages]:
        experts = layer.experts
        if experts is None:
            return layer, memory, ()
        gone = experts.parameters - experts.parameters // n
        local = replace(experts, count=-(-experts.count // n), parameters=experts.parameters - gone)
        ops = tuple(_local(op, n) for op in layer.ops)
        largest = min(layer.largest, max(layer.largest // n, (layer.parameters - experts.parameters) or 1))
        rows = scaled(layer.output, IMBALANCE * min(experts.active, n))
        there_and_back = tuple(
            LayerMessage("ep", phase, "all_to_all", rows) for phase in ("forward", "backward") for _ in range(2)
        )
        part = replace(
            layer,
            parameters=layer.parameters - gone,
            largest=largest,
            cast=layer.cast * (1 - gone / max(1, layer.parameters)),
            ops=ops,
            experts=local,
        )
        return part, memory, there_and_back

    note = f"ep: the busiest rank gets {IMBALANCE:g} times the mean of the rows"
    split = map_layers(rank, change)
    return replace(split, notes=(*split.notes, note))


def _local(op: ProfiledOp, n: int) -> ProfiledOp:
    """Grouped matmuls read the matrices of this rank alone, and have the rows of the busiest rank."""
    if op.name not in GROUPED:
        return op
    return replace(op, flops=scaled(op.flops, IMBALANCE, 1.0 / n), bytes=scaled(op.bytes, IMBALANCE, 1.0 / n))
