"""Moves of an axis that was spread before: along other dims they are like any operator that works number by number."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import moves
from ..layout import Split
from ..moves import Axis
from ..random import forked_dropout
from ..ring import ring_attention
from ..shared_gradients import share
from ..spread import Pass, rule
from ..values import Value


@rule(moves.enter, moves.reduce, share, forked_dropout)
def same(at: Pass, node: Node, x: Value, *args: Any) -> Any:
    """Number by number."""
    return at.value(at.call(node.target, x, *args), x.layout)


@rule(moves.gather, moves.gather_to_enter, moves.take, moves.scatter)
def along(at: Pass, node: Node, x: Value, split: Split, axis: Axis) -> Any:
    """Along a dim that this axis does not split."""
    if x.split.dim == split.dim:
        return NotImplemented
    return at.value(at.call(node.target, x, split, axis), x.layout)


@rule(ring_attention)
def ring(at: Pass, node: Node, q: Value, k: Value, v: Value, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
    """Heads or samples, each rank its own."""
    dim = next(x.layout for x in (q, k, v) if x.layout is not None).dim
    if dim >= q.dim - 2 or q.whole[dim] != k.whole[dim]:
        return NotImplemented
    split = next(x.layout for x in (q, k, v) if x.layout is not None)
    q, k, v = (at.split(x, split) for x in (q, k, v))
    if isinstance(mask, Value):
        place = dim - (q.dim - mask.dim)
        wide = place >= 0 and mask.whole[place] > 1
        mask = at.split(mask, split.at(place)) if wide else at.whole(mask, enter=True)
    return at.value(at.call(node.target, q, k, v, *args, mask=mask, **kwargs), split)
