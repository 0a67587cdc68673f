"""Carries tentative splits through a part of a graph: do they arrive at a product without anything being gathered?"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

from . import moves
from .capture import Captured
from .layout import Split
from .moves import Axis
from .spread import Pass
from .values import Value
from .weights import Weighing, is_parameter, is_turned
from .window import rebalance, window, windows

ON_THE_WAY = (moves.gather, moves.gather_to_enter, window, windows, rebalance)
"""Moves of what the columns give: with them a group is not worth it."""


class Trial:
    """One walk from weights that are split to the product that sums over the split features."""

    def __init__(self, captured: Captured, axis: Axis, seeds: dict[str, Split]) -> None:
        self._pass = Pass(captured.graph, axis, captured.mode, seeds)
        self.taken: dict[str, Split] = {}
        """Parameters on the way that must be cut as well: a norm's weight between two convolutions."""

    def to(self, between: Iterable[Node], row: Weighing) -> Split | None:
        """The split of the row's input, if nothing on the way asks for a whole tensor."""
        for node in between:
            self._bring(node)
            made = self._made(node)
            first = _first(made)
            if self._pass.gathered or (first is not None and first.layout is None):
                return None
            self._pass.values[node] = made
        arrived = self._pass.values.get(row.input)
        self.taken = {str(n.target): split for n, split in self._pass.cut() if is_parameter(n)}
        if not isinstance(arrived, Value) or arrived.layout is None or arrived.layout.dim != row.along:
            return None
        # what had to move on the way is no partner's, and neither is what leaves a rank with less than another
        moved = any(n.target in ON_THE_WAY for n in self._pass.new.nodes)
        uneven = len({arrived.split.length(r) for r in range(self._pass.axis.size)}) > 1
        return None if moved or uneven else arrived.split

    def _made(self, node: Node) -> object:
        self._pass.current = node
        return self._pass.made(node)

    def _bring(self, node: Node) -> None:
        """The arguments that come from outside are whole."""
        values = self._pass.values
        for a in node.all_input_nodes:
            if a in values:
                continue
            if a.op == "placeholder":
                values[a] = self._made(a)
            elif is_turned(a):  # a weight as its product takes it
                self._bring(a)
                values[a] = self._made(a)
            else:
                values[a] = _outside(self._pass, a)


def _outside(at: Pass, node: Node) -> object:
    val = node.meta.get("val")
    new = at.new.placeholder(f"outside_{node.name}")
    new.meta["val"] = val.detach() if isinstance(val, torch.Tensor) else val
    if isinstance(val, torch.Tensor):
        return Value(new, None, val.shape)
    if isinstance(val, list | tuple):
        return [Value(at.call(operator.getitem, new, i), None, v.shape) for i, v in enumerate(val)]
    return new


def _first(made: object) -> Value | None:
    if isinstance(made, Value):
        return made
    if isinstance(made, list | tuple) and made and isinstance(made[0], Value):
        return made[0]
    return None
