"""Adds to a laid-out step what its messages lose where they share links: with each other, and with those of layers.

An estimate counts every message as if no message of another kind were on its links. The step is replayed with fair
shares where messages meet; what it takes longer is its link contention. Pipelines that do not drain stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from ..costs.data_parallel_comm import CollectiveMessage
from ..costs.layer_time import largest_micro_batch
from ..costs.link_traffic import layer_traffic
from ..costs.operator_model import OperatorCostModel
from ..costs.pipeline_cost import PipelineCost
from ..costs.stages import StageLayer
from ..costs.step import Step, TailPart
from ..models.profile import Profile
from ..theory.alpha_beta import Port
from .lanes import Lanes, Phase, Row
from .message_flows import Flow, StagePorts
from .shared_pipeline import Named, Part, PipelineFlows, SharedPasses, replay_shared
from .step import StepLayout, around_meeting, pass_rows, rows_seconds, sequence_rows, tail_rows

_SAME_MOMENT = 1e-12
"""Relative to the step: messages that overlap for less do not meet."""


def with_link_contention(layout: StepLayout, model: OperatorCostModel, profile: Profile) -> StepLayout:
    """The layout in which messages that are on a link at the same time share it fairly."""
    step, sharing = layout.step, _Sharing(layout.step, model, profile)
    if step.pipeline is None:
        rows, passes = [sequence_rows(step, sharing)], None
    elif step.pipeline.never_drains or (shared := sharing.pipeline(step.pipeline)) is None:
        return layout
    else:
        rows, passes = _shared_rows(step, shared), shared.times
    longer = rows_seconds(rows) - rows_seconds(layout.rows)
    if abs(longer) <= _SAME_MOMENT * rows_seconds(layout.rows):
        return layout
    return replace(layout, rows=rows, passes=passes, contention=layout.stretch * longer)


@dataclass(eq=False)
class _Sharing:
    """The flows of a step."""

    step: Step
    model: OperatorCostModel
    profile: Profile
    known: dict[object, Flow] = field(default_factory=dict)

    @cached_property
    def ports(self) -> StagePorts:
        return StagePorts(self.step.plan, self.step.cluster)

    def layer_flow(self, layer: int, phase: int, seconds: float, rank: int = 0, share: float = 1.0) -> Flow:
        """Messages that a layer waits for in the forward (0) or the backward (1)."""
        n = largest_micro_batch(self.profile.batch_size, self.step.plan)
        traffic = layer_traffic(self.model, self.profile, self.step.plan, n, layer)[phase]
        return self.ports.group_flow(seconds, (replace(t, bytes=share * t.bytes) for t in traffic), rank)

    def waited(self, phase: Phase, seconds: float) -> Flow:
        """Messages that a layer of a step without a pipeline waits for."""
        if (phase, seconds) not in self.known:
            self.known[phase, seconds] = self.layer_flow(self._numbers[phase[0]], phase[1], seconds)
        return self.known[phase, seconds]

    def in_flight(self, message: CollectiveMessage) -> Flow:
        """A collective of replicas of a step without a pipeline."""
        if message not in self.known:
            self.known[message] = self.ports.collective_flow(message, message.seconds, 0)
        return self.known[message]

    @cached_property
    def _numbers(self) -> list[int]:
        """The number in the profile of every layer, repeats one by one."""
        layers = self.model.rank_model(self.step.plan).profile.layers
        return [i for i, x in enumerate(layers) for _ in range(x.repeats)]

    def pipeline(self, cost: PipelineCost) -> SharedPasses | None:
        """The passes of a pipeline on shared links; None if no two messages meet on one."""
        sends = {
            (a, b): self.ports.send_flow(
                cost.transfer[min(a, b)], cost.stages[min(a, b)][-1].output, home, cost.homes[b]
            )
            for a, home in cost.homes.items()
            for b in (a - 1, a + 1)
            if 0 <= b < len(cost.stages) and cost.homes[b] != home
        }
        after = [list(self._after(rank)) for rank in range(cost.ranks)]
        between = {port for flow in sends.values() for port in flow.ports}
        between |= {port for parts in after for _, part, _ in parts if isinstance(part, Flow) for port in part.ports}
        layers = self._layer_parts(cost)
        alone = not any(part.ports & between for stage in layers["F"] for part in stage if isinstance(part, Flow))
        if alone:
            layers = {"F": _whole(cost.forward), "B": _whole(cost.backward), "W": _whole(cost.weight)}
        flows = PipelineFlows(cost.order, layers, sends, after, self.step.slowest)
        if alone and not _meet(self._claims(flows, cost), _SAME_MOMENT * self.step.seconds):
            return None
        return replay_shared(flows)

    def _after(self, rank: int) -> Iterator[Named]:
        """Parts of a rank between its last backward and the meeting of all ranks."""
        flows: dict[CollectiveMessage, Flow] = {}  # buckets are alike
        for part in around_meeting(self.step.tails[rank])[0]:
            if not part.messages:
                yield part.name, part.seconds, 0.0
            for message in part.messages:
                if message not in flows:
                    flows[message] = self.ports.collective_flow(message, message.seconds, rank)
                yield message.name, flows[message], message.bytes

    def _layer_parts(self, cost: PipelineCost) -> dict[str, list[list[Part]]]:
        """Every action, layer by layer."""
        split = any(cost.weight)
        known: dict[tuple[int, int, float, float, int], Flow] = {}

        def waits(x: StageLayer, phase: int, rank: int) -> list[Part]:
            seconds = (x.comm_forward, x.comm_backward)[phase]
            key = x.layer, phase, seconds, x.share, rank
            if seconds and key not in known:
                known[key] = self.layer_flow(x.layer, phase, seconds, rank, x.share)
            return [known[key]] if seconds else []

        parts: dict[str, list[list[Part]]] = {"F": [], "B": [], "W": _whole(cost.weight)}
        for i, stage in enumerate(cost.stages):
            home = cost.homes[i]
            parts["F"].append([p for x in stage for p in (x.forward, *waits(x, 0, home))])
            parts["B"].append([p for x in reversed(stage) for p in (x.backward - split * x.weight, *waits(x, 1, home))])
        return parts

    def _claims(self, flows: PipelineFlows, cost: PipelineCost) -> Iterator[tuple[Port, float, float]]:
        """(port, start, end) of every leg, if all messages take the time that they take alone."""
        ends = [0.0] * cost.ranks
        for timed in cost.times().actions:
            ends[timed.rank] = max(ends[timed.rank], timed.end)
        ends[flows.last] = cost.seconds
        for sent in cost.times().transfers:
            yield from _legs(flows.sends[sent.action.stage, sent.stage], sent.start)
        for now, parts in zip(ends, flows.after, strict=True):
            for _, part, _ in parts:
                if isinstance(part, Flow):
                    yield from _legs(part, now)
                now += part.seconds if isinstance(part, Flow) else part


def _whole(seconds: Iterable[float]) -> list[list[Part]]:
    return [[s] for s in seconds]


def _legs(flow: Flow, start: float) -> Iterator[tuple[Port, float, float]]:
    now = start + flow.startup
    for leg in flow.legs:
        yield from ((port, now, now + leg.seconds) for port in leg.ports)
        now += leg.seconds


def _meet(claims: Iterable[tuple[Port, float, float]], slack: float) -> bool:
    """Whether two claims of a port overlap."""
    by_port: defaultdict[Port, list[tuple[float, float]]] = defaultdict(list)
    for port, start, end in claims:
        by_port[port].append((start, end))
    for own in by_port.values():
        own.sort()
        if any(later[0] < earlier[1] - slack for earlier, later in pairwise(own)):
            return True
    return False


def _shared_rows(step: Step, shared: SharedPasses) -> list[list[Row]]:
    """The spans of a rank of each stage: its passes, what it sums, and what follows the meeting."""
    assert step.pipeline is not None
    rows = pass_rows(step.pipeline, shared.times)
    ends = [max(timed.end for timed in shared.times.actions if timed.rank == rank) for rank in range(len(rows))]
    ends[step.slowest] = max(ends)
    before = [parts[-1][2] if parts else end for parts, end in zip(shared.reductions, ends, strict=True)]
    longest = _seconds(around_meeting(step.tails[step.slowest])[1])
    for rank, own in enumerate(rows):
        messages = {m.name for part in step.tails[rank] for m in part.messages}
        own += [
            ("communication" if n in messages else "compute", n, a, b, size)
            for n, a, b, size in shared.reductions[rank]
            if b > a
        ]
        after = around_meeting(step.tails[rank])[1]
        lanes = Lanes(1.0, before[rank])
        lanes.wait_until(before[step.slowest] + min(0.0, longest - _seconds(after)))
        own += tail_rows(lanes, after)
    return rows


def _seconds(parts: Iterable[TailPart]) -> float:
    return sum(part.seconds for part in parts)
