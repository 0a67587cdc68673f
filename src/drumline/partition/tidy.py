"""Makes a captured graph plain: no operators in place where it can be told apart, no nodes that nobody reads."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from .spatial.norm import instance_norm
from .statistics import spanning_batch_norm

aten = torch.ops.aten

KEPT = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
"""Calls that are made for what they change."""
STATISTICS = (aten.batch_norm.default, aten.instance_norm.default, spanning_batch_norm, instance_norm)
"""Operators that write running statistics, which their schemas do not tell."""


def tidy(graph: Graph, outputs: Mapping[Any, tuple[Node | None, ...]]) -> dict[Any, tuple[Node | None, ...]]:
    """Tidy in place; the outputs by call of a module, as they are then."""
    moved: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.lift_fresh_copy.default, aten.lift_fresh.default):
            _become(node, node.args[0], moved)
        elif node.target is aten.detach_.default:
            node.target = aten.detach.default
        elif _in_place(node):
            _out_of_place(graph, node)
    found = {name: tuple(n and _end(n, moved) for n in nodes) for name, nodes in outputs.items()}
    kept = {n for nodes in found.values() for n in nodes}
    for node in reversed(list(graph.nodes)):
        dead = node.op in ("call_function", "get_attr") and not node.users and node not in kept
        if dead and node.target not in KEPT and not changes_something(node):
            graph.erase_node(node)
    return found


def changes_something(node: Node) -> bool:
    """Whether an operator writes into one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    if node.target in STATISTICS:
        return True
    return bool(schema is not None and schema.is_mutable)


def is_view(node: Node) -> bool:
    """Whether an operator's result may share memory with its argument."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    maybe = (aten.reshape.default, aten.contiguous.default, aten.to.dtype, aten.to.device, aten.flatten.using_ints)
    return aliased or node.target in maybe


def _in_place(node: Node) -> bool:
    return changes_something(node) and node.target not in STATISTICS


def _out_of_place(graph: Graph, node: Node) -> None:
    """`y = x.relu_()` becomes `y = x.relu()`, and who reads x later reads y, if no other name of its memory lives."""
    target = node.args[0]
    if not isinstance(target, Node) or target.op == "placeholder" or is_view(target):
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    if any(is_view(user) and _last_use(user, order) > order[node] for user in target.users if user is not node):
        return
    plain = _plain(node.target)
    if plain is None:
        return
    node.target = plain
    for user in list(target.users):
        if order[user] > order[node]:
            user.replace_input_with(target, node)


def _plain(target: Any) -> Any:
    """aten.relu_.default -> aten.relu.default."""
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    overload = target._overloadname
    return getattr(packet, overload, None) if packet is not None and overload in packet.overloads() else None


def _last_use(node: Node, order: Mapping[Node, int]) -> int:
    ends = [_last_use(user, order) if is_view(user) else order[user] for user in node.users]
    return max(ends, default=order[node])


def _become(node: Node, other: Any, moved: dict[Node, Node]) -> None:
    """Who reads `node` reads `other`."""
    node.replace_all_uses_with(other)
    moved[node] = other


def _end(node: Node, moved: Mapping[Node, Node]) -> Node:
    seen = set()
    while node in moved and node not in seen:
        seen.add(node)
        node = moved[node]
    return node
