"""A stage of a pipeline: what it reads, what it gives to which stages, and the program that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from .program import Program, Seen


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that goes from one stage to others, or to a stage from the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    """Whether a gradient comes back."""
    wanted: tuple[int, ...] = ()
    """The stages that read it."""
    order: tuple[int, ...] = ()
    """The dims from the outermost in memory: operators that ask for a layout get the one they were captured with."""

    def packed(self, value: torch.Tensor) -> torch.Tensor:
        """A value as it travels: in one run of memory."""
        return value.detach().permute(self.order).contiguous()

    def room(self, device: torch.device) -> torch.Tensor:
        """Where a packed value arrives."""
        return torch.empty([self.shape[d] for d in self.order], dtype=self.dtype, device=device)

    def unpacked(self, arrived: torch.Tensor) -> torch.Tensor:
        """The value, of a packed one."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return arrived.permute(back)


def port_of(value: torch.Tensor, *, grad: bool = False, wanted: Iterable[int] = ()) -> Port:
    """The port of a tensor, which may be fake."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    return Port(tuple(value.shape), value.dtype, grad, tuple(sorted(wanted)), tuple(order))


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input from the micro-batch, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class From:
    """An input from an earlier stage, whichever: values that skip stages are not relayed."""

    stage: int
    output: int


@dataclass(frozen=True, eq=False)
class Stage:
    """A run of operators. `module(*inputs)` gives its outputs."""

    index: int
    inputs: tuple[Leaf | From, ...]
    outputs: tuple[Port, ...]
    """Of the last stage: the sum of the loss and its weight, which nobody wants."""
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    graph: Graph | None = None
    direct: frozenset[int] = frozenset()
    """Outputs that no differentiable input leads to: their gradient goes to weights alone."""
    module: Callable[..., tuple[Any, ...]] | None = None
    """None where another rank runs the stage."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph in stages. Every rank knows all of them, so no shape is ever sent."""

    stages: tuple[Stage, ...]
    leaves: Mapping[str, Port]
    """The tensors of a micro-batch; `wanted` names the stages that read them."""
    shared: Mapping[str, tuple[int, ...]]
    """Parameters that several stages hold -> the stages."""

    def names(self, stages: Iterable[int]) -> list[str]:
        """The parameters and buffers that these stages read, each once."""
        here = [self.stages[i] for i in sorted(stages)]
        return list(dict.fromkeys(name for s in here for name in (*s.params, *s.buffers)))

    def bind(self, stages: Iterable[int], root: nn.Module, constants: Mapping[str, torch.Tensor]) -> Cut:
        """With programs for these stages. Cuts for other shapes share the root, and so do the stages of one rank."""
        bound = list(self.stages)
        for i in stages:
            graph = bound[i].graph
            assert graph is not None
            bound[i] = replace(bound[i], module=StageProgram(graph, root, constants))
        return replace(self, stages=tuple(bound))


class StageProgram:
    """Runs a stage's graph on the parameters and buffers that `root` has under the user's names."""

    def __init__(self, graph: Graph, root: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
        self._run = Program(graph, constants, root)
        quiet = _without_toggles(graph)
        self._quiet = self._run if quiet is None else Program(quiet, constants, root)

    def watch(self, seen: Seen | None) -> None:
        """Show the values that are marked to be shown; None: no longer."""
        self._run.watch(seen)
        self._quiet.watch(seen)

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """The stage's outputs. Without gradients, the graph's own regions without gradients are no regions at all."""
        if not torch.is_grad_enabled():
            return tuple(self._quiet(*inputs))
        with torch.enable_grad():  # puts the mode back, also when an operator fails amid a region
            return tuple(self._run(*inputs))


def _without_toggles(graph: Graph) -> Graph | None:
    """A copy without switches of the gradient mode; None where there are none."""
    if not any(n.target is torch._C._set_grad_enabled for n in graph.nodes):
        return None
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in list(copy.nodes):
        if node.target is torch._C._set_grad_enabled:
            copy.erase_node(node)
    return copy
