"""This rank's stage in a pipeline that does not drain: the batches in flight on it, and the weights they need.

A batch is fed; the lane then runs its forwards, and the backwards and updates of earlier batches that come in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...core.errors import PlanError
from ...datasets.stream import RankBatch
from ...schedules.pipeline import PIPEDREAM, Action, AsynchronousLane, joins_updates
from ..numerics.precision import compute_precision, float32_arithmetic
from ..pipeline.batch_sums import BatchSums, OpenSum
from ..pipeline.channels import PipelineChannels
from ..pipeline.stage_actions import StepHooks
from ..pipeline.stream import PipelineStream
from ..pipeline.tied_parameters import OpenExchange, TiedExchange
from ..strategies.strategy import MicroLoss, StepContext
from ..strategies.weight_versions import WeightVersions
from .model_parallel import ModelParallel
from .rank_grid import DATA_AXES


@dataclass(slots=True, eq=False)
class BatchInFlight:
    """A batch on this rank, from its first forward until it is applied on every stage."""

    index: int
    """Its number since the pipeline was empty."""
    step: int
    samples: int
    micros: range
    weighted: bool
    """Whether the job weights the loss itself."""
    version: int = 0
    """Updates before its forwards, since the pipeline was empty."""
    losses: list[MicroLoss] = field(default_factory=list)
    """On the last stage: sum and weight of each micro-batch's loss."""
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """By piece, from the last backward until the update."""
    tied: OpenExchange | None = None

    @property
    def staleness(self) -> int:
        """Updates between its forwards and its own update: batches are applied in order."""
        return self.index - self.version


OnBatch = Callable[[BatchInFlight], None]


class AsynchronousStages:
    """The batches in flight on one rank. All ranks feed and drain together."""

    def __init__(self, strategy: ModelParallel) -> None:
        plan, channels = strategy.plan, strategy.channels
        assert channels is not None
        self._strategy, self._plan = strategy, plan
        self.stage, self.stages = channels.rank, plan.pp
        self.joint = joins_updates(plan.schedule, plan.pp)
        """Whether all stages apply a batch together, and know the norm of all gradients before."""
        self.versions = WeightVersions(strategy)
        self._lane = AsynchronousLane(plan.schedule, plan.pp, self.stage)
        self._first_lane = AsynchronousLane(plan.schedule, plan.pp, 0)
        """The first stage's: it is the last to apply a batch."""
        self._stream = PipelineStream(channels, self._sum_over_replicas)
        self._sums = BatchSums(self._own_channels("numbers"))
        self._tied = self._tied_exchange()
        self.batches: deque[BatchInFlight] = deque()
        """Those that are not applied on every stage yet, oldest first."""
        self._fed = 0
        self._next_micro = 0

    def feed(self, batch: RankBatch, step: StepContext, on_gradients: OnBatch, on_update: OnBatch) -> int:
        """Run what a new batch allows. Returns how many batches are applied on every stage now, the oldest ones.

        `on_gradients` gets a batch whose gradients are complete on this rank, `on_update` one to apply.
        """
        runs = [self._strategy.program_of(m) for m in batch.micros]
        first, self._next_micro = self._next_micro, self._next_micro + len(runs)
        weighted = any(entry.own_weight for entry, _ in runs)
        new = BatchInFlight(self._fed, batch.step, batch.samples, range(first, self._next_micro), weighted)
        self._fed += 1
        self.batches.append(new)
        # a batch that is applied by itself is one micro-batch: its weight is known before its backward
        factor = None if weighted and not self.joint else step.scale / batch.samples
        self._stream.feed(first, [self._strategy.micro_batch(*run) for run in runs], factor)
        new.version = self.versions.newest
        applied = sum(a.kind == "U" for a in self._first_lane.feed(len(runs)))
        with self._strategy.clock.step():
            self._run(self._lane.feed(len(runs)), step, on_gradients, on_update, first=first)
        return applied

    def drain(self, step: StepContext, on_gradients: OnBatch, on_update: OnBatch) -> int:
        """Run the rest of all batches in flight. Returns how many there were."""
        self._first_lane.drain()
        with self._strategy.clock.untimed():  # not a step of its own
            self._run(self._lane.drain(), step, on_gradients, on_update)
        return len(self.batches)

    def confirm(self, batch: BatchInFlight) -> None:
        """A batch is done on every rank."""
        self._stream.confirm(batch.micros[-1])

    def restart(self) -> None:
        """Start over after a drain."""
        assert not self.batches, "batches are in flight"
        self._stream.finish()
        self._sums.finish()
        self.versions.restart()
        self._fed = self._next_micro = 0

    def _run(
        self, actions: Sequence[Action], step: StepContext, on_gradients: OnBatch, on_update: OnBatch, first: int = 0
    ) -> None:
        ends = {batch.micros[-1]: batch for batch in self.batches}

        def done(action: Action) -> None:
            if action.kind == "B" and action.micro in ends:
                batch = ends[action.micro]
                batch.losses = [(x[0].double(), x[1].double()) for x in self._stream.losses(batch.micros)]
                on_gradients(batch)
            elif action.kind == "U":
                with self._strategy.clock.action(action):
                    on_update(ends[action.micro])

        strategy = self._strategy
        with strategy.accumulate(last=False), float32_arithmetic(step.precision, step.device):
            self._stream.run(actions, done, self._hooks(step, first))

    def _hooks(self, step: StepContext, first: int) -> StepHooks:
        strategy = self._strategy

        @contextmanager
        def around(action: Action) -> Iterator[None]:
            precision = compute_precision(self._plan.precision, strategy.device)
            forward = action.kind == "F"
            phase = step.phase("forward" if forward else "backward")
            weights = self.versions.used(action.micro) if forward else self.versions.shown(action.micro)
            with strategy.clock.action(action), phase, weights, precision:
                yield

        return StepHooks(seed=lambda stage, micro: step.seed(micro - first, stage), around_action=around)

    # -- gradients of a batch

    def collect_gradients(self, batch: BatchInFlight) -> int:
        """Sum the gradients of a batch over the replicas and keep them for its update; the next begins without.

        Returns the number of trained parameters that it did not reach. The pieces show the gradients until `hide`.
        """
        strategy = self._strategy
        strategy.send_gradients()
        strategy.gather_gradients()
        unreached = strategy.unreached()
        if unreached:
            strategy.drop_unreached()  # replicas run the same graphs, and reach the same parameters
        batch.gradients = strategy.take_gradients()
        if self._tied is not None:
            own = self._tied_gradients(batch, self._tied.names)
            batch.tied = self._tied.start(own)
            batch.tied.finish(own, self._tied.complete_here)
        strategy.put_gradients(batch.gradients)
        return unreached

    def gradients_of(self, batch: BatchInFlight) -> list[tuple[str, torch.Tensor]]:
        """The gradients that are kept of a batch, each with its parameter's name."""
        named = zip(self._strategy.trained_pieces(), batch.gradients, strict=False)
        return [(piece.name, gradient) for piece, gradient in named if gradient is not None]

    def hide(self) -> None:
        """Take the gradients off the pieces; they are kept with their batch."""
        self._strategy.put_gradients([None] * len(self._strategy.trained_pieces()))

    @contextmanager
    def applying(self, batch: BatchInFlight) -> Iterator[None]:
        """Around the optimizer's step of a batch: its gradients, and a copy of the weights if they are needed again."""
        assert self.versions.newest == batch.index, "batches are applied in order"
        if batch.tied is not None:
            batch.tied.finish(self._tied_gradients(batch, batch.tied.names), batch.tied.names)
        with self.versions.updating():
            self._strategy.put_gradients(batch.gradients)
            yield
        self.drop(batch)

    def drop(self, batch: BatchInFlight) -> None:
        """Forget the gradients of a batch."""
        if batch.tied is not None:  # the other ranks have sent theirs
            batch.tied.finish(self._tied_gradients(batch, batch.tied.names), batch.tied.names)
        batch.gradients = []
        self.hide()

    def sum_numbers(self, numbers: torch.Tensor) -> OpenSum:
        """Start to sum numbers of a batch over all ranks."""
        return self._sums.start(self._sum_over_replicas(numbers))

    def _sum_over_replicas(self, numbers: torch.Tensor) -> torch.Tensor:
        """Over the ranks with the same stage, which are at the same batch."""
        group = self._strategy.grid.group(DATA_AXES)
        if group is not None:
            numbers = numbers.clone()
            dist.all_reduce(numbers, group=group)
        return numbers

    def _own_channels(self, use: str) -> PipelineChannels:
        """Channels along the pipeline for one use, whose messages do not mix with others."""
        grid = self._strategy.grid
        group, back = grid.second_group(["pp"], use), grid.second_group(["pp"], f"{use} back")
        assert group is not None
        return PipelineChannels(group, back, device=self._strategy.device)

    # -- tied parameters

    def _tied_exchange(self) -> TiedExchange | None:
        placement = self._strategy.placement
        trained = {name for name, p in self._strategy.template.named_parameters() if p.requires_grad}
        tied = {name: stages for name, stages in placement.stages_of.items() if len(stages) > 1 and name in trained}
        if not tied:
            return None
        if self._plan.schedule == PIPEDREAM:
            name, stages = next(iter(tied.items()))
            raise PlanError(
                f"{name} is used in stages {', '.join(map(str, stages))}",
                where=f"plan {self._plan}",
                rule="under schedule=pipedream every stage updates at another time, and a tied parameter has one value",
                fix="schedule=pipedream-2bw with micro >= pp, or schedule=1f1b",
            )
        ranks = {name: tuple(sorted(set(stages))) for name, stages in tied.items()}
        return TiedExchange(self._own_channels("tied"), ranks)

    def _tied_gradients(self, batch: BatchInFlight, names: Sequence[str]) -> dict[str, torch.Tensor]:
        places = {piece.name: i for i, piece in enumerate(self._strategy.trained_pieces())}
        result = {}
        for name in names:
            i = places[name]
            if batch.gradients[i] is None:
                batch.gradients[i] = torch.zeros_like(self._strategy.trained_pieces()[i].value)
            gradient = batch.gradients[i]
            assert gradient is not None
            result[name] = gradient
        return result
