"""One training step as data: what a rank computes, sends and waits for.

`Step.parts` adds it up for an estimate, and the simulator draws the same step as spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..plans import Plan
from ..plans.engine_constants import LOSS_MESSAGE_BYTES
from .collectives import collective_seconds
from .data_parallel_comm import (
    CollectiveMessage,
    LayerCollectives,
    exposed_communication,
    prefetches,
    reduces_every_micro_batch,
)
from .layer_time import LayerCommTime, LayerSums, LayerTime
from .pipeline_cost import PipelineCost
from .tuning import OPS_BETWEEN_CAPTURED_STEPS, OPS_BETWEEN_STEPS


@dataclass(frozen=True, slots=True)
class TailPart:
    """One thing that a rank does after its last backward."""

    part: str
    """The key of `Estimate.parts` that it is added to."""
    name: str
    """On a timeline."""
    seconds: float
    messages: tuple[CollectiveMessage, ...] = ()
    """The collectives that it consists of, if it is communication on the links."""

    @classmethod
    def of(cls, name: str, messages: Sequence[CollectiveMessage]) -> TailPart:
        """Collectives, one after the other."""
        return cls("communication", name, sum(m.seconds for m in messages), tuple(messages))


Tail = tuple[TailPart, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan. All ranks of a pipeline stage do the same."""

    plan: Plan
    """As the devices run it."""
    cluster: Cluster
    """As the plan's ranks find it."""
    layers: Sequence[LayerTime]
    """Compute of one micro-batch, in the order of the forward; with a pipeline, of all stages."""
    layer_comm: Sequence[LayerCommTime]
    """Messages of the same layers among the ranks that share them."""
    collectives: LayerCollectives
    """Data-parallel collectives around the same layers; none with a pipeline, which has them in its tail."""
    busiest: LayerSums
    """The sums of one micro-batch on the busiest rank."""
    sharded_units: float
    """Seconds that zero=3 adds to a micro-batch beyond its messages."""
    pipeline: PipelineCost | None
    """The stages and their schedule; None if there is one stage."""
    tails: tuple[Tail, ...]
    """After the last backward, by pipeline rank."""
    notes: tuple[str, ...] = ()

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether gradients are reduced in every micro-batch, not only in the last."""
        return reduces_every_micro_batch(self.plan)

    @property
    def prefetches(self) -> tuple[bool, bool]:
        """Whether parameters are gathered one layer ahead, in the forward and in the backward."""
        return prefetches(self.plan, self.cluster)

    def parts(self) -> tuple[dict[str, float], float]:
        """(seconds by part, which add up to the step; seconds of hidden communication)."""
        m, busiest = self.plan.micro, self.busiest
        exposed, hidden = exposed_communication(self.layers, self.collectives, self.plan, self.cluster)
        recompute = m * busiest.recompute
        parts = {
            "forward": m * busiest.forward,
            "backward": m * busiest.backward - recompute,
            "recompute": recompute,
            "bubble": 0.0,
            "communication": m * (busiest.communication + self.sharded_units) + exposed,
            "optimizer": 0.0,
            "overhead": 0.0,
        }
        if self.pipeline is None:
            del parts["bubble"]
        else:
            busy = m * (busiest.forward + busiest.backward + busiest.communication)
            # without a drain, updates are among the passes, and part of the pipeline's time
            parts["bubble"] = max(0.0, self.pipeline.seconds - busy - self.pipeline.updating(self.slowest))
        for part in self.tails[self.slowest]:
            parts[part.part] += part.seconds
        return parts, hidden + m * busiest.hidden

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts()[0].values())

    def busy(self, rank: int) -> float:
        """Seconds in which a pipeline rank computes or communicates: all of the step but its bubble."""
        if self.pipeline is None:
            return self.seconds
        return self.pipeline.busy(rank) + sum(part.seconds for part in self.tails[rank])

    def compute(self, rank: int) -> float:
        """Seconds of a pipeline rank's passes and update, without messages."""
        update = sum(p.seconds for p in self.tails[rank] if p.part == "optimizer")
        if self.pipeline is not None:
            return self.pipeline.compute(rank) + update
        return self.plan.micro * sum(x.forward + x.backward for x in self.layers) + update

    def with_pipeline(self, pipeline: PipelineCost | None) -> Step:
        """This step with other seconds of its stages, and what follows from its layers, stages and tails."""
        if pipeline is None:
            return replace(self, busiest=LayerSums.of(self.layers, self.layer_comm))
        if pipeline.never_drains:
            pipeline = replace(pipeline, update=tuple(sum(part.seconds for part in tail) for tail in self.tails))
        return replace(self, pipeline=pipeline, busiest=pipeline.busiest)

    @property
    def slowest(self) -> int:
        """The pipeline rank whose tail counts: the longest; without a drain, the busiest rank's."""
        if self.pipeline is not None and self.pipeline.never_drains:
            return self.pipeline.busiest_rank
        return max(range(len(self.tails)), key=lambda rank: sum(p.seconds for p in self.tails[rank]))


def loss_agreement_seconds(plan: Plan, cluster: Cluster) -> float:
    """The small all-reduce by which all ranks agree on the loss.

    Replicas on CPUs arrive at different times; ranks that split a model have met in their layers just before.
    """
    message = collective_seconds("all_reduce", plan.ranks, LOSS_MESSAGE_BYTES, cluster)
    if cluster.device.kind == "cpu" and plan.ranks > 1 and not plan.splits_model:
        return max(message, cluster.mid_step_message_s)
    return message


def gap_between_steps(cluster: Cluster, *, captured: bool = False) -> float:
    """How long a GPU is idle between steps: the host reads the loss, and only then starts the next step."""
    device = cluster.device
    if device.kind != "cuda":
        return 0.0
    operators = OPS_BETWEEN_CAPTURED_STEPS if captured else OPS_BETWEEN_STEPS
    return operators * device.host_overhead.get("forward", device.launch)
