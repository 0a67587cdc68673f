"""Cuts a flat graph into pipeline stages: the operators, parameters, inputs and outputs of each.

A value goes directly to each later stage that reads it. Values that do not depend on the batch (positions, masks, a
view of a parameter) are recomputed where they are read: that is cheaper than a message per micro-batch. A parameter
read by several stages is kept by each of them, and listed in `shared`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from ..core.errors import PlanError
from .operator_properties import memory_writes, mutates
from .stage import (
    SWITCHES,
    BatchInput,
    GradientFlow,
    OperatorModes,
    Port,
    Stage,
    StagedGraph,
    StageInput,
    emit_stage_graph,
    port_of,
)

aten = torch.ops.aten
_NO_GRADIENT = (
    aten.detach.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
)
"""Operators whose floating-point results have no gradient. A missing one costs a message of zeros, and is no error."""


def graph_operators(graph: Graph) -> list[Node]:
    """The nodes that boundaries count: all but placeholders and the output."""
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]


def cut_into_stages(graph: Graph, boundaries: Sequence[int]) -> StagedGraph:
    """Cut into stages that begin at these positions among `graph_operators(graph)`; the first begins at 0 and is not
    named.

    Placeholders have meta["role"] (`parameter`, `buffer` or `batch`), meta["name"] and, for parameters,
    meta["trained"]. The graph returns the sum of the loss and its weight.
    """
    return _Cutter(graph, _checked(boundaries, len(graph_operators(graph)))).run()


def _checked(boundaries: Sequence[int], n: int) -> list[int]:
    ends = [0, *boundaries, n]
    if any(a >= b for a, b in pairwise(ends)):
        raise PlanError(
            f"stages that begin at operators {list(boundaries)}",
            rule=f"0 < first < second < ... < {n} operators",
            fix="fewer stages, or other boundaries",
        )
    return ends[1:]


@dataclass(eq=False)
class _Parts:
    """The contents of one stage."""

    members: set[Node] = field(default_factory=set)
    state: dict[Node, None] = field(default_factory=dict)
    inputs: dict[Node, None] = field(default_factory=dict)
    outputs: dict[Node, set[int]] = field(default_factory=dict)
    """Values that other stages read -> those stages."""


class _Cutter:
    def __init__(self, graph: Graph, ends: list[int]) -> None:
        self.graph, self.nodes = graph, graph_operators(graph)
        self.modes = OperatorModes.of(self.nodes)
        self.results = next(n for n in graph.nodes if n.op == "output")
        self.home: dict[Node, int] = {}
        for i, node in enumerate(self.nodes):
            part = node.target is operator.getitem and not isinstance(_val(node.args[0]), torch.Tensor)
            self.home[node] = self.home[node.args[0]] if part else sum(i >= e for e in ends[:-1])  # type: ignore[index]
        self.last = len(ends) - 1
        self.home[self.results] = self.last
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.writes = memory_writes(self.nodes)
        self.free = self._free()
        self.grad = self._reached(graph.nodes, lambda n: bool(n.op == "placeholder" and n.meta.get("trained")))
        self.parts = [_Parts() for _ in ends]

    def run(self) -> StagedGraph:
        for node in (*self.nodes, self.results):
            if node.target not in SWITCHES and node not in self.free:
                self._place(node, self.home[node])
        self._assign_unread()
        self._refuse_writes_across()
        stages = [self._stage(t) for t in range(self.last + 1)]
        stages_of: dict[str, list[int]] = {}
        for stage in stages:
            for name in stage.params:
                stages_of.setdefault(name, []).append(stage.index)
        shared = {name: tuple(at) for name, at in stages_of.items() if len(at) > 1}
        return StagedGraph(tuple(stages), self._leaves(), shared)

    # -- assignment to stages

    def _place(self, node: Node, stage: int) -> None:
        """Put a node into a stage, with its inputs."""
        parts = self.parts[stage]
        if node in parts.members:
            return
        parts.members.add(node)
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                (parts.inputs if source.meta["role"] == "batch" else parts.state)[source] = None
            elif source in self.free:
                self._place(source, stage)
            elif self.home[source] != stage:
                self._refuse_number(source, stage)
                parts.inputs[source] = None
                self.parts[self.home[source]].outputs.setdefault(source, set()).add(stage)

    def _free(self) -> set[Node]:
        """Nodes that any stage can compute: from constants, buffers and parameters, not random, never written to."""
        written = {root for _, root in self.writes}
        free = {n for n in self.graph.nodes if n.op == "placeholder" and n.meta["role"] != "batch"} - written
        for node in self.nodes:
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            fixed = node.target in SWITCHES or random or node in written or mutates(node)
            if not fixed and all(s in free for s in node.all_input_nodes):
                free.add(node)
        return free

    def _reached(self, nodes: Iterable[Node], begins: Callable[[Node], bool]) -> set[Node]:
        """Nodes that gradients flow through, from `begins` on; an overestimate is safe."""
        reached: set[Node] = set()
        for node in nodes:
            flows = node.op == "call_function" and self.modes.grad[node] and node.target not in _NO_GRADIENT
            through = flows and _floating(_val(node)) and any(s in reached for s in node.all_input_nodes)
            if through or begins(node):
                reached.add(node)
        return reached

    def _assign_unread(self) -> None:
        """Assign what no operator reads to the first stage: some stage must keep, save and update it."""
        read = {node for parts in self.parts for node in parts.state}
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.meta["role"] != "batch" and node not in read:
                self.parts[0].state[node] = None

    def _leaves(self) -> dict[str, Port]:
        inputs = [n for n in self.graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"]
        readers = {n: [t for t, parts in enumerate(self.parts) if n in parts.inputs] for n in inputs}
        return {n.meta["name"]: port_of(n.meta["val"], readers=readers[n]) for n in inputs}

    # -- refusals

    def _refuse_number(self, node: Node, stage: int) -> None:
        if not isinstance(_val(node), torch.Tensor):
            raise PlanError(
                f"stage {stage} reads {node.name}, which is a {type(_val(node)).__name__} that stage "
                f"{self.home[node]} reads from the batch",
                where=_where(node),
                rule="tensors are sent between stages, numbers are not",
                fix="another boundary, or keep the number in a tensor",
            )

    def _refuse_writes_across(self) -> None:
        """Refuse in-place writes across stages: every later reader must see them, and a stage sends after all its
        writes."""
        for writer, root in self.writes:
            at = {t for t, parts in enumerate(self.parts) if root in parts.state or root in parts.inputs}
            at |= {self.home[writer]} | ({self.home[root]} if root in self.home else set())
            inside = root in self.home and self.home[root] == self.home[writer]
            if len(at) > 1 and not inside:
                raise PlanError(
                    f"{writer.name} writes into {root.name}, which stages {sorted(at)} have",
                    where=_where(writer),
                    rule="memory that is written in place is created, written and (a buffer) read in one stage",
                    fix="another boundary, or an operator that is not in place",
                )

    # -- stages

    def _stage(self, t: int) -> Stage:
        parts = self.parts[t]
        # by position in the graph, the same on every rank
        outputs, inputs, state = (
            sorted(nodes, key=self.position.__getitem__) for nodes in (parts.outputs, parts.inputs, parts.state)
        )
        results = outputs if t < self.last else list(self.results.args[0])
        differentiable = {n for n in inputs if n in self.grad}
        members = [n for n in self.nodes if n in parts.members]
        inner = self._reached([*inputs, *members], differentiable.__contains__)
        return Stage(
            index=t,
            inputs=tuple(self._source(n) for n in inputs),
            outputs=tuple(self._port(n, parts) for n in results),
            params=tuple(n.meta["name"] for n in state if n.meta["role"] == "parameter"),
            buffers=tuple(n.meta["name"] for n in state if n.meta["role"] == "buffer"),
            graph=emit_stage_graph(
                [n for n in state if n.users] + inputs, members, results, self.modes, GradientFlow(self.grad, inner)
            ),
            weights_only=frozenset(k for k, n in enumerate(results) if n not in inner),
        )

    def _port(self, node: Node, parts: _Parts) -> Port:
        return port_of(node.meta["val"], grad=node in self.grad, readers=parts.outputs.get(node, ()))

    def _source(self, node: Node) -> BatchInput | StageInput:
        if node.op == "placeholder":
            return BatchInput(node.meta["name"])
        home = self.home[node]
        return StageInput(home, sorted(self.parts[home].outputs, key=self.position.__getitem__).index(node))


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else node


def _floating(val: Any) -> bool:
    if isinstance(val, torch.Tensor):
        return val.is_floating_point() or val.is_complex()
    return isinstance(val, tuple | list) and any(_floating(v) for v in val)


def _where(node: Node) -> str:
    return str(node.meta.get("module") or "")
