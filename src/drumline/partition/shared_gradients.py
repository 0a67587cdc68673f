"""Parameters that every rank of an axis holds whole while the work is split: their gradients are summands there.

Instead of a message for every use in every backward, all uses are made to give summands, and whoever adds up the
gradients of the data-parallel ranks adds up these along with them. A parameter that is used in work that all ranks do
alike has its whole gradient everywhere: with tensor parallelism there may be large ones, which are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from . import moves


def share(x: torch.Tensor, n: int) -> torch.Tensor:
    """The same value; its gradient, which n ranks have whole, becomes a summand of each."""
    return _Share.apply(x, n)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        ctx.n = n
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / ctx.n, None


def entering(graph: Graph, axis: moves.Axis) -> frozenset[str]:
    """The trained parameters, by name, that are whole along the axis and used in work that is split along it."""
    return frozenset(str(n.meta["name"]) for n in _trained(graph) if any(_enters(u, axis) for u in n.users))


def leave_summands(graph: Graph, axis: moves.Axis, names: frozenset[str] | None = None) -> None:
    """In place: trained parameters that are whole along the axis get gradients that are summands; all, or of these."""
    for node in _trained(graph):
        if axis.name in node.meta.get("splits", {}) or (names is not None and node.meta["name"] not in names):
            continue
        entered = [u for u in node.users if _enters(u, axis)]
        direct = [u for u in node.users if u not in entered]
        for user in entered:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        if not direct:
            continue
        with graph.inserting_after(_last_head(graph)):
            shared = graph.call_function(share, (node, axis.size))
            shared.meta.update(val=node.meta["val"], module="")
        for user in direct:
            user.replace_input_with(node, shared)


def _trained(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "placeholder" and n.meta.get("trained")]


def _enters(node: Node, axis: moves.Axis) -> bool:
    given: object = node.args[1] if node.target is moves.enter else None
    return given is axis


def _last_head(graph: Graph) -> Node:
    heads: list[Node] = [n for n in graph.nodes if n.op == "placeholder"]
    return heads[-1]
