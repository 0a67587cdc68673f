"""A job's model where the plan splits the model: this rank's parts of the parameters, and programs that run them.

The job's Python runs only to be captured, on tensors without values, once for each shape of a micro-batch. What runs
is the captured graph, spread over the plan's axes and cut into stages; its parameters keep the user's names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from ...comm.gloo_fallbacks import backend_of
from ...core.errors import PlanError
from ...core.job import Job
from ...datasets.stream import RankBatch, RankMicroBatch
from ...partition.capture import CapturedGraph, flatten
from ...partition.program import ParameterHolder, splits_of
from ...partition.recompute import recompute_layers
from ...partition.sharding.layout import Split
from ...partition.sharding.redistribution import gathered, part_of
from ...partition.stage import StagedGraph as Stages
from ...partition.stage import StageProgram
from ...partition.stage_boundaries import FLOPS_PER_BYTE, BoundaryPrices
from ...partition.stage_cutting import cut_into_stages, graph_operators
from ...plans import Plan
from ...plans.plan import MEASURED
from ...reports.split_summary import split_summary
from ...schedules.pipeline import Action
from ..memory.recompute import recomputed_layers
from ..numerics.precision import compute_precision, tf32_matmuls, to_device
from ..pipeline.channels import PipelineChannels
from ..pipeline.clock import LaneTiming, PipelineClock
from ..pipeline.run import PipelineRunner
from ..pipeline.step import PipelineMicroBatch, StepHooks
from ..pipeline.tied_parameters import sum_tied_gradients, tied_ranks
from ..state.recorder import StepRecorder
from ..strategies.buckets import GradientGroups
from ..strategies.flat_shard import FlatShard
from ..strategies.module_outputs import OutputSeen
from ..strategies.strategy import MicroLoss, StepContext
from .graph_partition import GraphPartitioner, PartitionedGraph
from .initial_weights import InitialWeights
from .job_capture import JobCapture
from .placement import Placement, stage_modules
from .rank_grid import DATA_AXES, SAMPLE_AXES, RankGrid
from .segment_timing import measured_prices


@dataclass(frozen=True, eq=False)
class MicroBatchProgram:
    """What runs micro-batches of one shape."""

    captured: CapturedGraph
    spread: PartitionedGraph
    program: StageProgram | None
    """Without a pipeline."""
    stages: Stages | None
    """With one: this rank's have their modules."""
    own_weight: bool
    """Whether the weight of the loss is the job's own."""
    names: tuple[str, ...] = ("loss",)
    """What comes out, each as a sum and a weight."""


class ModelParallel(FlatShard):
    """Runs this rank's part of a captured model; gradients are summed as flat shards over the ranks that share it."""

    holds_parts = True

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        device: torch.device,
        dtype: torch.dtype | None,
        record: StepRecorder,
        flops_per_byte: float | None = None,
    ) -> None:
        grid = RankGrid(plan, rank)
        shard, copies = grid.group(["shard"]), grid.group(["replica", *SAMPLE_AXES])
        super().__init__(plan, shard, copies, split=grid.group(["pp", "shard", "tp"]))
        self.plan, self.groups, self.device, self.dtype, self.record = plan, grid, device, dtype, record
        self.partitioner = GraphPartitioner(plan, grid, device, lambda axis, name, t: record.message(name, t))
        self._captures = JobCapture(job, plan, device, dtype)
        self.template = self._captures.template
        """The user's module, on tensors without values: what is captured."""
        self.recomputed_layers = (
            frozenset(spec.name for spec in recomputed_layers(self.template, "full"))
            if plan.recompute == "full"
            else frozenset()
        )
        """The layers that are computed again in the backward."""
        self._ready: dict[Any, MicroBatchProgram] = {}
        self._seen: OutputSeen | None = None
        self._count = 0
        self.peak = 0
        """The most forwards that this rank held at once in the last step of a pipeline."""
        group = grid.group(["pp"])
        back = grid.second_group(["pp"]) if group is not None and backend_of(group) == "nccl" else None
        self.channels = PipelineChannels(group, back, device=device) if group is not None else None
        self._pipe = PipelineRunner(self.channels) if self.channels is not None else None
        self.clock = PipelineClock(device)
        """When the actions of a pipeline ran."""
        first = self._captures.capture_first(grid.size(DATA_AXES))
        with compute_precision(plan.precision, device):
            self.partitioner.choose_splits(first)
        prices = self._prices(first, flops_per_byte)
        self.placement = Placement(plan, grid, first, self.partitioner.splits, prices)
        """Who has what."""
        with compute_precision(plan.precision, device):
            self.first = self.partitioner.partition(first)
        """What a rank runs of the first batch: it shows what could not be split, and makes all groups."""
        self.root = ParameterHolder()
        """This rank's parameters and buffers."""
        self._filling = InitialWeights(self._captures, self.placement, self.root)
        self._filling.broadcast(first)
        if self.partitioner.shared_gradients:  # what the tensor-parallel ranks have whole, for work that they share
            self.sum_separately(
                self.partitioner.shared_gradients, GradientGroups(shard, grid.group(["replica", *SAMPLE_AXES, "tp"]))
            )
        self.counts_loss, self.shows_outputs = self.placement.counts_loss, self.placement.shows_outputs
        self.reads_input = not self.placement.pipelined or 0 in self.placement.stages
        self.output_order = self.first.outputs
        left = self.partitioner.choice.unsplit if self.partitioner.choice else {}
        self.summary = split_summary(self.first.gathered, left, [name for name, _ in self.placement.starts])

    def _prices(self, captured: CapturedGraph, flops_per_byte: float | None) -> BoundaryPrices:
        """What the stages of a pipeline are balanced by."""
        if self.channels is None or self.plan.split != MEASURED:
            return BoundaryPrices(per_byte=flops_per_byte or FLOPS_PER_BYTE[self.device.type])
        slices = self.groups.size(DATA_AXES)
        return measured_prices(self._captures, captured, stage_modules(captured), slices, self.channels)

    # -- running

    def forward_backward(self, batch: RankBatch, step: StepContext) -> tuple[list[MicroLoss], bool]:
        self._count = 0
        if not self.placement.pipelined:
            return super().forward_backward(batch, step)
        factor = self.gradient_divisor * step.scale / batch.samples
        with self.accumulate(last=False), tf32_matmuls(step.precision):
            losses, weighted = self.train_stages(batch.micros, factor, step)
        with step.phase("communication"):
            tied = tied_ranks(self._cut, self.placement.order)
            if tied and self.channels is not None:
                sum_tied_gradients(dict(self.root.named_parameters()), tied, self.channels)
            self.send_gradients()
        return [(total.double(), weight.double()) for total, weight, *_ in losses], weighted

    def loss_of(self, micro: RankMicroBatch) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Sum and weight of the loss of a micro-batch, and whether the weight is the job's own."""
        ready, tensors = self.program_for(micro)
        assert ready.program is not None
        self._show(ready, self._count)
        self._count += 1
        total, weight = ready.program(*tensors)
        return total, weight, ready.own_weight

    def train_stages(
        self, micros: Sequence[RankMicroBatch], factor: float, step: StepContext
    ) -> tuple[Sequence[tuple[torch.Tensor, ...]], bool]:
        """All micro-batches through the stages, forwards and backwards; the losses that this rank has."""
        made = [self.program_for(m) for m in micros]
        batches = [self._micro_batch(r, t) for r, t in made]

        def before(stage: int, micro: int) -> None:
            step.seed(micro, stage)
            self._show(made[micro][0], micro)

        runner = self._runner(before, step)
        with self.clock.step():
            result = runner.train(self.placement.order_of(len(micros)), batches, factor)
        self._cut, self.peak = batches[0].cut, result.peak
        return result.losses, any(r.own_weight for r, _ in made)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[RankMicroBatch]) -> list[dict[str, torch.Tensor]]:
        """(sum, weight) of the loss and of each metric over all micro-batches, as far as this rank counts them."""
        made = [self.program_for(m, training=False) for m in micros]
        names = made[0][0].names
        if self.placement.pipelined:
            runner = self._runner(lambda stage, micro: None, None)
            batches = [self._micro_batch(r, t) for r, t in made]
            results: Sequence[Any] = runner.evaluate(self.placement.order_of(len(micros)), batches).losses
        else:
            with compute_precision(self.plan.precision, self.device):
                results = [r.program(*t) for r, t in made if r.program is not None]
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=self.device)
        for pairs in results if self.counts_loss else ():
            sums += torch.stack([p.double() for p in pairs]).view(-1, 2)
        return [dict(zip(names, sums, strict=True))]

    def _micro_batch(self, ready: MicroBatchProgram, tensors: Sequence[torch.Tensor]) -> PipelineMicroBatch:
        assert ready.stages is not None
        return PipelineMicroBatch(ready.stages, {str(i): t for i, t in enumerate(tensors)})

    def _runner(self, seed: Callable[[int, int], None], step: StepContext | None) -> PipelineRunner:
        """The pipeline's runner; in a step of training its actions are timed."""
        assert self._pipe is not None
        names = {"F": "forward", "B": "backward", "W": "backward"}

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            clock = self.clock.action(action) if step else nullcontext()
            phase = step.phase(names[action.kind]) if step else nullcontext()
            with clock, phase, compute_precision(self.plan.precision, self.device):
                yield

        self._pipe.hooks = StepHooks(seed=seed, around_action=around)
        return self._pipe

    def lanes(self, last: int) -> list[LaneTiming]:
        return self.clock.lanes(last) if self.placement.pipelined else []

    # -- looking at values

    def watch_outputs(self, seen: OutputSeen, skip: Collection[nn.Module] = ()) -> None:
        self._seen = seen

    def unwatch_outputs(self) -> None:
        self._seen = None
        for ready in self._ready.values():
            for program in _programs(ready, self.placement.stages):
                program.observe(None)

    def _show(self, ready: MicroBatchProgram, micro: int) -> None:
        for program in _programs(ready, self.placement.stages):
            program.observe(self._shower(micro) if self._seen else None)

    def _shower(self, micro: int) -> Callable[[Any, Any], Any]:
        seen = self._seen

        def show(node: Any, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and seen is not None and torch.is_grad_enabled():
                for shown in node.meta["shows"]:
                    seen(micro, shown, value)
            return value

        return show

    def whole_output(self, tensor: torch.Tensor, splits: Mapping[str, Split]) -> torch.Tensor:
        for axis in reversed([a for a in self.partitioner.axes if a in splits]):
            tensor = gathered(tensor, splits[axis], self.partitioner.axes[axis])
        return tensor

    def stages_after(self, name: str) -> int:
        mine = [s for s in self.placement.stages_of[name] if s in self.placement.stages]
        return self.placement.order.stages - 1 - max(mine) if self.placement.pipelined else 0

    # -- programs

    def program_for(self, micro: RankMicroBatch, training: bool = True) -> tuple[MicroBatchProgram, list[torch.Tensor]]:
        """What runs a micro-batch, and its tensors."""
        batch = (to_device(micro.input, self.device, self.dtype), to_device(micro.target, self.device, self.dtype))
        leaves, _ = flatten(batch)
        key = (
            training,
            micro.samples,
            *((tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else repr(v) for v in leaves),
        )
        if key not in self._ready:
            with self._captures.mode:
                fake = [
                    torch.empty(v.shape, dtype=v.dtype, device=v.device) if isinstance(v, torch.Tensor) else v
                    for v in leaves
                ]
            self._ready[key] = self._made(flatten(batch)[1](fake), micro.samples, training)
        ready = self._ready[key]
        return ready, self._own([v for v in leaves if isinstance(v, torch.Tensor)], ready)

    def _own(self, tensors: list[torch.Tensor], ready: MicroBatchProgram) -> list[torch.Tensor]:
        """This rank's parts of a batch: its tiles, its tokens."""
        heads = [n for n in ready.spread.graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch"]
        own = []
        for node, t in zip(heads, tensors, strict=True):
            for axis, split in splits_of(node).items():
                t = part_of(t, split, self.groups.coordinates[axis])
            own.append(t.contiguous())
        return own

    def _made(self, batch: Any, samples: int, training: bool) -> MicroBatchProgram:
        captured, own, names = self._captures.capture(batch, samples, training=training)
        with compute_precision(self.plan.precision, self.device):
            spread = self.partitioner.partition(captured, present=samples > 0)
        constants = self._filling.constants(captured.constants)
        if not self.placement.pipelined:
            program = StageProgram(self._again(spread.graph, constants), self.root, constants)
            return MicroBatchProgram(captured, spread, program, None, own, names)
        starts = self.placement.boundaries(captured)
        nodes = graph_operators(spread.graph)
        at = [next((i for i, n in enumerate(nodes) if n.meta.get("origin", -1) >= s), len(nodes)) for s in starts]
        stages = cut_into_stages(spread.graph, at)
        strange = [name for name in _read(stages, self.placement.stages) if not self.placement.has(name)]
        if strange:
            raise PlanError(
                f"a micro-batch of this shape needs {strange[0]} in another stage than the first one",
                rule="a stage holds the parameters that the first batch needs there",
                fix="split= at other modules",
            )
        if self.recomputed_layers:
            again = [replace(s, graph=self._again(s.graph, constants)) if s.graph else s for s in stages.stages]
            stages = replace(stages, stages=tuple(again))
        return MicroBatchProgram(
            captured, spread, None, stages.bind(self.placement.stages, self.root, constants), own, names
        )

    def _again(self, graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
        return recompute_layers(graph, self.recomputed_layers, constants) if self.recomputed_layers else graph


def _read(stages: Stages, mine: frozenset[int]) -> list[str]:
    """The parameters and buffers that these stages read: evaluation leaves some unread, such as a norm's count."""
    graphs = [g for s in sorted(mine) if (g := stages.stages[s].graph) is not None]
    heads = [n for g in graphs for n in g.nodes if n.op == "placeholder"]
    return [n.meta["name"] for n in heads if n.meta.get("role") in ("parameter", "buffer")]


def _programs(ready: MicroBatchProgram, mine: frozenset[int]) -> Iterator[StageProgram]:
    if ready.program is not None:
        yield ready.program
    if ready.stages is not None:
        for s in mine:
            module = ready.stages.stages[s].module
            if isinstance(module, StageProgram):
                yield module
