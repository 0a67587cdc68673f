"""The pipeline of one plan: its schedule, its stages, and the seconds of each stage for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..clusters import Cluster
from ..core.errors import PlanError
from ..plans import Plan
from ..schedules import Pipeline, pipeline_order
from .collectives import between_stages
from .layer_time import LayerSums
from .pipeline_clock import PipelineTimes, end_seconds, time_pipeline
from .stages import Stage, StageLayer, cut_stages
from .steady_pipeline import StageSeconds, batch_seconds, sample_batches, steady_seconds, steady_times


@dataclass(frozen=True)
class PipelineCost:
    """The schedule of a pipeline, its stages and their durations."""

    order: Pipeline
    """Of one step; of a pipeline that does not drain, of several."""
    micros: int
    """Micro-batches of a step."""
    stages: tuple[Stage, ...]
    forward: tuple[float, ...]
    """Seconds by stage; communication of the stage's own layers is included."""
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    """The backward for weights, where the schedule separates it."""
    transfer: tuple[float, ...]
    """Seconds by boundary between stages."""
    homes: dict[int, int]
    """Stage -> its rank."""
    update: tuple[float, ...] = ()
    """Seconds by stage of an update between the passes, where the pipeline does not drain."""
    pace: tuple[float, ...] = ()
    """Factors on the compute of every stage, whose layers are at the usual pace; empty: all of them 1."""

    @property
    def never_drains(self) -> bool:
        """Whether the next step begins before this one ends."""
        return self.order.has_updates

    @cached_property
    def seconds(self) -> float:
        """Until the last action ends; of a pipeline that does not drain, from one step to the next."""
        if self.never_drains:
            return steady_seconds(self.order, self.micros, self._stage_seconds)
        return end_seconds(self.order, self.homes, self.forward, self.backward, self.weight, self.transfer)

    @property
    def batch_seconds(self) -> float:
        """From a batch's first forward until its last backward; where the pipeline does not drain, until its update."""
        if self.never_drains:
            return batch_seconds(self.order, self.micros, self._stage_seconds)
        return self.seconds

    @property
    def ranks(self) -> int:
        """Ranks along the pipeline."""
        return len(self.order.lanes)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes or waits for its layers' messages, over all micro-batches."""
        own = [i for i, home in self.homes.items() if home == rank]
        return self.micros * sum(self.forward[i] + self.backward[i] + self.weight[i] for i in own)

    def updating(self, rank: int) -> float:
        """Seconds in which a rank updates between its passes; 0 where the update follows the pipeline."""
        return self.update[rank] if self.update else 0.0

    @cached_property
    def busiest_rank(self) -> int:
        """The rank with the most work."""
        return max(range(self.ranks), key=lambda rank: self.busy(rank) + self.updating(rank))

    @cached_property
    def busiest(self) -> LayerSums:
        """The layers of the busiest rank in one micro-batch; sends to other stages count as hidden."""
        rank = self.busiest_rank
        layers = [(x, f) for s, f, home in self._paced if home == rank for x in s]
        return LayerSums(
            sum(f * x.forward for x, f in layers),
            sum(f * x.backward for x, f in layers),
            sum(f * x.recompute for x, f in layers),
            sum(x.comm_forward + x.comm_backward for x, _ in layers),
            self.sent_by(rank) + sum(x.hidden for x, _ in layers),
        )

    @property
    def _paced(self) -> list[tuple[Stage, float, int]]:
        """Every stage with its pace and its rank."""
        return [(s, self.pace[i] if self.pace else 1.0, self.homes[i]) for i, s in enumerate(self.stages)]

    @cached_property
    def _compute(self) -> tuple[tuple[float, float], ...]:
        """Seconds of forward and backward by stage without messages, at the usual pace."""
        return tuple((sum(x.forward for x in s), sum(x.backward for x in s)) for s in self.stages)

    def compute(self, rank: int) -> float:
        """Seconds in which a rank computes, without messages, over all micro-batches."""
        passes = zip(self._paced, self._compute, strict=True)
        return self.micros * sum(f * sum(own) for (_, f, home), own in passes if home == rank)

    def at_pace(self, factors: Sequence[float]) -> PipelineCost:
        """Multiply the compute times of the ranks by factors; messages take as long as before."""
        pace = tuple(factors[self.homes[i]] for i in range(len(self.stages)))
        more = [
            ((f - 1) * own[0], (f - 1) * (own[1] - w), (f - 1) * w)
            for f, own, w in zip(pace, self._compute, self.weight, strict=True)
        ]
        return replace(
            self,
            pace=pace,
            forward=tuple(x + m[0] for x, m in zip(self.forward, more, strict=True)),
            backward=tuple(x + m[1] for x, m in zip(self.backward, more, strict=True)),
            weight=tuple(x + m[2] for x, m in zip(self.weight, more, strict=True)),
        )

    @property
    def bubble(self) -> float:
        """The share of the time until the last action ends in which ranks do not compute."""
        whole = self.ranks * self.seconds
        return 1 - sum(self.busy(r) + self.updating(r) for r in range(self.ranks)) / whole if whole else 0.0

    @property
    def _stage_seconds(self) -> StageSeconds:
        update = self.update or (0.0,) * len(self.stages)
        return StageSeconds(self.forward, self.backward, self.transfer, update)

    def times(self) -> PipelineTimes:
        """When each action and each transfer of a step starts and ends."""
        return self._times

    @cached_property
    def _times(self) -> PipelineTimes:
        if self.never_drains:
            return steady_times(self.order, self.micros, self._stage_seconds)
        return time_pipeline(
            self.order, forward=self.forward, backward=self.backward, weight=self.weight, transfer=self.transfer
        )

    def sent_by(self, rank: int) -> float:
        """Seconds of what a rank sends to other ranks' stages in one micro-batch, forward and backward."""
        pairs = [(i, i + 1) for i in range(len(self.stages) - 1)] + [(i + 1, i) for i in range(len(self.stages) - 1)]
        return sum(self.transfer[min(a, b)] for a, b in pairs if self.homes[a] == rank != self.homes[b])

    def of_rank(self, rank: int) -> list[Stage]:
        """The stages of a rank."""
        return [s for i, s in enumerate(self.stages) if self.homes[i] == rank]

    def with_stages(self, stages: Sequence[Stage]) -> PipelineCost:
        """The same pipeline with other seconds of its layers."""
        forward, backward, weight = _durations(stages, splits_backward=any(self.weight))
        return replace(self, stages=tuple(stages), forward=forward, backward=backward, weight=weight)


def _durations(stages: Sequence[Stage], *, splits_backward: bool) -> tuple[tuple[float, ...], ...]:
    """Seconds of a micro-batch by stage: forward, backward, and the backward for weights where that is separate."""
    weight = tuple(sum(x.weight for x in s) if splits_backward else 0.0 for s in stages)
    backward = tuple(sum(x.backward + x.comm_backward for x in s) - w for s, w in zip(stages, weight, strict=True))
    return tuple(sum(x.forward + x.comm_forward for x in s) for s in stages), backward, weight


def pipeline_cost(layers: Sequence[StageLayer], plan: Plan, cluster: Cluster, model: str) -> PipelineCost:
    """Cut the layers of a rank into the plan's stages; `model` is named in errors."""
    order = schedule_of(plan)
    stages = cut_stages(layers, order.stages, plan.begins)
    if len(stages) < order.stages:
        raise PlanError(
            f"{order.stages} stages for {model}, which has {len(stages)} layers with parameters",
            rule=f"every stage has a layer of its own: {order.stages} > {len(stages)}",
            fix=f"pp x virtual = {len(stages)} or less",
        )
    forward, backward, weight = _durations(stages, splits_backward=order.splits_backward)
    return PipelineCost(
        order,
        plan.micro,
        stages,
        forward,
        backward,
        weight,
        tuple(between_stages(s[-1].output, plan, cluster) for s in stages[:-1]),
        order.homes(),
    )


def schedule_of(plan: Plan) -> Pipeline:
    """The schedule of a plan's step; of a pipeline that does not drain, some steps."""
    if plan.keeps_batches_in_flight:
        return sample_batches(plan.schedule, plan.pp, plan.micro)
    return pipeline_order(plan.schedule, plan.pp, plan.micro, plan.virtual)
