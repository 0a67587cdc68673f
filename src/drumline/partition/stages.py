"""Cuts a flat graph into the stages of a pipeline: which operators, parameters and values each has, gets and gives.

A value that a later stage reads goes there directly. What needs no batch (positions, masks, a view of a parameter) is
computed again where it is read: that is cheaper than a message for each micro-batch. A parameter that is read by
several stages is held by each of them, and `shared` says so.
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
from .stage import Cut, From, Leaf, Port, Stage, port_of
from .stage_graph import SWITCHES, Flow, Modes, emit
from .tidy import changes_something
from .writes import writes

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
"""Operators whose floating results have no gradient. One too few costs a message of zeros, and is no error."""


def operators(graph: Graph) -> list[Node]:
    """What boundaries count: all nodes but the placeholders and the output."""
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]


def cut(graph: Graph, boundaries: Sequence[int]) -> Cut:
    """Stages that begin at these positions among `operators(graph)`; the first begins at 0 and is not named.

    Placeholders have meta["role"] (`parameter`, `buffer` or `batch`), meta["name"] and, parameters, meta["trained"].
    The graph gives the sum of the loss and its weight.
    """
    return _Cutter(graph, _checked(boundaries, len(operators(graph)))).run()


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
    """What one stage is found to have."""

    members: set[Node] = field(default_factory=set)
    held: dict[Node, None] = field(default_factory=dict)
    inputs: dict[Node, None] = field(default_factory=dict)
    outputs: dict[Node, set[int]] = field(default_factory=dict)
    """What others read of it -> who does."""


class _Cutter:
    def __init__(self, graph: Graph, ends: list[int]) -> None:
        self.graph, self.nodes = graph, operators(graph)
        self.modes = Modes.of(self.nodes)
        self.results = next(n for n in graph.nodes if n.op == "output")
        self.home: dict[Node, int] = {}
        for i, node in enumerate(self.nodes):
            part = node.target is operator.getitem and not isinstance(_val(node.args[0]), torch.Tensor)
            self.home[node] = self.home[node.args[0]] if part else sum(i >= e for e in ends[:-1])  # type: ignore[index]
        self.last = len(ends) - 1
        self.home[self.results] = self.last
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.writes = writes(self.nodes)
        self.free = self._free()
        self.grad = self._reached(graph.nodes, lambda n: bool(n.op == "placeholder" and n.meta.get("trained")))
        self.parts = [_Parts() for _ in ends]

    def run(self) -> Cut:
        for node in (*self.nodes, self.results):
            if node.target not in SWITCHES and node not in self.free:
                self._place(node, self.home[node])
        self._hold_the_unread()
        self._refuse_writes_across()
        stages = [self._stage(t) for t in range(self.last + 1)]
        holders: dict[str, list[int]] = {}
        for stage in stages:
            for name in stage.params:
                holders.setdefault(name, []).append(stage.index)
        shared = {name: tuple(at) for name, at in holders.items() if len(at) > 1}
        return Cut(tuple(stages), self._leaves(), shared)

    # -- who has what

    def _place(self, node: Node, stage: int) -> None:
        """Put a node into a stage, with what it reads."""
        parts = self.parts[stage]
        if node in parts.members:
            return
        parts.members.add(node)
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                (parts.inputs if source.meta["role"] == "batch" else parts.held)[source] = None
            elif source in self.free:
                self._place(source, stage)
            elif self.home[source] != stage:
                self._refuse_number(source, stage)
                parts.inputs[source] = None
                self.parts[self.home[source]].outputs.setdefault(source, set()).add(stage)

    def _free(self) -> set[Node]:
        """What can be computed anywhere: from constants, buffers and parameters, without chance, never written to."""
        written = {root for _, root in self.writes}
        free = {n for n in self.graph.nodes if n.op == "placeholder" and n.meta["role"] != "batch"} - written
        for node in self.nodes:
            chance = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            fixed = node.target in SWITCHES or chance or node in written or changes_something(node)
            if not fixed and all(s in free for s in node.all_input_nodes):
                free.add(node)
        return free

    def _reached(self, nodes: Iterable[Node], begins: Callable[[Node], bool]) -> set[Node]:
        """Where gradients flow back from to where they begin; rather too much than too little."""
        reached: set[Node] = set()
        for node in nodes:
            flows = node.op == "call_function" and self.modes.grad[node] and node.target not in _NO_GRADIENT
            through = flows and _floating(_val(node)) and any(s in reached for s in node.all_input_nodes)
            if through or begins(node):
                reached.add(node)
        return reached

    def _hold_the_unread(self) -> None:
        """Someone must hold, save and update what no operator reads: the first stage."""
        read = {node for parts in self.parts for node in parts.held}
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.meta["role"] != "batch" and node not in read:
                self.parts[0].held[node] = None

    def _leaves(self) -> dict[str, Port]:
        heads = [n for n in self.graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"]
        wanted = {n: [t for t, parts in enumerate(self.parts) if n in parts.inputs] for n in heads}
        return {n.meta["name"]: port_of(n.meta["val"], wanted=wanted[n]) for n in heads}

    # -- what cannot be

    def _refuse_number(self, node: Node, stage: int) -> None:
        if not isinstance(_val(node), torch.Tensor):
            raise PlanError(
                f"stage {stage} reads {node.name}, which is a {type(_val(node)).__name__} that stage "
                f"{self.home[node]} finds in the batch",
                where=_where(node),
                rule="tensors go between stages, and numbers do not",
                fix="another boundary, or keep the number in a tensor",
            )

    def _refuse_writes_across(self) -> None:
        """A write must be seen by all who read the memory afterwards: a stage sends when all its writes are done."""
        for writer, root in self.writes:
            at = {t for t, parts in enumerate(self.parts) if root in parts.held or root in parts.inputs}
            at |= {self.home[writer]} | ({self.home[root]} if root in self.home else set())
            inside = root in self.home and self.home[root] == self.home[writer]
            if len(at) > 1 and not inside:
                raise PlanError(
                    f"{writer.name} writes into {root.name}, which stages {sorted(at)} have",
                    where=_where(writer),
                    rule="what is written in place is made, written and (a buffer) read in one stage",
                    fix="another boundary, or an operator that is not in place",
                )

    # -- the stages

    def _stage(self, t: int) -> Stage:
        parts = self.parts[t]
        # by position in the graph, which is the same on every rank
        outputs, inputs, held = (
            sorted(nodes, key=self.position.__getitem__) for nodes in (parts.outputs, parts.inputs, parts.held)
        )
        results = outputs if t < self.last else list(self.results.args[0])
        given = {n for n in inputs if n in self.grad}
        members = [n for n in self.nodes if n in parts.members]
        inner = self._reached([*inputs, *members], given.__contains__)
        return Stage(
            index=t,
            inputs=tuple(self._source(n) for n in inputs),
            outputs=tuple(self._port(n, parts) for n in results),
            params=tuple(n.meta["name"] for n in held if n.meta["role"] == "parameter"),
            buffers=tuple(n.meta["name"] for n in held if n.meta["role"] == "buffer"),
            graph=emit([n for n in held if n.users] + inputs, members, results, self.modes, Flow(self.grad, inner)),
            direct=frozenset(k for k, n in enumerate(results) if n not in inner),
        )

    def _port(self, node: Node, parts: _Parts) -> Port:
        return port_of(node.meta["val"], grad=node in self.grad, wanted=parts.outputs.get(node, ()))

    def _source(self, node: Node) -> Leaf | From:
        if node.op == "placeholder":
            return Leaf(node.meta["name"])
        home = self.home[node]
        return From(home, sorted(self.parts[home].outputs, key=self.position.__getitem__).index(node))


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else node


def _floating(val: Any) -> bool:
    if isinstance(val, torch.Tensor):
        return val.is_floating_point() or val.is_complex()
    return isinstance(val, tuple | list) and any(_floating(v) for v in val)


def _where(node: Node) -> str:
    return str(node.meta.get("module") or "")
