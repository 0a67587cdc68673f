"""Whose memory the operators of a graph write into: views are followed to what they are views of."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from .tidy import STATISTICS, changes_something, is_view


def writes(nodes: Iterable[Node]) -> list[tuple[Node, Node]]:
    """(operator, whose memory it writes into)."""
    found = []
    for node in nodes:
        if node.op == "call_function" and changes_something(node):
            found += [(node, _root(target)) for target in _targets(node)]
    return found


def mutated(graph: Graph) -> set[Node]:
    """The values whose memory an operator writes to under another name."""
    found: set[Node] = set()
    for node in graph.nodes:
        does = node.op == "call_function" and changes_something(node) and node.target not in STATISTICS
        if does and node.args and isinstance(node.args[0], Node):
            base = node.args[0]
            if base.op == "placeholder":
                continue
            while base.op == "call_function" and is_view(base) and isinstance(base.args[0], Node):
                found.add(base)
                base = base.args[0]
            found.add(base)
            found.add(node)
    return found


def _targets(node: Node) -> list[Node]:
    """The arguments that an operator writes into."""
    if node.target in STATISTICS:
        return [a for a in node.args[3:5] if isinstance(a, Node)]  # its running statistics
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
    given.update(node.kwargs)
    written = [a.name for a in node.target._schema.arguments if a.is_write]  # type: ignore[union-attr]
    return [given[name] for name in written if isinstance(given.get(name), Node)]  # type: ignore[misc]


def _root(node: Node) -> Node:
    while node.op == "call_function" and (is_view(node) or changes_something(node)):
        sources = _targets(node) if changes_something(node) else [a for a in node.args if isinstance(a, Node)]
        if not sources:
            break
        node = sources[0]
    return node
