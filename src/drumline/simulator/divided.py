"""Replays one step of a plan that splits the model: layers with what they wait for, or stages action by action."""

from __future__ import annotations

from collections.abc import Iterable

from ..clusters import Cluster
from ..core.timeline import Span, Timeline
from ..costs.divided import Divided, Tail, overhead
from ..costs.layers import LayerTime
from ..costs.said import Said
from ..costs.stages import profile_of
from ..costs.step import between_steps
from ..costs.traffic import Message, messages, reduced_often
from ..models.profile import Profile
from ..plans import Plan
from .lanes import Lanes

Row = tuple[str, str, float, float, float]
"""Lane, name, start, end, bytes."""


def simulate_divided(profile: Profile, plan: Plan, cluster: Cluster, *, speed: float = 1.0) -> Timeline:
    """The predicted timeline of one step; ranks of one stage do the same."""
    prices = Divided(profile, cluster, plan.precision)
    by_stage = _pipelined(prices, plan, cluster) if plan.pp > 1 else [_plain(prices, plan, cluster)]
    each = plan.ranks // plan.pp
    spans = tuple(
        Span(stage * each + i, lane, name, start / speed, end / speed, size)
        for stage, rows in enumerate(by_stage)
        for i in range(each)
        for lane, name, start, end, size in rows
    )
    return Timeline("predicted", spans)


def _plain(prices: Divided, plan: Plan, cluster: Cluster) -> list[Row]:
    lanes = Lanes(cluster.overlap)
    local = prices.local(plan)
    times, said = prices.times(plan)
    reduces = [reduce for _, reduce in messages(local.profile, plan, cluster)]
    for micro in range(plan.micro):
        sends = reduced_often(plan) or micro == plan.micro - 1
        label = f" m{micro}" if plan.micro > 1 else ""
        _micro_batch(lanes, times, said, reduces if sends else [None] * len(times), label)
        if reduced_often(plan):
            lanes.join()
    _tail(lanes, prices.tail(plan, local.profile), plan, cluster)
    return lanes.spans


def _micro_batch(
    lanes: Lanes, times: list[LayerTime], said: list[Said], reduces: Iterable[Message | None], label: str
) -> None:
    for t, s in zip(times, said, strict=True):
        lanes.compute(f"forward {t.layer.name or '(model)'}{label}", t.forward)
        lanes.hold(f"communication {t.layer.name or '(model)'}{label}", s.forward)
    for t, s, reduce in reversed(list(zip(times, said, reduces, strict=True))):
        lanes.compute(f"backward {t.layer.name or '(model)'}{label}", t.backward)
        lanes.hold(f"communication {t.layer.name or '(model)'}{label}", s.backward)
        lanes.send(reduce)


def _tail(lanes: Lanes, tail: Tail, plan: Plan, cluster: Cluster) -> None:
    for message in tail.before:
        lanes.send(message)
    lanes.join()
    lanes.compute("communication loss", overhead(plan, cluster) + between_steps(cluster))
    lanes.compute("optimizer", tail.update)
    for message in tail.after:
        lanes.send(message)
    lanes.join()


def _pipelined(prices: Divided, plan: Plan, cluster: Cluster) -> list[list[Row]]:
    """The order as it is played; then what each stage's ranks do after their last backward."""
    piped = prices.piped(plan)
    played = piped.play()
    rows: list[list[Row]] = [[] for _ in range(plan.pp)]
    for timed in played.actions:
        word = {"F": "forward", "B": "backward", "W": "weights"}[timed.action.kind]
        name = f"{word} stage {timed.action.stage} m{timed.action.micro}"
        rows[timed.rank].append(("compute", name, timed.start, timed.end, 0.0))
    for hop in played.hops:
        size = piped.stages[min(hop.stage, hop.action.stage)][-1].output
        rows[hop.src].append(("communication", f"{hop.action.kind} to stage {hop.stage}", hop.start, hop.end, size))
    for rank in range(plan.pp):
        part = profile_of(prices.local(plan).profile, piped.of_rank(rank))
        lanes = Lanes(cluster.overlap, start=played.seconds)
        lanes.compute("communication tied", prices.tied_seconds(plan))
        _tail(lanes, prices.tail(plan, part, rank), plan, cluster)
        rows[rank] += lanes.spans
    return rows
