"""Programs of a split model: what one rank runs for a micro-batch, made once for each shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph

from ...core.errors import PlanError
from ...datasets.stream import RankMicroBatch
from ...partition.capture import flatten
from ...partition.program import ParameterHolder, splits_of
from ...partition.recompute import recompute_layers
from ...partition.sharding.redistribution import part_of
from ...partition.stage import StagedGraph, StageProgram
from ...partition.stage_cutting import cut_into_stages, graph_operators
from ..numerics.precision import compute_precision, to_device
from .graph_partition import GraphPartitioner, PartitionedGraph
from .initial_weights import InitialWeights
from .job_capture import JobCapture, JobGraph
from .placement import Placement


@dataclass(frozen=True, eq=False)
class MicroBatchProgram:
    """Runs micro-batches of one shape."""

    partitioned: PartitionedGraph
    program: StageProgram | None
    """Without a pipeline: the whole graph."""
    stages: StagedGraph | None
    """With a pipeline: all stages; this rank's have their programs."""
    own_weight: bool
    """Whether the job weights the loss itself."""
    names: tuple[str, ...] = ("loss",)
    """Its results, each a sum and a weight."""


class MicroBatchPrograms:
    """Captures, partitions, cuts and binds a program for each new shape of a micro-batch."""

    def __init__(
        self,
        capture: JobCapture,
        partitioner: GraphPartitioner,
        placement: Placement,
        weights: InitialWeights,
        root: ParameterHolder,
        recomputed: frozenset[str],
        *,
        first: tuple[JobGraph, PartitionedGraph],
    ) -> None:
        """`recomputed`: the layers that are recomputed in the backward; `first`: the first batch's graph."""
        self._capture, self._partitioner, self._placement = capture, partitioner, placement
        self._weights, self._root = weights, root
        self._plan, self._device, self._dtype = capture.plan, capture.device, capture.dtype
        self._programs: dict[Any, MicroBatchProgram] = {}
        self._recomputed = recomputed
        self._first: tuple[JobGraph, PartitionedGraph] | None = first

    def all(self) -> Iterator[MicroBatchProgram]:
        """The programs made so far."""
        return iter(self._programs.values())

    def stage_programs(self, entry: MicroBatchProgram) -> Iterator[StageProgram]:
        """The programs that this rank runs for a micro-batch: one, or one for each of its stages."""
        if entry.program is not None:
            yield entry.program
        if entry.stages is not None:
            for s in self._placement.stages:
                module = entry.stages.stages[s].module
                if isinstance(module, StageProgram):
                    yield module

    def of(self, micro: RankMicroBatch, training: bool = True) -> tuple[MicroBatchProgram, list[torch.Tensor]]:
        """The program for a micro-batch, and this rank's part of its tensors."""
        batch = (to_device(micro.input, self._device, self._dtype), to_device(micro.target, self._device, self._dtype))
        leaves, _ = flatten(batch)
        key = (
            training,
            micro.samples,
            *((tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else repr(v) for v in leaves),
        )
        if key not in self._programs:
            with self._capture.mode:
                fake = [
                    torch.empty(v.shape, dtype=v.dtype, device=v.device) if isinstance(v, torch.Tensor) else v
                    for v in leaves
                ]
            self._programs[key] = self._make_program(flatten(batch)[1](fake), micro.samples, training)
        entry = self._programs[key]
        return entry, self._own_part([v for v in leaves if isinstance(v, torch.Tensor)], entry)

    def _own_part(self, tensors: list[torch.Tensor], entry: MicroBatchProgram) -> list[torch.Tensor]:
        """This rank's tiles or tokens of a batch."""
        heads = [n for n in entry.partitioned.graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"]
        own = []
        for node, t in zip(heads, tensors, strict=True):
            for axis, split in splits_of(node).items():
                t = part_of(t, split, self._placement.grid.coordinates[axis])
            own.append(t.contiguous())
        return own

    def _make_program(self, batch: Any, samples: int, training: bool) -> MicroBatchProgram:
        graph, partitioned = self._partitioned(batch, samples, training)
        captured, own, names = graph.captured, graph.own_weight, graph.names
        constants = self._weights.constants(captured.constants)
        if not self._placement.pipelined:
            program = StageProgram(self._recompute(partitioned.graph, constants), self._root, constants)
            return MicroBatchProgram(partitioned, program, None, own, names)
        starts = self._placement.boundaries(captured)
        nodes = graph_operators(partitioned.graph)
        at = [next((i for i, n in enumerate(nodes) if n.meta.get("origin", -1) >= s), len(nodes)) for s in starts]
        stages = cut_into_stages(partitioned.graph, at)
        missing = [name for name in _names_read(stages, self._placement.stages) if not self._placement.has(name)]
        if missing:
            raise PlanError(
                f"a micro-batch of this shape needs {missing[0]} in another stage than the first one",
                rule="a stage has the parameters that the first batch needs there",
                fix="split= at other modules",
            )
        if self._recomputed:
            recomputed = [
                replace(s, graph=self._recompute(s.graph, constants)) if s.graph else s for s in stages.stages
            ]
            stages = replace(stages, stages=tuple(recomputed))
        bound = stages.bind(self._placement.stages, self._root, constants)
        return MicroBatchProgram(partitioned, None, bound, own, names)

    def _partitioned(self, batch: Any, samples: int, training: bool) -> tuple[JobGraph, PartitionedGraph]:
        """The graph of a micro-batch, whole and partitioned: the first batch's if it would be captured again."""
        if training and self._first is not None:
            first, self._first = self._first, None  # one program runs it, or none
            if self._capture.would_capture(first[0], batch, samples, training=training):
                return first
        graph = self._capture.capture(batch, samples, training=training)
        with compute_precision(self._plan.precision, self._device):
            return graph, self._partitioner.partition(graph.captured, present=samples > 0)

    def _recompute(self, graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
        return recompute_layers(graph, self._recomputed, constants) if self._recomputed else graph


def _names_read(stages: StagedGraph, mine: frozenset[int]) -> list[str]:
    """The parameters and buffers that these stages read: evaluation does not read some, such as a norm's count."""
    graphs = [g for s in sorted(mine) if (g := stages.stages[s].graph) is not None]
    heads = [n for g in graphs for n in g.nodes if n.op == "placeholder"]
    return [n.meta["name"] for n in heads if n.meta.get("role") in ("parameter", "buffer")]
