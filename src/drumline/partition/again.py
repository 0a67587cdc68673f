"""Recomputation in a captured graph: a layer's operators become one, which keeps its inputs and runs again."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from ..tracing.repeated import repeated
from .program import Program


class Again:
    """Runs a part of a graph, and once more when its backward begins. Buffers move once."""

    def __init__(self, name: str, program: Program, buffers: Sequence[int]) -> None:
        self.__name__ = f"again_{name}"
        self.program, self._buffers = program, buffers

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.program(*inputs)
        buffers = {i: inputs[i] for i in self._buffers}

        def run(*others: torch.Tensor) -> Any:
            left = iter(others)
            return self.program(*(buffers[i] if i in buffers else next(left) for i in range(len(inputs))))

        # not as inputs: those must stay as they were, and a buffer may move before this micro-batch's backward
        others = [x for i, x in enumerate(inputs) if i not in buffers]
        contexts = functools.partial(_contexts, list(buffers.values()))
        return checkpoint(run, *others, use_reentrant=False, context_fn=contexts)


def _contexts(buffers: Sequence[torch.Tensor]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    began: list[torch.Tensor] = []
    return _first(buffers, began), repeated(functools.partial(_once_more, buffers, began))


@contextmanager
def _first(buffers: Sequence[torch.Tensor], began: list[torch.Tensor]) -> Iterator[None]:
    began += [b.clone() for b in buffers]
    yield


@contextmanager
def _once_more(buffers: Sequence[torch.Tensor], began: Sequence[torch.Tensor]) -> Iterator[None]:
    """The second forward starts from what the first started from, and leaves what the first left."""
    now = [b.clone() for b in buffers]
    for b, old in zip(buffers, began, strict=True):
        b.copy_(old)
    try:
        yield
    finally:
        for b, value in zip(buffers, now, strict=True):
            b.copy_(value)


def recomputed(graph: Graph, layers: Collection[str], constants: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with the operators of every call of these modules as one."""
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
    """Operators one behind the other that belong to one layer; only such as can be run twice."""
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
    switches = [n.args[0] for n in run if n.target is torch._C._set_grad_enabled]
    return not switches or bool(switches[-1])


def _join(new: Graph, run: Sequence[Node], made: dict[Node, Node], constants: Mapping[str, torch.Tensor]) -> None:
    """Put one node in the place of a run."""
    members = set(run)
    inputs = list(dict.fromkeys(a for n in run for a in n.all_input_nodes if a not in members and a.op != "get_attr"))
    outputs = [n for n in run if any(u not in members for u in n.users)]
    part = Graph()
    local: dict[Node, Node] = {}
    for node in inputs:
        local[node] = part.placeholder(node.name)
        local[node].meta.update({k: v for k, v in node.meta.items() if k != "shows"})

    def own(node: Node) -> Node:
        if node not in local:  # a constant
            local[node] = part.get_attr(str(node.target))
            local[node].meta.update(node.meta)
        return local[node]

    for node in run:
        local[node] = part.node_copy(node, own)
        local[node].meta.update(node.meta)
    part.output(tuple(local[n] for n in outputs))
    buffers = [i for i, n in enumerate(inputs) if n.op == "placeholder" and n.meta.get("role") == "buffer"]
    used = {str(n.target): constants[str(n.target)] for n in part.nodes if n.op == "get_attr"}
    name = str(run[0].meta.get("module", "")).replace(".", "_")
    joined = new.call_function(Again(name, Program(part, used), buffers), tuple(made[n] for n in inputs))
    joined.meta.update({k: v for k, v in run[0].meta.items() if k != "shows"})
    joined.meta["val"] = tuple(n.meta["val"] for n in outputs)
    for i, node in enumerate(outputs):
        made[node] = new.call_function(operator.getitem, (joined, i))
        made[node].meta.update({k: v for k, v in node.meta.items() if k != "shows"})
