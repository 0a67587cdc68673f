"""Replays pipeline schedules action by action."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.timeline import Span, Timeline
from ..costs.pipeline_clock import Durations, time_pipeline
from ..schedules import Pipeline


def replay_pipeline(
    pipeline: Pipeline,
    *,
    forward: Durations,
    backward: Durations,
    weight: Durations = 0.0,
    transfer: Durations = 0.0,
    skips: Mapping[tuple[int, int], float] | None = None,
    update: Durations = 0.0,
) -> Timeline:
    """A pipeline schedule as `costs.pipeline_clock` times it, in spans on the lanes `compute` and `link` of the ranks.

    Messages and updates that take no time have no span.
    """
    times = time_pipeline(
        pipeline, forward=forward, backward=backward, weight=weight, transfer=transfer, skips=skips, update=update
    )
    shown = [t for t in times.actions if t.action.kind != "U" or t.end > t.start]
    spans = [Span(t.rank, "compute", pipeline.label(t.action), t.start, t.end) for t in shown]
    for sent in times.transfers:
        if sent.end > sent.start:
            name = f"{pipeline.label(sent.action)} {sent.src}->{sent.dst}"
            spans.append(Span(sent.src, "link", name, sent.start, sent.end))
    return Timeline("predicted", tuple(spans))


def replay_in_thirds(pipeline: Pipeline) -> Timeline:
    """A schedule with the durations by which schedules are compared: forward 1, backward 2 for a rank and micro-batch.

    Half of the backward is for the weights; a rank's stages share its work equally.
    """
    share = len(pipeline.lanes) / pipeline.stages
    return replay_pipeline(
        pipeline, forward=share, backward=share if pipeline.splits_backward else 2 * share, weight=share
    )


def bubble(timeline: Timeline) -> float:
    """The share of the time in which ranks do not compute, from the first start to the last end."""
    ranks = timeline.ranks
    whole = len(ranks) * timeline.seconds
    return 1 - sum(timeline.busy_seconds(rank, "compute") for rank in ranks) / whole if whole else 0.0
