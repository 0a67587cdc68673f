"""The pipeline of one plan: its schedule, its stages, and the seconds of each stage for one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..clusters import Cluster
from ..core.errors import PlanError
from ..plans import Plan
from ..schedules import Pipeline, pipeline_order
from .collectives import between_stages
from .layer_time import LayerSums
from .pipeline_clock import PipelineTimes, end_seconds, time_pipeline
from .stages import Stage, StageLayer, cut_stages


@dataclass(frozen=True)
class PipelineCost:
    """The schedule of a pipeline, its stages and their durations."""

    order: Pipeline
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

    @cached_property
    def seconds(self) -> float:
        """Until the last action ends."""
        return end_seconds(self.order, self.homes, self.forward, self.backward, self.weight, self.transfer)

    @property
    def ranks(self) -> int:
        """Ranks along the pipeline."""
        return len(self.order.lanes)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes or waits for its layers' messages, over all micro-batches."""
        own = [i for i, home in self.homes.items() if home == rank]
        return self.order.micros * sum(self.forward[i] + self.backward[i] + self.weight[i] for i in own)

    @cached_property
    def busiest(self) -> LayerSums:
        """The layers of the busiest rank in one micro-batch; sends to other stages count as hidden."""
        rank = max(range(self.ranks), key=self.busy)
        layers = [x for s in self.of_rank(rank) for x in s]
        return LayerSums(
            sum(x.forward for x in layers),
            sum(x.backward for x in layers),
            sum(x.recompute for x in layers),
            sum(x.comm_forward + x.comm_backward for x in layers),
            self.sent_by(rank) + sum(x.hidden for x in layers),
        )

    @property
    def bubble(self) -> float:
        """The share of the time until the last action ends in which ranks do not compute."""
        whole = self.ranks * self.seconds
        return 1 - sum(map(self.busy, range(self.ranks))) / whole if whole else 0.0

    def times(self) -> PipelineTimes:
        """When each action and each transfer starts and ends."""
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


def pipeline_cost(layers: Sequence[StageLayer], plan: Plan, cluster: Cluster, model: str) -> PipelineCost:
    """Cut the layers of a rank into the plan's stages; `model` is named in errors."""
    order = pipeline_order(plan.schedule, plan.pp, plan.micro, plan.virtual)
    stages = cut_stages(layers, order.stages, plan.begins)
    if len(stages) < order.stages:
        raise PlanError(
            f"{order.stages} stages for {model}, which has {len(stages)} layers with parameters",
            rule=f"every stage has a layer of its own: {order.stages} > {len(stages)}",
            fix=f"pp x virtual = {len(stages)} or less",
        )
    separate = order.splits_backward  # scans the schedule, so it is asked once
    weight = tuple(sum(x.weight for x in s) if separate else 0.0 for s in stages)
    backward = tuple(sum(x.backward + x.comm_backward for x in s) - w for s, w in zip(stages, weight, strict=True))
    return PipelineCost(
        order,
        stages,
        tuple(sum(x.forward + x.comm_forward for x in s) for s in stages),
        backward,
        weight,
        tuple(between_stages(s[-1].output, plan, cluster) for s in stages[:-1]),
        order.homes(),
    )
