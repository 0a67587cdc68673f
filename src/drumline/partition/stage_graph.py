"""Writes the graph of one stage: its operators in their order, each running as it ran in the whole graph.

Whether gradients are on and which autocast is around an operator are calls in the graph, made before it: every stage
makes its own. Where an operator reads weights beside what comes from inputs, their gradients can be had apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .deferred import leaf_of, mark, watch

_TOGGLE = torch._C._set_grad_enabled
_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
SWITCHES = (_TOGGLE, _ENTER, _EXIT)
"""Calls that change how the operators after them run."""


@dataclass(frozen=True, slots=True, eq=False)
class Modes:
    """How each node of a graph runs."""

    grad: dict[Node, bool]
    """Whether gradients are on."""
    regions: dict[Node, tuple[Node, ...]]
    """The regions of the model's own autocast around it, outermost first."""

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Modes:
        """Read the switches among the nodes."""
        found = cls({}, {})
        mode, stack = True, list[Node]()
        for node in nodes:
            if node.target is _TOGGLE:
                mode = bool(node.args[0])
            elif node.target is _EXIT:
                stack.remove(node.args[0])  # type: ignore[arg-type]
            elif node.target is _ENTER:
                stack.append(node)
            found.grad[node], found.regions[node] = mode, tuple(stack)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Where gradients flow."""

    trained: AbstractSet[Node]
    """From some trained parameter on: these have a gradient."""
    inner: AbstractSet[Node]
    """From some input of the stage on: their backward is needed by the stage before."""


def emit(heads: Sequence[Node], members: Sequence[Node], results: Sequence[Node], modes: Modes, flow: Flow) -> Graph:
    """The stage's own graph: parameters and buffers, inputs, operators in their order."""
    new = Graph()
    env: dict[Node, Node] = {}
    for node in heads:
        env[node] = new.placeholder(node.name)
        env[node].meta.update(node.meta if node.op == "placeholder" else {"val": node.meta["val"]})
    mode, loose = True, False
    inside: list[tuple[Node, Node]] = []
    for node in members:
        if modes.grad[node] != mode:
            mode = modes.grad[node]
            new.call_function(_TOGGLE, (mode,))
        inside = _enter(new, inside, modes.regions[node])
        within = node in flow.inner
        weights = [s for s in node.all_input_nodes if s in flow.trained and s not in flow.inner] if within else []
        if (within and not weights) != loose:
            loose = not loose
            _beside(new.call_function(mark, (loose,)), node)
        _copy(node, new, env, weights)
    _enter(new, inside, ())
    if not mode:
        new.call_function(_TOGGLE, (True,))
    new.output(tuple(env[n] for n in results))
    return new


def _copy(node: Node, new: Graph, env: dict[Node, Node], weights: list[Node]) -> None:
    """Copy an operator, and watch the weights that it reads."""
    leaves = {s: _beside(new.call_function(leaf_of, (env[s],)), node) for s in weights}
    env[node] = new.node_copy(node, lambda s: leaves.get(s, env[s]))
    if weights:
        _beside(new.call_function(watch, (env[node], *((env[s], leaves[s]) for s in weights))), node)


def _beside(made: Node, node: Node) -> Node:
    """What is put beside an operator belongs to the operator's module: a layer that is computed again stays whole."""
    made.meta.update({key: node.meta[key] for key in ("nn_module_stack", "module") if key in node.meta})
    return made


def _enter(new: Graph, inside: list[tuple[Node, Node]], wanted: tuple[Node, ...]) -> list[tuple[Node, Node]]:
    """Leave the regions (as they were captured, as they are here) that are not wanted, and enter those that are."""
    while inside and tuple(old for old, _ in inside) != wanted[: len(inside)]:
        new.call_function(_EXIT, (inside[-1][1],))
        inside = inside[:-1]
    for node in wanted[len(inside) :]:
        inside = [*inside, (node, new.call_function(_ENTER, node.args))]
    return inside
