"""Draws a synchronous step whose ranks differ: the slowest of a stage sets its pace, the others wait for it.

Of many ranks, those of a stage that take equally long are drawn once. Where too many differ, a stage is drawn by its
fastest, its median and its slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.timeline import Span, Timeline
from ..costs.straggling import of_stages
from .lanes import Row
from .step import StepLayout

MOST_DRAWN = 64
"""Ranks that are drawn one by one."""
WAITING_ROW = "waiting for the slowest rank"


def straggling_timeline(layout: StepLayout, factors: Sequence[float], *, speed: float = 1.0) -> Timeline:
    """The step of the slowest rank of every stage, drawn for ranks with these factors."""
    plan, k = layout.step.plan, layout.stretch / speed
    ranks, stages = plan.ranks // plan.pp, of_stages(factors, plan.pp)
    notes = layout.notes
    drawn = [dict.fromkeys(range(ranks), 1) if plan.ranks <= MOST_DRAWN else _alike(own) for own in stages]
    if sum(map(len, drawn)) > MOST_DRAWN:
        drawn = [_three(own) for own in stages]
        notes = (*notes, "Each stage is drawn by its fastest, its median and its slowest rank.")
    own_rows = _in_schedule if plan.pp > 1 else _in_sequence
    spans = [
        Span(stage * ranks + i, lane, name, start * k, end * k, size)
        for stage, rows in enumerate(layout.rows)
        for i in drawn[stage]
        for lane, name, start, end, size in own_rows(rows, stages[stage][i] / max(stages[stage]))
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


def _in_sequence(rows: Sequence[Row], share: float) -> list[Row]:
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
        own.append(("communication", WAITING_ROW, passes * share, passes, 0.0))
    return own


def _in_schedule(rows: Sequence[Row], share: float) -> list[Row]:
    """The same in a pipeline, whose passes begin when their inputs have arrived: it waits after each of them."""
    own = []
    for lane, name, start, end, size in rows:
        done = start + (end - start) * share if lane == "compute" else end
        own.append((lane, name, start, done, size))
        if done < end and _in_passes(lane, name):
            own.append(("communication", WAITING_ROW, done, end, 0.0))
    return own


def _in_passes(lane: str, name: str) -> bool:
    return lane == "compute" and name.startswith(("forward", "backward", "weights"))
