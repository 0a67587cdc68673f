"""What the rules of images share: windows along a split dim, and operators on parts that may have no elements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch.fx import Node

from ..layout import Split
from ..moves import Axis
from ..spatial.pieces import averaged, hollow, picked, sampled, scaled
from ..spread import Pass, rule
from ..values import Value
from ..window import Span, rebalance, window, windows


def operator_of(node: Node) -> Any:
    """The operator that a node is, also where it stands for one on an empty part."""
    return node.args[0] if node.target is hollow else node.target


def own(at: Pass, do: Any, shape: Sequence[int], *args: Any) -> Node:
    """The operator on this rank's part, whose result has this shape."""
    tensors = [a.fake if isinstance(a, Value) else a.meta["val"] for a in args if isinstance(a, Value | Node)]
    if all(t.numel() for t in tensors):
        return at.call(do, *args)
    return at.call(hollow, do, list(shape), *args)


def local_shape(at: Pass, node: Node, split: Split) -> list[int]:
    """Of this rank's part of a node's result."""
    shape = list(node.meta["val"].shape)
    shape[split.dim] = split.length(at.axis.index)
    return shape


def alone(at: Pass, node: Node, x: Value, *args: Any) -> Value:
    """A part for itself, of an operator that keeps the split dim as it is."""
    return at.value(own(at, operator_of(node), local_shape(at, node, x.split), x, *args), x.layout)


def with_places(at: Pass, node: Node, x: Value, *args: Any) -> Any:
    """Maxima and their places, of samples or channels: each rank its own."""
    if not x.fake.numel():
        return NotImplemented
    made = at.call(node.target, x, *args)
    wholes = [v.shape for v in node.meta["val"]]
    return [Value(at.call(operator.getitem, made, i), x.layout, whole) for i, whole in enumerate(wholes)]


def reads_places(node: Node) -> bool:
    """Whether anybody reads more than the maxima."""
    return any(user.args[1] != 0 and user.users for user in node.users)


def rows_of(at: Pass, x: Value, wanted: Sequence[Span], fill: float = 0.0, axis: Axis | None = None) -> Node:
    """The rows that each rank wants of a split value."""
    bounds = x.split.bounds
    if tuple(wanted) == tuple(pairwise(bounds)):
        return x.node
    return at.call(window, x, x.split.dim, bounds, tuple(wanted), axis or at.axis, fill)


def scaled_cuts(split: Split, times: int, over: int, dim: int) -> Split | None:
    """Every bound times a fraction, along another dim; None where that cuts something in two."""
    if any(b * times % over for bounds in split.cuts for b in bounds):
        return None
    return Split(dim, tuple(tuple(b * times // over for b in bounds) for bounds in split.cuts))


@rule(hollow)
def of_hollow(at: Pass, node: Node, do: Any, shape: Sequence[int], *args: Any) -> Any:
    """As the operator that it stands for."""
    found: Callable[..., Any] | None = at.rules.get(do)
    return found(at, node, *args) if found else NotImplemented


@rule(window, windows, rebalance, picked, scaled, averaged, sampled)
def along_one_dim(at: Pass, node: Node, x: Value, dim: int, *args: Any) -> Any:
    """What an earlier pass put in along its dim: along the others, number by number."""
    if x.split.dim == dim:
        return NotImplemented
    return at.value(at.call(node.target, x, dim, *args), x.layout)
