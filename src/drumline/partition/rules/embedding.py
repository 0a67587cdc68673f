"""Tables: split by rows (a rank looks up what it has, the results are added up), by columns, or by what is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..layout import Split
from ..spread import Pass, rule
from ..values import Value
from .pointwise import align

aten = torch.ops.aten


def own_rows(weight: torch.Tensor, ids: torch.Tensor, start: int, padding: int, by_frequency: bool) -> torch.Tensor:
    """Rows start .. of a table: zeros where another rank has the row."""
    here = (ids >= start) & (ids < start + weight.shape[0])
    local = torch.where(here, ids - start, 0)
    inside = padding - start if start <= padding < start + weight.shape[0] else -1
    rows = aten.embedding.default(weight, local, inside, by_frequency)
    return torch.where(here.unsqueeze(-1), rows, 0)


@rule(aten.embedding.default)
def embedding(
    at: Pass, node: Node, w: Value, ids: Value, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    """One row for each id."""
    if sparse:
        return NotImplemented
    if w.layout is None:
        made = at.call(node.target, at.enter(w), ids, padding, by_frequency)
        return at.value(made, ids.layout)
    ids = at.whole(ids)
    if w.layout.dim == 1:
        made = at.call(node.target, w, ids, padding, by_frequency)
        return at.value(made, w.split.at(ids.dim))
    if len(w.split.cuts) > 1:
        return NotImplemented
    made = at.call(own_rows, w, ids, w.split.bounds[at.axis.index], padding, by_frequency)
    return at.settle(made, node.meta["val"].shape)


@rule(aten.gather.default)
def gather(at: Pass, node: Node, x: Value, dim: int, ids: Value, **_: Any) -> Any:
    """Along a dim that is not split, the others cut alike."""
    dim = dim + x.dim if dim < 0 else dim
    split = x.layout or ids.layout
    assert split is not None
    if split.dim == dim or x.whole[split.dim] != ids.whole[split.dim]:
        return NotImplemented
    return at.value(at.call(node.target, at.split(x, split), dim, at.split(ids, split)), split)


@rule(aten.scatter.src, aten.scatter_add.default)
def scatter(at: Pass, node: Node, x: Value, dim: int, ids: Value, source: Value) -> Any:
    """As `gather`: along a dim that is not split, the others cut alike."""
    split = next(v for v in (x, ids, source) if v.layout is not None).split
    if split.dim == dim % x.dim or len({v.whole[split.dim] for v in (x, ids, source)}) > 1:
        return NotImplemented
    return at.value(at.call(node.target, at.split(x, split), dim, at.split(ids, split), at.split(source, split)), split)


@rule(aten.one_hot.default)
def one_hot(at: Pass, node: Node, ids: Value, classes: int = -1) -> Any:
    """A new dim behind the others."""
    return at.value(at.call(node.target, ids, classes), ids.layout)


@rule(aten.index.Tensor)
def index(at: Pass, node: Node, x: Value, ids: Sequence[Value | None]) -> Any:
    """x[:, i, j]: split along a dim that is not asked, or by what is asked of a whole tensor."""
    asked = [d for d, v in enumerate(ids) if v is not None]
    given = [v for v in ids if v is not None]
    wide = max(v.dim for v in given)
    together = asked[-1] - asked[0] == len(asked) - 1
    front = asked[0] if together else 0  # where the dims of what is asked stand in the result
    if x.layout is not None:
        if x.split.dim in asked:
            return NotImplemented
        dim = x.split.dim - sum(d < x.split.dim for d in asked)
        made = at.call(node.target, x, [None if v is None else at.whole(v) for v in ids])
        return at.value(made, x.split.at(dim + (wide if dim >= front else 0)))
    split = next(v for v in given if v.layout is not None).split
    shape = torch.broadcast_shapes(*(v.whole for v in given))
    first = next(v for v in given if v.layout is not None)
    want = split.at(split.dim + wide - first.dim)
    placed = [None if v is None else align(at, v, want, shape) for v in ids]
    return at.value(at.call(node.target, at.enter(x), placed), want.at(want.dim + front))


@rule(aten.index_select.default)
def index_select(at: Pass, node: Node, x: Value, dim: int, ids: Value) -> Any:
    """Rows of a dim that is not split."""
    dim = dim + x.dim if dim < 0 else dim
    if x.layout is None:
        return at.value(at.call(node.target, at.enter(x), dim, ids), Split(dim, ids.split.cuts))
    if x.split.dim == dim:
        return NotImplemented
    return at.value(at.call(node.target, x, dim, at.whole(ids)), x.layout)
