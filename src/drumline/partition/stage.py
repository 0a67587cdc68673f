"""A pipeline stage: its inputs, its outputs and their readers, its graph, and the program that runs it.

Gradient mode and autocast are calls in the graph, before the operators that they affect: every stage makes its own.
Where an operator reads weights next to values from inputs, the weights' gradients can be computed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from ..torchkit.dispatch_modes import enter_autocast, exit_autocast, set_grad_enabled
from .program import GraphProgram, ValueObserver
from .weight_gradients import detached_leaf, mark_input_only, record_use


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor sent from one stage to others, or to a stage from the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    """Whether a gradient is sent back."""
    readers: tuple[int, ...] = ()
    """The stages that read it."""
    order: tuple[int, ...] = ()
    """The dims in memory order, outermost first: operators that depend on a memory layout get the captured one."""

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """Order a value's dims as they lie in memory, so that it is sent as contiguous elements."""
        return value.detach().permute(self.order).contiguous()

    def receive_buffer(self, device: torch.device) -> torch.Tensor:
        """A buffer for a packed value."""
        return torch.empty([self.shape[d] for d in self.order], dtype=self.dtype, device=device)

    def unpack(self, arrived: torch.Tensor) -> torch.Tensor:
        """Restore the dims of a received value to the order that they had before `pack`."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return arrived.permute(back)


def port_of(value: torch.Tensor, *, grad: bool = False, readers: Iterable[int] = ()) -> Port:
    """The port of a tensor, which may be fake."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    return Port(tuple(value.shape), value.dtype, grad, tuple(sorted(readers)), tuple(order))


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input from the micro-batch, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class StageInput:
    """An input from any earlier stage: values that skip stages are not relayed."""

    stage: int
    output: int


@dataclass(frozen=True, eq=False)
class Stage:
    """A run of operators. `module(*inputs)` returns its outputs."""

    index: int
    inputs: tuple[BatchInput | StageInput, ...]
    outputs: tuple[Port, ...]
    """Of the last stage: the sum of the loss and its weight, which no stage reads."""
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    graph: Graph | None = None
    weights_only: frozenset[int] = frozenset()
    """Outputs without a differentiable input: their gradient goes to weights alone."""
    module: Callable[..., tuple[Any, ...]] | None = None
    """None if another rank runs the stage."""


@dataclass(frozen=True, eq=False)
class StagedGraph:
    """A graph in stages. Every rank knows all of them, so no shape is ever sent."""

    stages: tuple[Stage, ...]
    batch_inputs: Mapping[str, Port]
    """The tensors of a micro-batch; `readers` are the stages that read them."""
    shared: Mapping[str, tuple[int, ...]]
    """Parameters that several stages have -> the stages."""

    def names(self, stages: Iterable[int]) -> list[str]:
        """The parameters and buffers that these stages read, each once."""
        here = [self.stages[i] for i in sorted(stages)]
        return list(dict.fromkeys(name for s in here for name in (*s.params, *s.buffers)))

    def bind(self, stages: Iterable[int], root: nn.Module, constants: Mapping[str, torch.Tensor]) -> StagedGraph:
        """The same with programs for these stages. Graphs for other shapes share the root, as do the stages of one
        rank."""
        bound = list(self.stages)
        for i in stages:
            graph = bound[i].graph
            assert graph is not None
            bound[i] = replace(bound[i], module=StageProgram(graph, root, constants))
        return replace(self, stages=tuple(bound))


class StageProgram:
    """Runs a stage's graph on the parameters and buffers in `root`, under the user's names."""

    def __init__(self, graph: Graph, root: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
        self._run = GraphProgram(graph, constants, root)
        without_switches = _without_grad_switches(graph)
        self._run_without_grad = (
            self._run if without_switches is None else GraphProgram(without_switches, constants, root)
        )

    def observe(self, observer: ValueObserver | None) -> None:
        """Call `observer` with the values of observable nodes; None stops that."""
        self._run.observe(observer)
        self._run_without_grad.observe(observer)

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """The stage's outputs. Without gradients, the graph's own no-grad regions are dropped."""
        if not torch.is_grad_enabled():
            return tuple(self._run_without_grad(*inputs))
        with torch.enable_grad():  # restores the mode, also when an operator fails inside a region
            return tuple(self._run(*inputs))


def _without_grad_switches(graph: Graph) -> Graph | None:
    """A copy without switches of the gradient mode; None if there are none."""
    if not any(n.target is set_grad_enabled for n in graph.nodes):
        return None
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if node.target is set_grad_enabled:
            copy.erase_node(node)
    return copy


SWITCHES = (set_grad_enabled, enter_autocast, exit_autocast)
"""Calls that change how later operators run."""


@dataclass(frozen=True, slots=True, eq=False)
class OperatorModes:
    """Gradient mode and autocast of each node of a graph."""

    grad: dict[Node, bool]
    """Whether gradients are on."""
    regions: dict[Node, tuple[Node, ...]]
    """The model's own autocast regions around it, outermost first."""

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> OperatorModes:
        """Read the switches among the nodes."""
        modes = cls({}, {})
        mode, stack = True, list[Node]()
        for node in nodes:
            if node.target is set_grad_enabled:
                mode = bool(node.args[0])
            elif node.target is exit_autocast:
                stack.remove(node.args[0])  # type: ignore[arg-type]
            elif node.target is enter_autocast:
                stack.append(node)
            modes.grad[node], modes.regions[node] = mode, tuple(stack)
        return modes


@dataclass(frozen=True, slots=True, eq=False)
class GradientFlow:
    """Nodes that gradients flow through."""

    trained: AbstractSet[Node]
    """Derived from a trained parameter: these have a gradient."""
    inner: AbstractSet[Node]
    """Derived from an input of the stage: the stage before needs their backward."""


def emit_stage_graph(
    placeholders: Sequence[Node],
    members: Sequence[Node],
    results: Sequence[Node],
    modes: OperatorModes,
    flow: GradientFlow,
) -> Graph:
    """Emit the graph of a stage: parameters and buffers, inputs, operators in order."""
    new = Graph()
    env: dict[Node, Node] = {}
    for node in placeholders:
        env[node] = new.placeholder(node.name)
        env[node].meta.update(node.meta if node.op == "placeholder" else {"val": node.meta["val"]})
    mode, input_only = True, False
    inside: list[tuple[Node, Node]] = []
    for node in members:
        if modes.grad[node] != mode:
            mode = modes.grad[node]
            new.call_function(set_grad_enabled, (mode,))
        inside = _switch_regions(new, inside, modes.regions[node])
        within = node in flow.inner
        weights = [s for s in node.all_input_nodes if s in flow.trained and s not in flow.inner] if within else []
        if (within and not weights) != input_only:
            input_only = not input_only
            _in_module_of(new.call_function(mark_input_only, (input_only,)), node)
        _copy(node, new, env, weights)
    _switch_regions(new, inside, ())
    if not mode:
        new.call_function(set_grad_enabled, (True,))
    new.output(tuple(env[n] for n in results))
    return new


def _copy(node: Node, new: Graph, env: dict[Node, Node], weights: list[Node]) -> None:
    """Copy an operator, and record the weights that it reads."""
    leaves = {s: _in_module_of(new.call_function(detached_leaf, (env[s],)), node) for s in weights}
    env[node] = new.node_copy(node, lambda s: leaves.get(s, env[s]))
    if weights:
        _in_module_of(new.call_function(record_use, (env[node], *((env[s], leaves[s]) for s in weights))), node)


def _in_module_of(inserted: Node, node: Node) -> Node:
    """Assign an inserted node to the operator's module, so that a recomputed layer stays whole."""
    inserted.meta.update({key: node.meta[key] for key in ("nn_module_stack", "module") if key in node.meta})
    return inserted


def _switch_regions(new: Graph, inside: list[tuple[Node, Node]], wanted: tuple[Node, ...]) -> list[tuple[Node, Node]]:
    """Leave the regions (captured node, node here) that are not wanted, and enter those that are."""
    while inside and tuple(old for old, _ in inside) != wanted[: len(inside)]:
        new.call_function(exit_autocast, (inside[-1][1],))
        inside = inside[:-1]
    for node in wanted[len(inside) :]:
        inside = [*inside, (node, new.call_function(enter_autocast, node.args))]
    return inside
