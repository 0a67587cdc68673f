"""Draws a synchronous step whose ranks differ: the slowest sets the pace of all messages, the others wait for it.

Of many ranks, those of a stage that take equally long are drawn once. Where too many differ, a stage is drawn by its
fastest, its median and its slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..clusters import StepTimeDistribution
from ..core.timeline import Span, Timeline
from ..costs.layer_time import LayerTime
from ..costs.step import Step
from .lanes import Row
from .step import step_rows

MOST_DRAWN = 64
"""Ranks that are drawn one by one."""


def straggling_timeline(step: Step, spread: StepTimeDistribution, *, stretch: float = 1.0) -> Timeline:
    """One step with the first factor that every rank draws."""
    factors = [next(draws) for draws in spread.all_draws(step.plan.ranks)]
    largest = max(factors)
    ranks = step.plan.ranks // step.plan.pp
    stages = [factors[stage * ranks : (stage + 1) * ranks] for stage in range(step.plan.pp)]
    notes: tuple[str, ...] = ()
    drawn = [dict.fromkeys(range(ranks), 1) if step.plan.ranks <= MOST_DRAWN else _alike(own) for own in stages]
    if sum(map(len, drawn)) > MOST_DRAWN:
        drawn = [_three(own) for own in stages]
        notes = ("Each stage is drawn by its fastest, its median and its slowest rank.",)
    spans = [
        Span(stage * ranks + i, lane, name, start * stretch, end * stretch, size)
        for stage, rows in enumerate(_slowed(step, largest))
        for i in drawn[stage]
        for lane, name, start, end, size in _of_rank(rows, stages[stage][i] / largest)
    ]
    counts = {stage * ranks + i: n for stage, own in enumerate(drawn) for i, n in own.items() if n > 1}
    return Timeline("predicted", tuple(spans), notes, counts)


def _alike(factors: Sequence[float]) -> dict[int, int]:
    """The first rank of each factor, and how many have it."""
    first: dict[float, int] = {}
    for i, f in enumerate(factors):
        first.setdefault(f, i)
    return {i: factors.count(f) for f, i in first.items()}


def _three(factors: Sequence[float]) -> dict[int, int]:
    """The fastest, the median and the slowest rank; each stands for a third of all."""
    order = sorted(range(len(factors)), key=lambda i: factors[i])
    chosen = list(dict.fromkeys((order[0], order[len(order) // 2], order[-1])))
    share, rest = divmod(len(factors), len(chosen))
    return {i: share + (k < rest) for k, i in enumerate(chosen)}


def _slowed(step: Step, factor: float) -> list[list[Row]]:
    """The rows of the slowest rank, of every stage; the passes of a pipeline as if all of its ranks were as slow."""
    if step.pipeline is not None:
        rows = step_rows(step)
        return [[(lane, name, a * factor, b * factor, size) for lane, name, a, b, size in stage] for stage in rows]
    layers = [LayerTime(t.layer, *(factor * x for x in (t.forward, t.backward, t.recompute))) for t in step.layers]
    tails = tuple(
        tuple(replace(p, seconds=factor * p.seconds) if p.part == "optimizer" else p for p in tail)
        for tail in step.tails
    )
    return step_rows(replace(step, layers=layers, tails=tails))


def _of_rank(rows: Sequence[Row], share: float) -> list[Row]:
    """The rows of a rank that takes a share of the slowest one's time: its passes are done earlier, and it waits.

    Messages happen when the slowest takes part. After the passes, ranks start together again.
    """
    passes = max((end for lane, name, _, end, _ in rows if _in_passes(lane, name)), default=0.0)
    own = []
    for lane, name, start, end, size in rows:
        if _in_passes(lane, name):
            own.append((lane, name, start * share, end * share, size))
        elif lane == "compute":
            own.append((lane, name, start, start + (end - start) * share, size))
        else:
            own.append((lane, name, start, end, size))
    if share < 1 and passes:
        own.append(("communication", "waiting for the slowest rank", passes * share, passes, 0.0))
    return own


def _in_passes(lane: str, name: str) -> bool:
    return lane == "compute" and name.startswith(("forward", "backward", "weights"))
