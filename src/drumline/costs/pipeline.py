"""What a pipeline order costs: its bubble in closed form, for equal stages and free messages, and its activations.

With other stages, or messages that take time, `cost.lanes.play` counts action by action.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import InputError
from ..schedules import Pipeline, check_order, pipeline_order
from .lanes import play


def idle_seconds(order: str, p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """Seconds of a step in which a rank does not compute: p ranks, m micro-batches, v stages a rank.

    f, b, w are the seconds of one micro-batch in all stages of a rank: forward, backward for the input, and backward
    for the weights; b + w where the order does not split the backward. Exact for every order, and all m.
    """
    check_order(order, p, m, v)
    both = f + b + w
    if order == "naive":
        # While another rank works, this one waits.
        return (p - 1) * m * both
    if order in ("gpipe", "1f1b"):
        # The way to the last rank, and the way back.
        return (p - 1) * both
    if order == "interleaved":
        # The way is as long in stages, but stages are 1/v as long. A group of fewer than p micro-batches is through
        # before it has come round, v - 1 times.
        return ((p - 1) + (v - 1) * max(0, p - m)) * both / v
    if order == "zero-bubble" and v == 1:
        # As 1F1B, but weights wait until the way back is free, and so fill a part of it.
        return (p - 1) * (f + b) - (min(m, p) - 1) * min(f, b, w)
    # The V was found by a simulation, so it is counted by one: (p - 1) (f + b + w) / 6 for m > p and f = b = w.
    return play(pipeline_order(order, p, m, v), forward=f / v, backward=b / v, weight=w / v).seconds - m * both


def pipeline_seconds(order: str, p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """Seconds of all forwards and backwards of a step: the work of a rank and its bubble."""
    return m * (f + b + w) + idle_seconds(order, p, m, v, f, b, w)


def bubble(order: str, p: int, m: int, v: int, f: float, b: float, w: float) -> float:
    """The share of the time in which a rank does not compute."""
    whole = pipeline_seconds(order, p, m, v, f, b, w)
    return 1 - m * (f + b + w) / whole if whole else 0.0


def peak_bytes(pipeline: Pipeline, saved: Sequence[float], kept: Sequence[float] | None = None) -> tuple[float, ...]:
    """By rank: the most bytes of activations at once.

    `saved` is what the forward of one micro-batch leaves in each stage for its backward. Where the backward is split,
    `kept` is what of it, and of gradients, is there from B until W: inputs of layers with weights and the gradients of
    their outputs; without it, all that was saved.
    """
    kept = saved if kept is None else kept
    for word, given in (("saved", saved), ("kept", kept)):
        if len(given) != pipeline.stages:
            raise InputError(f"{word} bytes of {len(given)} stages", rule=f"one number for each of {pipeline.stages}")
    until_w = pipeline.splits_backward
    peaks = []
    for lane in pipeline.lanes:
        now = peak = 0.0
        for action in lane:
            s = action.stage
            change = {"F": saved[s], "B": (kept[s] if until_w else 0.0) - saved[s], "W": -kept[s]}
            now += change[action.kind]
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
