"""Which pipeline stages are shown of many: some spread evenly, the first, the last and the fullest among them."""

from __future__ import annotations

from collections.abc import Sequence

from ..simulator.memory_curve import StageMemory

MOST_STAGES = 8


def shown_stages(stages: Sequence[StageMemory]) -> list[StageMemory]:
    """At most `MOST_STAGES`, in order. The fullest takes the place of the nearest one between first and last."""
    last = len(stages) - 1
    if last < MOST_STAGES:
        return list(stages)
    spread = [round(i * last / (MOST_STAGES - 1)) for i in range(MOST_STAGES)]
    fullest = max(range(len(stages)), key=lambda i: stages[i].peak)
    if fullest not in spread:
        spread.remove(min(spread[1:-1], key=lambda i: abs(i - fullest)))
        spread = sorted([*spread, fullest])
    return [stages[i] for i in spread]
