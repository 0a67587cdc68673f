"""Parameters that every rank of an axis keeps whole while the work is split: their gradients there are partial sums.

Instead of one message per use and backward, all uses produce partial sums, and the reduction over the data-parallel
ranks adds them up too. A parameter used in work that all ranks repeat has its whole gradient on each rank; with tensor
parallelism there may be large ones, which are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .sharding import redistribution


def divide_gradient(x: torch.Tensor, n: int) -> torch.Tensor:
    """The same value; its gradient, which n ranks compute in full, becomes a partial sum on each."""
    return _DivideGradient.apply(x, n)  # type: ignore[no-any-return,no-untyped-call]  # torch's own


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
        ctx.n = n
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient / ctx.n, None


def parameters_in_split_work(graph: Graph, axis: redistribution.Axis) -> frozenset[str]:
    """Names of the trained parameters that are whole along the axis and used in work that is split along it."""
    return frozenset(str(n.meta["name"]) for n in _trained(graph) if any(_enters_split_work(u, axis) for u in n.users))


def leave_partial_gradients(graph: Graph, axis: redistribution.Axis, names: frozenset[str] | None = None) -> None:
    """In place: give trained parameters that are whole along the axis partial gradients; all, or those named."""
    for node in _trained(graph):
        if axis.name in node.meta.get("splits", {}) or (names is not None and node.meta["name"] not in names):
            continue
        split_uses = [u for u in node.users if _enters_split_work(u, axis)]
        direct = [u for u in node.users if u not in split_uses]
        for user in split_uses:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        if not direct:
            continue
        with graph.inserting_after(_last_placeholder(graph)):
            shared = graph.call_function(divide_gradient, (node, axis.size))
            shared.meta.update(val=node.meta["val"], module="")
        for user in direct:
            user.replace_input_with(node, shared)


def _trained(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "placeholder" and n.meta.get("trained")]


def _enters_split_work(node: Node, axis: redistribution.Axis) -> bool:
    target_axis: object = node.args[1] if node.target is redistribution.enter_split_work else None
    return target_axis is axis


def _last_placeholder(graph: Graph) -> Node:
    placeholders: list[Node] = [n for n in graph.nodes if n.op == "placeholder"]
    return placeholders[-1]
