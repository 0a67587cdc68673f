"""Compares the workers of a coordinator by the times that they report: which one is slow, and in which phase.

Workers do not exchange times as ranks do that meet. Each sends the seconds of its task by phase with the gradient, and
the same rule as for ranks decides who is slow. Waiting for tasks, servers and weights does not count: it is not theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...plans import Plan
from ..training.slowest_rank import EVERY, Slowest, find_slowest
from ..training.step_times import PHASES, WAIT

_FEWEST = 3
"""Tasks of every worker in a comparison."""


def times_row(phases: Mapping[str, float], data: float) -> list[float]:
    """A row of `step_times` for a task: messages count as waiting."""
    own = dict.fromkeys(PHASES, 0.0)
    own |= {name: seconds for name, seconds in phases.items() if name in own}
    return [*(own | {"data": data}).values(), phases.get("communication", 0.0)]


def data_seconds(rows: Sequence[Sequence[float]], plan: Plan) -> float:
    """Seconds of an update in which workers load data: those of its slices, or the share of one of `dp` workers."""
    loading = [row[0] for row in rows if row]
    if not loading:
        return 0.0
    return sum(loading) / len(loading) / (plan.dp // plan.slices)


class WorkerComparison:
    """The times of the workers since the last comparison."""

    def __init__(self, workers: int) -> None:
        self._rows: dict[int, list[list[float]]] = {worker: [] for worker in range(workers)}

    def add(self, worker: int, times: Sequence[float]) -> None:
        """The times of one task; of workers that have joined later, none are kept."""
        if len(times) == WAIT + 1 and worker in self._rows:
            self._rows[worker].append(list(times))

    def slowest(self) -> Slowest | None:
        """The slowest worker, once enough tasks were done since the last comparison, some of them by each.

        Without slices a slow worker does fewer tasks; each worker's last ones count, as many of each.
        """
        done = [len(rows) for rows in self._rows.values()]
        if len(done) < 2 or sum(done) < EVERY * len(done) or min(done) < _FEWEST:
            return None
        rows, self._rows = self._rows, {worker: [] for worker in self._rows}
        return find_slowest([mine[-min(EVERY, *done) :] for mine in rows.values()])
