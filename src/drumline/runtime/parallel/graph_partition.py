"""Partitions a captured graph over the axes of a plan, one after the other, into the graph that one rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from ...core.errors import PlanError
from ...partition import rules as _rules  # registers them
from ...partition.batch_statistics import span_statistics
from ...partition.capture import CapturedGraph
from ...partition.partial_gradients import leave_partial_gradients, parameters_in_split_work
from ...partition.sharding import redistribution
from ...partition.sharding.layout import ShardedValue, Split, even_bounds, even_split
from ...partition.sharding.redistribution import Axis
from ...partition.sharding_pass import ShardingPass
from ...partition.spatial.conv import overlap_halos
from ...partition.tensor_splits import TensorSplits, choose_tensor_splits
from ...plans import Plan
from ...torchkit.fake_tensors import agreed_numbers, with_real_tensors
from ..strategies.module_outputs import ModuleOutput
from .checks import refuse_uneven_heads, replicated_plan
from .rank_grid import DATA_AXES, SAMPLE_AXES, RankGrid

assert _rules
AXIS_KEYS = {"rows": "tile", "columns": "tile", "cp": "cp", "tp": "tp"}


@dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """This rank's graph, with its shapes."""

    graph: Graph
    gathered: Mapping[str, Mapping[str, Sequence[str]]]
    """Axis -> operator -> the modules where its inputs were gathered."""
    outputs: Sequence[tuple[str, int, int]]
    """(module, call, which output), in order of execution."""


OutputNodes = dict[Node, tuple[Node, dict[str, Split]]]
"""Node of the captured graph -> its node in the latest graph, and its splits by axis."""


def _after_pass(outputs: OutputNodes, work: ShardingPass) -> OutputNodes:
    """The same outputs in the graph of a pass."""
    result = {}
    for origin, (node, splits) in outputs.items():
        value = work.values.get(node)
        if isinstance(value, ShardedValue):
            more = {work.axis.name: value.layout} if value.layout is not None else {}
            result[origin] = (value.node, {**splits, **more})
    return result


def _gathered_inputs(graph: Graph, axis: Axis, by_pass: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Operator -> modules that get a whole image or sequence, by rules too: before a `flatten`, for example.

    For tensor parallelism gathering is normal, before column-split layers; tiles and tokens stay split if they can.
    """
    all_ = {name: dict.fromkeys(at) for name, at in by_pass.items()}
    for node in graph.nodes:
        if node.target in (redistribution.gather, redistribution.gather_into_split_work) and node.args[-1] is axis:
            for user in (u for u in node.users if u.op == "call_function"):
                all_.setdefault(str(user.target), {})[str(user.meta.get("module", ""))] = None
    return {name: tuple(at) for name, at in all_.items()}


class GraphPartitioner:
    """Partitions the graphs of one job over the axes of one plan; parameters are split alike in all of them."""

    def __init__(
        self, plan: Plan, grid: RankGrid, device: torch.device, watch: Callable[..., Any] | None = None
    ) -> None:
        self.plan, self.grid, self.device, self._watch = plan, grid, device, watch
        self.axes = {
            name: Axis(name, grid.sizes[name], grid.coordinates[name], grid.group([name]), watch, plan.halo)
            for name in ("rows", "columns", "cp", "tp")
            if grid.sizes[name] > 1
        }
        self.choice: TensorSplits | None = None
        """Splits of parameters by tensor parallelism, by name."""
        self.splits: dict[str, Split] = {}
        self.shared_gradients: frozenset[str] | None = None
        """The parameters that are whole along tp and get partial gradients there, by the first graph."""

    @with_real_tensors()
    def choose_splits(self, captured: CapturedGraph) -> None:
        """Choose once what is split; later graphs follow."""
        if "tp" in self.axes:
            self.choice = choose_tensor_splits(captured, self.plan.tp)
            refuse_uneven_heads(self.plan, captured, self.choice)
            names = {n.name: n.meta["name"] for n in captured.graph.nodes if n.op == "placeholder"}
            self.splits = {names[k]: s for k, s in self.choice.splits.items()}
            if not self.splits:
                raise PlanError(
                    f"tp={self.plan.tp}: no layer of this model can be split over {self.plan.tp} ranks",
                    rule="; ".join(f"{k}: {v}" for k, v in list(self.choice.unsplit.items())[:3]),
                    fix="tp=1, and dp or pp",
                )

    @with_real_tensors()
    def partition(self, captured: CapturedGraph, *, present: bool = True) -> PartitionedGraph:
        """This rank's graph; `present`: whether its samples count."""
        graph = captured.graph
        for i, node in enumerate(n for n in graph.nodes if n.op not in ("placeholder", "output")):
            node.meta["origin"] = i
        gathered: dict[str, Mapping[str, Sequence[str]]] = {}
        shown: OutputNodes = {n: (n, {}) for nodes in captured.outputs.values() for n in nodes if n is not None}
        for name, axis in self.axes.items():
            seeds = self._seeds(name, axis, graph)
            sequence = self._sequence(graph, axis) if name == "tp" else (lambda _: None)
            work = ShardingPass(graph, axis, captured.mode, seeds, sequence_split=sequence)
            graph = work.run()
            gathered[name] = work.gathered if name == "tp" else _gathered_inputs(graph, axis, work.gathered)
            shown = _after_pass(shown, work)
            if name == "tp" and self.shared_gradients is None:
                self.shared_gradients = self._union_over_ranks(parameters_in_split_work(graph, axis), captured)
            leave_partial_gradients(graph, axis, self.shared_gradients if name == "tp" else None)
        if self.grid.size(DATA_AXES) > 1:
            span_statistics(graph, self._statistics).here = present
        if {"rows", "columns"} & self.axes.keys():
            overlap_halos(graph)
        for (module, call), nodes in captured.outputs.items():
            for i, node in enumerate(nodes):
                if node in shown:
                    final, splits = shown[node]
                    final.meta.setdefault("shows", []).append(ModuleOutput(module, call, i, splits))
        outputs = [(m, c, i) for (m, c), nodes in captured.outputs.items() for i in range(len(nodes))]
        return PartitionedGraph(graph, gathered, outputs)

    def _union_over_ranks(self, names: frozenset[str], captured: CapturedGraph) -> frozenset[str]:
        """The union over the ranks that share samples: their parts may be of different sizes."""
        group = self.grid.group(SAMPLE_AXES)
        if group is None:
            return names
        every = sorted(captured.placeholders("parameter"))
        own = [name in names for name in every]
        flags = torch.tensor(own, dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        return frozenset(name for name, there in zip(every, agreed_numbers(flags, own), strict=True) if there)

    def _statistics(self, names: frozenset[str]) -> Axis:
        """The ranks that share BatchNorm statistics: those with other samples, and with other parts of the same."""
        axes = [*DATA_AXES, *names]
        return Axis("statistics", self.grid.size(axes), self.grid.index(axes), self.grid.group(axes), self._watch)

    # -- the inputs that an axis splits

    def _seeds(self, name: str, axis: Axis, graph: Graph) -> dict[str, Split]:
        heads = [n for n in graph.nodes if n.op == "placeholder"]
        if name == "tp":
            return {
                n.name: self.splits[n.meta["name"]]
                for n in heads
                if n.meta["role"] == "parameter" and n.meta["name"] in self.splits
            }
        leaves = [n for n in heads if n.meta["role"] == "batch"]
        seeds = self._tokens(leaves, axis) if name == "cp" else self._images(leaves, name, axis)
        if not seeds:
            what = "tokens: an input of (samples, tokens, ...)" if name == "cp" else "images: an input of four dims"
            raise PlanError(
                f"{AXIS_KEYS[name]} for a batch without {what}",
                where=f"plan {self.plan}",
                rule="the plan's axis splits this dim of the input",
                fix=str(replicated_plan(self.plan)),
            )
        return seeds

    def _images(self, leaves: Sequence[Any], name: str, axis: Axis) -> dict[str, Split]:
        """Images (samples, channels, rows, columns), and targets with a value for every pixel."""
        back = {"rows": 2, "columns": 1}[name]
        images = [n for n in leaves if n.meta["val"].dim() == 4]
        sizes = {n.meta["val"].shape[-back] for n in images}
        seeds = {}
        for node in leaves:
            shape = node.meta["val"].shape
            dense = len(shape) >= 3 and any(shape[-2:] == i.meta["val"].shape[-2:] for i in images)
            if (node in images or dense) and shape[-back] in sizes:
                if shape[-back] < axis.size:
                    raise PlanError(
                        f"tile: {shape[-back]} {name} over {axis.size} ranks",
                        rule="every tile has a row and a column",
                        fix=f"at most {shape[-back]} tiles that way",
                    )
                seeds[node.name] = Split(len(shape) - back, (even_bounds(shape[-back], axis.size),))
        return seeds

    def _tokens(self, leaves: Sequence[Any], axis: Axis) -> dict[str, Split]:
        """All inputs with as many tokens in dim 1 as the first that has any."""
        lengths = [n.meta["val"].shape[1] for n in leaves if n.meta["val"].dim() >= 2]
        if not lengths:
            return {}
        if lengths[0] < axis.size:
            raise PlanError(
                f"cp={axis.size} for {lengths[0]} tokens", rule="every rank has a token", fix=f"cp={lengths[0]} or less"
            )
        return {
            n.name: Split(1, (even_bounds(lengths[0], axis.size),))
            for n in leaves
            if n.meta["val"].dim() in (2, 3) and n.meta["val"].shape[1] == lengths[0]
        }

    def _sequence(self, graph: Graph, axis: Axis) -> Callable[[torch.Size], Split | None]:
        """Sequence parallelism: between blocks, sums over tp are split by tokens; norms and dropout work on parts."""
        leaves = [n.meta["val"].shape for n in graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"]
        shapes = {(s[0], s[1]) for s in leaves if len(s) in (2, 3)}

        def sequence(shape: torch.Size) -> Split | None:
            for samples, tokens in shapes:
                if tokens % axis.size or tokens < 2:
                    continue
                if len(shape) == 3 and tuple(shape[:2]) == (samples, tokens):
                    return even_split(1, tokens, axis.size)
                if len(shape) == 2 and shape[0] == samples * tokens:
                    return Split(0, (even_bounds(tokens, axis.size),) * samples)
            return None

        return sequence
