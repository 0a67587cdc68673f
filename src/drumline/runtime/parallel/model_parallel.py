"""The strategy of plans that split the model itself: tensor, spatial, context and pipeline parallelism.

The job's Python runs only to be captured, on fake tensors, once for each shape of a micro-batch. The captured graph is
partitioned over the plan's axes, cut into stages, and run; its parameters keep the user's names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...comm.gloo_fallbacks import backend_of
from ...core.job import Job
from ...datasets.stream import RankBatch, RankMicroBatch
from ...partition.capture import CapturedGraph
from ...partition.program import ParameterHolder
from ...partition.sharding.layout import Split
from ...partition.sharding.redistribution import gathered
from ...partition.stage_boundaries import FLOPS_PER_BYTE, BoundaryPrices
from ...plans import Plan
from ...plans.keys import MEASURED
from ...reports.split_summary import split_summary
from ...schedules.pipeline import Action
from ..memory.recompute import recomputed_layers
from ..numerics.precision import compute_precision, float32_arithmetic
from ..pipeline.channels import PipelineChannels
from ..pipeline.clock import LaneTiming, PipelineClock
from ..pipeline.stage_actions import PipelineMicroBatch, StepHooks
from ..pipeline.step import PipelineRunner
from ..pipeline.tied_parameters import sum_tied_gradients, tied_ranks
from ..state.recorder import StepRecorder
from ..strategies.buckets import GradientGroups
from ..strategies.flat_shard import FlatShard
from ..strategies.module_outputs import OutputSeen
from ..strategies.strategy import MicroLoss, StepContext
from .graph_partition import GraphPartitioner
from .initial_weights import InitialWeights
from .job_capture import JobCapture
from .placement import Placement, stage_modules
from .programs import MicroBatchProgram, MicroBatchPrograms
from .rank_grid import DATA_AXES, SAMPLE_AXES, RankGrid
from .segment_timing import measured_prices


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
        self.plan, self.grid, self.device, self.dtype, self.record = plan, grid, device, dtype, record
        self.partitioner = GraphPartitioner(plan, grid, device, lambda axis, name, t: record.message(name, t))
        self._capture = JobCapture(job, plan, device, dtype)
        self.template = self._capture.template
        """The user's module on fake tensors: this is captured."""
        layers = recomputed_layers(self.template, "full") if plan.recompute == "full" else []
        self._seen: OutputSeen | None = None
        self._count = 0
        self.peak = 0
        """Peak number of forwards that waited for their backwards in the last step of a pipeline."""
        group = grid.group(["pp"])
        back = grid.second_group(["pp"]) if group is not None and backend_of(group) == "nccl" else None
        self.channels = PipelineChannels(group, back, device=device) if group is not None else None
        self._runner = PipelineRunner(self.channels) if self.channels is not None else None
        self.clock = PipelineClock(device)
        """Times the actions of a pipeline."""
        first_graph = self._capture.capture_first(grid.size(DATA_AXES))
        first = first_graph.captured
        with compute_precision(plan.precision, device):
            self.partitioner.choose_splits(first)
        prices = self._prices(first, flops_per_byte)
        self.placement = Placement(plan, grid, first, self.partitioner.splits, prices)
        """This rank's part of the model."""
        with compute_precision(plan.precision, device):
            self.first = self.partitioner.partition(first)
        """This rank's graph of the first batch: it shows what could not be split, and creates all groups."""
        self.root = ParameterHolder()
        """This rank's parameters and buffers."""
        weights = InitialWeights(self._capture, self.placement, self.root)
        weights.broadcast(first)
        recomputed = frozenset(spec.name for spec in layers)
        self._programs = MicroBatchPrograms(
            self._capture,
            self.partitioner,
            self.placement,
            weights,
            self.root,
            recomputed,
            first=(first_graph, self.first),
        )
        if self.partitioner.shared_gradients:  # parameters that tp ranks have whole and use on different parts
            self.sum_separately(
                self.partitioner.shared_gradients, GradientGroups(shard, grid.group(["replica", *SAMPLE_AXES, "tp"]))
            )
        self.counts_loss, self.shows_outputs = self.placement.counts_loss, self.placement.shows_outputs
        self.reads_input = not self.placement.pipelined or 0 in self.placement.stages
        self.output_order = self.first.outputs
        left = self.partitioner.choice.unsplit if self.partitioner.choice else {}
        self.summary = split_summary(self.first.gathered, left, [name for name, _ in self.placement.starts])

    def _prices(self, captured: CapturedGraph, flops_per_byte: float | None) -> BoundaryPrices:
        """The costs by which the stages of a pipeline are balanced."""
        if self.channels is None or self.plan.split != MEASURED:
            return BoundaryPrices(per_byte=flops_per_byte or FLOPS_PER_BYTE[self.device.type])
        slices = self.grid.size(DATA_AXES)
        return measured_prices(self._capture, captured, stage_modules(captured), slices, self.channels)

    # -- running

    def forward_backward(self, batch: RankBatch, step: StepContext) -> tuple[list[MicroLoss], bool]:
        self._count = 0
        if not self.placement.pipelined:
            return super().forward_backward(batch, step)
        factor = self.gradient_divisor * step.scale / batch.samples
        with self.accumulate(last=False), float32_arithmetic(step.precision, step.device):
            losses, weighted = self.train_stages(batch.micros, factor, step)
        with step.phase("communication"):
            tied = tied_ranks(self._cut, self.placement.order)
            if tied and self.channels is not None:
                sum_tied_gradients(dict(self.root.named_parameters()), tied, self.channels)
            self.send_gradients()
        return [(total.double(), weight.double()) for total, weight, *_ in losses], weighted

    def loss_of(self, micro: RankMicroBatch) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Run a micro-batch: sum and weight of its loss, and whether the job gave the weight."""
        entry, tensors = self._programs.of(micro)
        assert entry.program is not None
        self._observe(entry, self._count)
        self._count += 1
        total, weight = entry.program(*tensors)
        return total, weight, entry.own_weight

    def train_stages(
        self, micros: Sequence[RankMicroBatch], factor: float, step: StepContext
    ) -> tuple[Sequence[tuple[torch.Tensor, ...]], bool]:
        """Run all micro-batches through the stages, forwards and backwards; returns the losses that this rank has."""
        runs = [self._programs.of(m) for m in micros]
        batches = [self.micro_batch(r, t) for r, t in runs]

        def before(stage: int, micro: int) -> None:
            step.seed(micro, stage)
            self._observe(runs[micro][0], micro)

        runner = self._configured_runner(before, step)
        with self.clock.step():
            result = runner.train(self.placement.order_of(len(micros)), batches, factor)
        self._cut, self.peak = batches[0].cut, result.peak
        return result.losses, any(r.own_weight for r, _ in runs)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[RankMicroBatch]) -> list[dict[str, torch.Tensor]]:
        """(sum, weight) of the loss and of each metric over all micro-batches; zeros if another rank counts them."""
        runs = [self._programs.of(m, training=False) for m in micros]
        names = runs[0][0].names
        if self.placement.pipelined:
            runner = self._configured_runner(lambda stage, micro: None, None)
            batches = [self.micro_batch(r, t) for r, t in runs]
            results: Sequence[Any] = runner.evaluate(self.placement.order_of(len(micros)), batches).losses
        else:
            with compute_precision(self.plan.precision, self.device):
                results = [r.program(*t) for r, t in runs if r.program is not None]
        sums = torch.zeros(len(names), 2, dtype=torch.float64, device=self.device)
        for pairs in results if self.counts_loss else ():
            sums += torch.stack([p.double() for p in pairs]).view(-1, 2)
        return [dict(zip(names, sums, strict=True))]

    def program_of(self, micro: RankMicroBatch) -> tuple[MicroBatchProgram, list[torch.Tensor]]:
        """The program for a micro-batch, and this rank's part of its tensors."""
        return self._programs.of(micro)

    def micro_batch(self, entry: MicroBatchProgram, tensors: Sequence[torch.Tensor]) -> PipelineMicroBatch:
        """A micro-batch as a pipeline runs it."""
        assert entry.stages is not None
        return PipelineMicroBatch(entry.stages, {str(i): t for i, t in enumerate(tensors)})

    def _configured_runner(self, seed: Callable[[int, int], None], step: StepContext | None) -> PipelineRunner:
        """The pipeline's runner; in a step of training its actions are timed."""
        assert self._runner is not None
        names = {"F": "forward", "B": "backward", "W": "backward"}

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            clock = self.clock.action(action) if step else nullcontext()
            phase = step.phase(names[action.kind]) if step else nullcontext()
            with clock, phase, compute_precision(self.plan.precision, self.device):
                yield

        self._runner.hooks = StepHooks(seed=seed, around_action=around)
        return self._runner

    def lanes(self, last: int) -> list[LaneTiming]:
        return self.clock.lanes(last) if self.placement.pipelined else []

    # -- observation

    def watch_outputs(self, seen: OutputSeen, skip: Collection[nn.Module] = ()) -> None:
        self._seen = seen

    def unwatch_outputs(self) -> None:
        self._seen = None
        for entry in self._programs.all():
            for program in self._programs.stage_programs(entry):
                program.observe(None)

    def _observe(self, entry: MicroBatchProgram, micro: int) -> None:
        for program in self._programs.stage_programs(entry):
            program.observe(self._observer(micro) if self._seen else None)

    def _observer(self, micro: int) -> Callable[[Any, Any], Any]:
        seen = self._seen

        def observe(node: Any, value: Any) -> Any:
            if isinstance(value, torch.Tensor) and seen is not None and torch.is_grad_enabled():
                for output in node.meta["shows"]:
                    seen(micro, output, value)
            return value

        return observe

    def whole_output(self, tensor: torch.Tensor, splits: Mapping[str, Split]) -> torch.Tensor:
        for axis in reversed([a for a in self.partitioner.axes if a in splits]):
            tensor = gathered(tensor, splits[axis], self.partitioner.axes[axis])
        return tensor

    def stages_after(self, name: str) -> int:
        mine = [s for s in self.placement.stages_of[name] if s in self.placement.stages]
        return self.placement.order.stages - 1 - max(mine) if self.placement.pipelined else 0
