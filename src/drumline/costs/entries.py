"""What a GPU's host does to tell it of a layer, counted in operators: Python's functions and views are parts of one."""

from __future__ import annotations

from ..models.profile import Layer, Op

CAST = "_to_copy"
"""The operator that autocast adds."""
VIEW, FUNCTION, ATTENTION = 0.2, 0.075, 4.0
"""What a view and a Python function take of what an operator takes, and attention beyond another operator: by sixteen
models of four libraries on a host whose GPU had next to nothing to do (benchmarks/gpu_entries.py, docs/gpu.md)."""
UNSEEN = 2.0
"""What is around an operator of a layer whose views and functions were not counted, and the operator itself."""


def entries(layer: Layer) -> float:
    """How many operators' time the host takes for a layer's forward, casts aside."""
    ops = [op for op in layer.ops if op.phase == "forward" and op.name != CAST]
    plain = float(sum(op.count for op in ops))
    if not layer.entered:
        return UNSEEN * plain
    return plain + ATTENTION * _attentions(ops) + VIEW * layer.views + FUNCTION * layer.entered


def _attentions(ops: list[Op]) -> int:
    return sum(op.count for op in ops if op.kind == "attention")
