"""Draws one predicted step as a timeline: the parts of `costs.step.Step`, laid out on the lanes of each rank.

Ranks that do the same are drawn once: one for every pipeline stage, with the number of ranks that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..clusters import Cluster
from ..core.timeline import Span, Timeline
from ..core.units import format_seconds
from ..costs.estimate import Estimate
from ..costs.operator_model import OperatorCostModel
from ..costs.pipeline_clock import PipelineTimes
from ..costs.pipeline_cost import PipelineCost
from ..costs.scaled_step import scaled_step
from ..costs.step import Step, Tail
from ..models.profile import Profile
from ..plans import Plan
from .lanes import Lanes, MessageFlows, Row

LARGEST_STRETCH = 0.005
"""Relative difference between layout and estimate up to which the timeline says nothing about it."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step laid out in time, by pipeline stage."""

    step: Step
    rows: list[list[Row]]
    """Of a rank of each stage, in seconds of the layout."""
    stretch: float = 1.0
    """Seconds of the timeline over those of the layout."""
    notes: tuple[str, ...] = ()
    passes: PipelineTimes | None = None
    """Of a pipeline, where they differ from those of its schedule alone."""
    contention: float = 0.0
    """Seconds of the timeline that the step is longer because messages share links (link_contention.py)."""

    @property
    def seconds(self) -> float:
        """Of the timeline."""
        return self.stretch * rows_seconds(self.rows)

    def timeline(self, speed: float = 1.0) -> Timeline:
        """The spans of every stage's first rank, which stands for all ranks of the stage."""
        plan, k = self.step.plan, self.stretch / speed
        ranks = plan.ranks // plan.pp
        spans = tuple(
            Span(stage * ranks, lane, name, start * k, end * k, size)
            for stage, own in enumerate(self.rows)
            for lane, name, start, end, size in own
        )
        counts = {stage * ranks: ranks for stage in range(len(self.rows))} if ranks > 1 else {}
        return Timeline("predicted", spans, self.notes, counts)


def lay_out(step: Step, estimate: Estimate | None = None) -> StepLayout:
    """Lay out a step of the operator model, or the parts of an `estimate` of the same plan, with which it then ends."""
    if estimate is None:
        return StepLayout(step, step_rows(step))
    return lay_out_to(scaled_step(step, estimate), estimate.step_seconds, estimate.parts)


def lay_out_to(step: Step, end: float, parts: Mapping[str, float] | None = None) -> StepLayout:
    """Lay out a step that takes `end` seconds, in these parts.

    An estimate adds up closed forms of overlaps and bubbles, so a layout of its parts differs by some percent: it is
    stretched by that, and a note says which parts differ.
    """
    rows = step_rows(step)
    seconds = rows_seconds(rows)
    stretch = end / seconds if seconds else 1.0
    notes: tuple[str, ...] = ()
    if abs(stretch - 1) > LARGEST_STRETCH:
        notes = (
            f"Laid out in time, the parts of the estimate take {format_seconds(seconds)}{_in_words(step, end, parts)}; "
            f"the timeline is drawn {100 * abs(stretch - 1):.1f}% {'longer' if stretch > 1 else 'shorter'}, to end "
            "with the estimate.",
        )
    return StepLayout(step, rows, stretch, notes)


def layout_differences(step: Step, parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds that each part of a step takes longer in its layout than in an estimate, the largest first.

    `step` has the parts of the estimate as far as both count them; the clock of its schedule gives its bubble, and the
    lanes of a rank what stays exposed of its messages.
    """
    own, _ = step.parts()
    more = {part: own.get(part, 0.0) - parts.get(part, 0.0) for part in {*own, *parts}}
    return dict(sorted(more.items(), key=lambda item: (-abs(item[1]), item[0])))


def _in_words(step: Step, end: float, parts: Mapping[str, float] | None) -> str:
    """` (bubble +1.20 s, communication -20.0 ms)`: what the layout changes by more than is left without a note."""
    differences = layout_differences(step, parts) if parts else {}
    words = [
        f"{part} {'+' if s > 0 else '-'}{format_seconds(abs(s))}"
        for part, s in differences.items()
        if abs(s) > LARGEST_STRETCH * end
    ]
    return f" ({', '.join(words)})" if words else ""


def simulate_step(
    profile: Profile, plan: Plan, cluster: Cluster, *, speed: float = 1.0, estimate: Estimate | None = None
) -> Timeline:
    """The predicted timeline of one step of ranks that are alike and meet in every step.

    It shows the seconds of the operator model, or those of an `estimate` of the same plan by any model. `speed` is that
    of a machine which runs at a share of its measured speed: all spans are stretched by it. For ranks that differ and
    other plans, see workers.py.
    """
    assert plan.sync == "allreduce", f"{plan}: its replicas do not meet in every step"
    step = OperatorCostModel(profile, cluster, plan.precision).step(plan)
    return lay_out(step, estimate).timeline(speed)


def rows_seconds(rows: list[list[Row]]) -> float:
    """The end of the last row."""
    return max((end for own in rows for _, _, _, end, _ in own), default=0.0)


def unfolded(timeline: Timeline) -> Timeline:
    """The same with the spans of every rank: a drawn rank stands for itself and those that follow it."""
    spans = (
        Span(rank, s.lane, s.name, s.start, s.end, s.bytes)
        for s in timeline.spans
        for rank in range(s.rank, s.rank + timeline.rank_counts.get(s.rank, 1))
    )
    return Timeline(timeline.origin, tuple(sorted(spans, key=lambda s: s.rank)), timeline.notes)


def step_rows(step: Step) -> list[list[Row]]:
    """The spans of a rank of each pipeline stage."""
    if step.pipeline is not None:
        passes = pass_rows(step.pipeline, step.pipeline.times())
        if step.pipeline.never_drains:
            return passes  # the tails are among the passes
        return [rows + _stage_tail(step, rank, rows) for rank, rows in enumerate(passes)]
    return [sequence_rows(step)]


def sequence_rows(step: Step, flows: MessageFlows | None = None) -> list[Row]:
    """The spans of a rank without a pipeline. With `flows`, a layer's messages share links with those in flight."""
    lanes, m = Lanes(step.cluster.overlap, flows=flows), step.plan.micro
    for micro in range(m):
        _micro_batch(
            lanes, step, reduces=step.reduces_every_micro_batch or micro == m - 1, label=f" m{micro}" * (m > 1)
        )
        if step.reduces_every_micro_batch:
            lanes.join()
        lanes.compute("communication units", step.sharded_units)
    return tail_rows(lanes, step.tails[0])


def _micro_batch(lanes: Lanes, step: Step, *, reduces: bool, label: str) -> None:
    """Forward through the layers, then backward from the last to the first, each with its messages."""
    forward_ahead, backward_ahead = step.prefetches
    layers = list(zip(step.layers, step.layer_comm, step.collectives.messages, strict=True))
    for i, (time, comm, (gather, _)) in enumerate(layers):
        name = f"{time.layer.name or '(model)'}{label}"
        if not backward_ahead:
            lanes.copy(gather)
        elif i == 0 or not forward_ahead:
            lanes.send(gather)
        lanes.wait(gather)
        if forward_ahead and i + 1 < len(layers):
            lanes.send(layers[i + 1][2][0])
        lanes.compute(f"forward {name}", time.forward)
        lanes.block(f"messages of {name}", comm.forward, (i, 0))
    for i, (time, comm, (gather, reduce)) in reversed(list(enumerate(layers))):
        name = f"{time.layer.name or '(model)'}{label}"
        # the group of the whole model, which comes with the first layer, is still gathered
        if i > 0 and not backward_ahead:
            lanes.copy(gather)
        elif i > 0 and i == len(layers) - 1:
            lanes.send(gather)
        if i > 0:
            lanes.wait(gather)
        if i > 1 and backward_ahead:
            lanes.send(layers[i - 1][2][0])
        lanes.compute(f"backward {name}", time.backward)
        lanes.block(f"messages of {name}", comm.backward, (i, 1))
        if reduces:
            lanes.send(reduce)


def pass_rows(pipeline: PipelineCost, times: PipelineTimes) -> list[list[Row]]:
    """The actions of every rank, and what it sends to other ranks' stages."""
    rows: list[list[Row]] = [[] for _ in range(pipeline.ranks)]
    for timed in times.actions:
        word = {"F": "forward", "B": "backward", "W": "weights", "U": "update"}[timed.action.kind]
        name = f"{word} stage {timed.action.stage} m{timed.action.micro % pipeline.micros}"
        rows[timed.rank].append(("compute", name, timed.start, timed.end, 0.0))
    for sent in times.transfers:
        size = pipeline.stages[min(sent.stage, sent.action.stage)][-1].output
        name = f"{sent.action.kind} to stage {sent.stage}"
        rows[sent.src].append(("communication", name, sent.start, sent.end, size))
    return rows


def _stage_tail(step: Step, rank: int, passes: list[Row]) -> list[Row]:
    """After the last backward of a stage: it reduces its gradients while other stages still run, then all meet.

    The cost model counts the longest tail from the end of the pipeline on, so that one begins there; no other ends
    later than it.
    """
    assert step.pipeline is not None
    end = step.pipeline.seconds
    own = end if rank == step.slowest else max(row[3] for row in passes if row[0] == "compute")
    before, after = around_meeting(step.tails[rank])
    longest = [sum(p.seconds for p in parts) for parts in around_meeting(step.tails[step.slowest])]
    lanes = Lanes(1.0, own)
    tail_rows(lanes, before)
    lanes.wait_until(end + longest[0] + min(0.0, longest[1] - sum(p.seconds for p in after)))
    return tail_rows(lanes, after)


def around_meeting(tail: Tail) -> tuple[Tail, Tail]:
    """The parts of a tail before all ranks agree on the loss, and from then on."""
    meeting = next((i for i, part in enumerate(tail) if part.part == "overhead"), len(tail))
    return tail[:meeting], tail[meeting:]


def tail_rows(lanes: Lanes, tail: Tail) -> list[Row]:
    """After the last backward: one part after the other."""
    lanes.join()
    for part in tail:
        if part.messages:
            for message in part.messages:
                lanes.send(message)
            lanes.join()
        else:
            lanes.compute(part.name, part.seconds)
    return lanes.rows
