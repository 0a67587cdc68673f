"""Recomputation in a captured graph: a layer's operators become one node, which keeps its inputs and runs again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from ..torchkit.dispatch_modes import reenter_function_modes, set_grad_enabled
from .program import GraphProgram


class RecomputedRegion:
    """Runs a part of a graph, and again at the start of its backward. Buffers change once."""

    def __init__(self, name: str, program: GraphProgram, buffers: Sequence[int]) -> None:
        self.__name__ = f"recompute_{name}"
        self.program, self._buffers = program, buffers

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.program(*inputs)
        buffers = {i: inputs[i] for i in self._buffers}

        def run(*others: torch.Tensor) -> Any:
            remaining = iter(others)
            return self.program(*(buffers[i] if i in buffers else next(remaining) for i in range(len(inputs))))

        # not as inputs: inputs must not change, and a buffer may change before this micro-batch's backward
        others = [x for i, x in enumerate(inputs) if i not in buffers]
        contexts = functools.partial(_contexts, list(buffers.values()))
        return checkpoint(run, *others, use_reentrant=False, context_fn=contexts)


def _contexts(buffers: Sequence[torch.Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    initial: list[torch.Tensor] = []
    return _first_forward(buffers, initial), reenter_function_modes(
        functools.partial(_second_forward, buffers, initial)
    )


@contextmanager
def _first_forward(buffers: Sequence[torch.Tensor], initial: list[torch.Tensor]) -> Iterator[None]:
    initial += [b.clone() for b in buffers]
    yield


@contextmanager
def _second_forward(buffers: Sequence[torch.Tensor], initial: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give the second forward the buffers that the first one started from, and restore them afterwards."""
    now = [b.clone() for b in buffers]
    for b, old in zip(buffers, initial, strict=True):
        b.copy_(old)
    try:
        yield
    finally:
        for b, value in zip(buffers, now, strict=True):
            b.copy_(value)


def recompute_layers(graph: Graph, layers: Collection[str], constants: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with every call of these modules as one recomputed node."""
    runs = _runs(graph, layers)
    new = Graph()
    made: dict[Node, Node] = {}
    inside = {node: run for run in runs for node in run}
    for node in graph.nodes:
        run = inside.get(node)
        if run is None:
            made[node] = new.node_copy(node, lambda n: made[n])
            made[node].meta.update(node.meta)
        elif node is run[-1]:
            _join(new, run, made, constants)
    return new


def _runs(graph: Graph, layers: Collection[str]) -> list[list[Node]]:
    """Runs of consecutive operators of one layer that can run twice."""
    runs: list[list[Node]] = []
    current, last = "", None
    for node in graph.nodes:
        if node.op == "get_attr":
            continue
        stack = node.meta.get("nn_module_stack", ()) if node.op == "call_function" else ()
        layer = next((name for name in stack if name in layers), "")
        if layer and layer == current and last is not None:
            runs[-1].append(node)
        elif layer:
            runs.append([node])
        current, last = layer, node
    return [run for run in runs if len(run) > 1 and _balanced(run)]


def _balanced(run: Sequence[Node]) -> bool:
    """Whether switches of the gradient mode come in pairs."""
    switches = [n.args[0] for n in run if n.target is set_grad_enabled]
    return not switches or bool(switches[-1])


def _join(new: Graph, run: Sequence[Node], made: dict[Node, Node], constants: Mapping[str, torch.Tensor]) -> None:
    """Replace a run by one node."""
    members = set(run)
    inputs = list(dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in members and a.op != "get_attr"))
    outputs = [n for n in run if any(u not in members for u in n.users)]
    part = Graph()
    local: dict[Node, Node] = {}
    for node in inputs:
        local[node] = part.placeholder(node.name)
        local[node].meta.update({k: v for k, v in node.meta.items() if k != "shows"})

    def local_node(node: Node) -> Node:
        if node not in local:  # a constant
            local[node] = part.get_attr(str(node.target))
            local[node].meta.update(node.meta)
        return local[node]

    for node in run:
        local[node] = part.node_copy(node, local_node)
        local[node].meta.update(node.meta)
    part.output(tuple(local[n] for n in outputs))
    buffers = [i for i, n in enumerate(inputs) if n.op == "placeholder" and n.meta.get("role") == "buffer"]
    used = {str(n.target): constants[str(n.target)] for n in part.nodes if n.op == "get_attr"}
    name = str(run[0].meta.get("module", "")).replace(".", "_")
    joined = new.call_function(
        RecomputedRegion(name, GraphProgram(part, used), buffers), tuple(made[n] for n in inputs)
    )
    joined.meta.update({k: v for k, v in run[0].meta.items() if k != "shows"})
    joined.meta["val"] = tuple(n.meta["val"] for n in outputs)
    for i, node in enumerate(outputs):
        made[node] = new.call_function(operator.getitem, (joined, i))
        made[node].meta.update({k: v for k, v in node.meta.items() if k != "shows"})
