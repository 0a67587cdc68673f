"""Properties of a graph's operators: which are views, which write in place and into whose memory, and which custom
functions are elementwise. The last is tested by running them, because no function declares it."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..torchkit.schemas import argument_names, schema_of, schema_or_none
from .batch_statistics import synchronized_batch_norm
from .spatial.norm import instance_norm

aten = torch.ops.aten

STATISTICS = (aten.batch_norm.default, aten.instance_norm.default, synchronized_batch_norm, instance_norm)
"""Operators that write running statistics, which their schemas do not show."""


def mutates(node: Node) -> bool:
    """Whether an operator writes into one of its arguments."""
    schema = schema_or_none(node.target)
    if node.target in STATISTICS:
        return True
    return bool(schema is not None and schema.is_mutable)


def is_view(node: Node) -> bool:
    """Whether an operator's result may share memory with its argument."""
    if node.target is operator.getitem:
        return True
    schema = schema_or_none(node.target)
    if schema is None:
        return False
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    sometimes = (aten.reshape.default, aten.contiguous.default, aten.to.dtype, aten.to.device, aten.flatten.using_ints)
    return aliased or node.target in sometimes


def is_random(node: Node) -> bool:
    """Whether an operator draws random numbers. Attention and recurrent layers do only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = {**dict(zip(argument_names(node.target), node.args, strict=False)), **node.kwargs}
    rates = [a.name for a in schema_of(node.target).arguments if a.name in ("dropout", "dropout_p")]
    return not rates or any(given.get(name, 0.0) != 0.0 for name in rates)


def memory_writes(nodes: Iterable[Node]) -> list[tuple[Node, Node]]:
    """(operator, the node whose memory it writes into), for every write."""
    pairs = []
    for node in nodes:
        if node.op == "call_function" and mutates(node):
            pairs += [(node, _root(target)) for target in _targets(node)]
    return pairs


def mutated_values(graph: Graph) -> set[Node]:
    """The values whose memory is written through another name."""
    values: set[Node] = set()
    for node in graph.nodes:
        writes = node.op == "call_function" and mutates(node) and node.target not in STATISTICS
        if writes and node.args and isinstance(node.args[0], Node):
            base = node.args[0]
            if base.op == "placeholder":
                continue
            while base.op == "call_function" and is_view(base) and isinstance(base.args[0], Node):
                values.add(base)
                base = base.args[0]
            values.add(base)
            values.add(node)
    return values


def _targets(node: Node) -> list[Node]:
    """The arguments that an operator writes to."""
    if node.target in STATISTICS:
        return [a for a in node.args[3:5] if isinstance(a, Node)]  # running statistics
    arguments = dict(zip(argument_names(node.target), node.args, strict=False))
    arguments.update(node.kwargs)
    written = [a.name for a in schema_of(node.target).arguments if a.is_write]
    return [arguments[name] for name in written if isinstance(arguments.get(name), Node)]  # type: ignore[misc]


def _root(node: Node) -> Node:
    while node.op == "call_function" and (is_view(node) or mutates(node)):
        sources = _targets(node) if mutates(node) else [a for a in node.args if isinstance(a, Node)]
        if not sources:
            break
        node = sources[0]
    return node


SIDE = 6
"""Size of each dim in the test."""


def is_elementwise(node: Node) -> bool:
    """Whether parts of the inputs give the same parts of the output and of the gradients, along every dim."""
    target: Any = node.target
    if not isinstance(getattr(target, "__self__", None), type(torch.autograd.Function)) or node.kwargs:
        return False
    out = node.meta["val"]
    inputs = [a.meta["val"] for a in node.args if isinstance(a, Node)]
    if not isinstance(out, torch.Tensor) or not all(_like(v, out) for v in inputs):
        return False
    cached = node.meta.setdefault("is_elementwise", [])
    if not cached:
        cached.append(_parts_agree(node, out.dim()))
    return bool(cached[0])


def _like(v: Any, out: torch.Tensor) -> bool:
    return isinstance(v, torch.Tensor) and v.shape == out.shape and v.is_floating_point() and out.is_floating_point()


def _parts_agree(node: Node, dims: int) -> bool:
    generator = torch.Generator().manual_seed(5)
    shape = [SIDE] * dims

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    try:
        inputs = [draw() if isinstance(a, Node) else a for a in node.args]
        weight = draw()
        whole = _run(node, inputs, weight)
        for dim in range(dims):
            for start, n in ((0, 2), (2, SIDE - 2)):
                cut = [a.narrow(dim, start, n) if isinstance(a, torch.Tensor) else a for a in inputs]
                part = _run(node, cut, weight.narrow(dim, start, n))
                if not all(
                    torch.allclose(p, w.narrow(dim, start, n), 1e-12, 1e-14) for p, w in zip(part, whole, strict=True)
                ):
                    return False
    except Exception:  # it needs another shape or type, so it is not split
        return False
    return dims > 0


def _run(node: Node, inputs: list[Any], weight: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the inputs."""
    leaves = [a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in inputs]
    with torch.enable_grad():
        out = node.target(*leaves)  # type: ignore[operator]  # it was called when it was captured
        (out * weight).sum().backward()
    results = [out.detach()]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            results.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    return results
