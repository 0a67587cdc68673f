"""Score the whole space on arrays, then select finalists for an exact count of memory.

A vectorised cost model scores every layout, with approximate memory. In the order of the objective, layouts are then
estimated exactly, until enough of them fit: the best, the best of each plan family, and the Pareto front.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..clusters import Cluster
from ..costs.model import CostModel
from ..costs.plan_columns import RECOMPUTE, SCHEDULES, Array, PlanColumns
from ..models.profile import Profile
from ..plans import Plan
from .memory_saving import fewest_savings, most_savings
from .objectives import TIE, Scored
from .space import Layout, SearchSpace

BLOCK = 16_384
"""Rows scored together: few enough for the caches, and to stop early."""
BEST, BEST_TRIED = 40, 160
"""Plans that fit, best first; rows estimated for them at most."""
BRIEF = 4
"""Plans that fit, where only the best is asked for."""
PER_FAMILY, PER_FAMILY_TRIED = 6, 30
"""Meshes of every combination of plan families that fit; rows estimated for them at most."""
SIMPLEST_TRIED = 24
"""Rows estimated, simplest first, until BRIEF of those that tie with the best fit."""
FRONT = 80
"""Rows of the Pareto front of time and memory, at most."""
SAVINGS = 12
"""Plans with offload or chunks, best first."""
SLACK = 1.4
"""The approximate memory is off by less than this factor."""
_GPIPE = SCHEDULES.index("gpipe")
_SCHEDULE_CODE = {name: i for i, name in enumerate(SCHEDULES)}
_RECOMPUTE_CODE = {name: i for i, name in enumerate(RECOMPUTE)}
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ScoredSpace:
    """All layouts with their scores."""

    layouts: Sequence[Layout]
    columns: PlanColumns
    seconds: Array
    bytes: Array
    """Approximate."""
    limit: float
    interrupted: bool = False
    """Whether the user stopped it: then layouts are missing."""

    def objective(self, name: str) -> Array:
        """Values that an objective minimises."""
        if name == "memory":
            return self.bytes
        return self.seconds * (self.columns.ranks if name == "cost" else 1.0)

    @property
    def too_large(self) -> int:
        """How many do not fit, by the approximate memory."""
        return int((self.bytes > self.limit).sum())

    @property
    def families(self) -> npt.NDArray[np.int64]:
        """A code for every combination of the families of plan_families.py."""
        c = self.columns
        split = (c.tp > 1) + 2 * (c.pp > 1) + 4 * (c.cp > 1)
        whole = np.where(c.dp == 1, 8, np.where(c.zero == 0, 16, 32))
        return np.where(split > 0, split, whole).astype(np.int64)

    @property
    def meshes(self) -> npt.NDArray[np.int64]:
        """A code for every arrangement of ranks and what they share."""
        codes = np.zeros(len(self.seconds), dtype=np.int64)
        c = self.columns
        for column, bits in ((c.dp, 16), (c.shard, 16), (c.tp, 8), (c.pp, 12), (c.cp, 6), (c.zero, 2)):
            codes = (codes << bits) + column.astype(np.int64)
        return codes


def layout_columns(layouts: Sequence[Layout]) -> PlanColumns:
    """Layouts without tiles, one per row."""
    dp, shard, zero, tp, cp, pp, virtual, schedule, micro, recompute, _ = zip(*layouts, strict=True)
    return PlanColumns.of(
        dp=dp,
        shard=[s or n for s, n in zip(shard, dp, strict=True)],
        zero=zero,
        tp=tp,
        cp=cp,
        pp=pp,
        virtual=virtual,
        schedule=[_SCHEDULE_CODE[s] for s in schedule],
        micro=micro,
        recompute=[_RECOMPUTE_CODE[r] for r in recompute],
        compile=0,
    )


def score_space(profile: Profile, cluster: Cluster, base: Plan, model: CostModel) -> ScoredSpace:
    """Score every layout of the exhaustive space. Ctrl-C keeps the blocks that are done."""
    layouts = list(SearchSpace(profile, cluster, base, model, exhaustive=True).layouts())
    columns = layout_columns(layouts)
    limit = max(0.0, cluster.device.memory - cluster.device.context)
    scores = []
    try:
        for rows in np.array_split(np.arange(len(layouts)), -(-len(layouts) // BLOCK)):
            scores.append(model.score(columns.take(rows)))
    except KeyboardInterrupt:
        if not scores:
            raise
    seconds = np.concatenate([s.seconds for s in scores])
    sizes = np.concatenate([s.bytes for s in scores])
    done = len(seconds)
    return ScoredSpace(
        layouts[:done], columns.take(np.arange(done)), seconds, sizes, limit, interrupted=done < len(layouts)
    )


class Finalists:
    """Estimates selected layouts exactly, each once."""

    def __init__(self, space: ScoredSpace, model: CostModel, base: Plan, objective: str) -> None:
        self._space, self._model, self._base = space, model, base
        self._objective = space.objective(objective)
        self._meshes, self._families = space.meshes, space.families
        self._seen: dict[int, Scored] = {}
        # gpipe takes as long as 1f1b and needs more memory: scored, but never a finalist
        eligible = (space.bytes <= SLACK * space.limit) & (space.columns.schedule != _GPIPE)
        self._order = self._sorted(np.flatnonzero(eligible), self._objective)

    def scored(self, cluster: Cluster, *, save_memory: bool, brief: bool = False) -> Iterator[Scored]:
        """The finalists as they are estimated, best first. `brief` skips what the best is compared with."""
        yield from self._walk(self._order, BRIEF if brief else BEST, BEST_TRIED)
        yield from self._simplest_ties()
        if not self._any_fits():
            by_size = self._sorted(np.flatnonzero(self._space.columns.schedule != _GPIPE), self._space.bytes)
            yield from self._walk(by_size, BRIEF, BEST_TRIED)
        if not brief:
            yield from self._alternatives()
        yield from self._savings(cluster, save_memory=save_memory)

    def _any_fits(self) -> bool:
        return any(e.fits for _, e in self._seen.values())

    def _simplest_ties(self) -> Iterator[Scored]:
        """Rows that tie with the best, simplest first: the order of `objectives.complexity`."""
        fitting = [i for i, (_, e) in self._seen.items() if e.fits]
        if not fitting or self._objective is self._space.bytes:
            return
        c = self._space.columns
        best = min(fitting, key=lambda i: self._objective[i])
        tied = (self._objective <= (1 + TIE) * self._objective[best]) & (c.ranks >= c.ranks[best])
        rows = self._order[tied[self._order]]
        axes = sum((column[rows] > 1).astype(np.int64) for column in (c.dp, c.tp, c.pp, c.cp))
        keys = (c.micro, c.recompute, c.zero)  # the last is the most important
        simplest = rows[np.lexsort((*(k[rows] for k in keys), axes))]
        yield from self._walk(simplest, BRIEF, SIMPLEST_TRIED)

    def _alternatives(self) -> Iterator[Scored]:
        """Plans to compare the best with: the best of each family, the Pareto front, and its own neighbours."""
        for family in np.unique(self._families).tolist():
            own = self._order[self._families[self._order] == family]
            best = list(self._walk(own, PER_FAMILY, PER_FAMILY_TRIED, one_per_mesh=True))
            yield from best
            if not any(e.fits for _, e in best):
                yield from self._smallest(np.flatnonzero(self._families == family))
        yield from self._front()
        yield from self._neighbours_of_best()

    def _sorted(self, rows: Index, by: Array) -> Index:
        """Rows by a value; of equals, those with less memory first."""
        return rows[np.lexsort((self._space.bytes[rows], by[rows]))]

    def _estimate(self, i: int) -> Iterator[Scored]:
        """One row, unless it was estimated before."""
        if i not in self._seen:
            plan = self._space.layouts[i].plan(self._base)
            self._seen[i] = plan, self._model.estimate(plan)
            yield self._seen[i]

    def _walk(self, order: Index, wanted: int, tried: int, *, one_per_mesh: bool = False) -> Iterator[Scored]:
        """Rows in order until `wanted` of them fit, or `tried` were estimated."""
        fitting: set[int] = set()
        for i in order.tolist():
            key = int(self._meshes[i]) if one_per_mesh else i
            if key in fitting:
                continue
            if len(fitting) >= wanted or not tried:
                return
            tried -= 1
            yield from self._estimate(i)
            if self._seen[i][1].fits:
                fitting.add(key)

    def _smallest(self, rows: Index) -> Iterator[Scored]:
        """The row with the least memory, where none fits."""
        if len(rows):
            yield from self._estimate(int(rows[self._space.bytes[rows].argmin()]))

    def _front(self) -> Iterator[Scored]:
        """The Pareto front of time and memory."""
        order = self._sorted(self._order, self._space.seconds)
        sizes = self._space.bytes[order]
        first = np.concatenate(([True], sizes[1:] < np.minimum.accumulate(sizes)[:-1])) if len(order) else sizes > 0
        points = order[first]
        for i in points[:: max(1, -(-len(points) // FRONT))].tolist():
            yield from self._estimate(i)

    def _neighbours_of_best(self) -> Iterator[Scored]:
        """The mesh of the best with less sharding, and the best on the most devices."""
        fitting = [i for i, (_, e) in self._seen.items() if e.fits]
        if not fitting:
            return
        c = self._space.columns
        best = min(fitting, key=lambda i: self._objective[i])
        same = np.ones(len(c.dp), dtype=bool)
        for column in (c.dp, c.tp, c.cp, c.pp):
            same &= column == column[best]
        for zero in range(int(c.zero[best])):
            own = self._order[(same & (c.zero == zero))[self._order]]
            yield from self._walk(own, 1, 8)
            yield from self._smallest(np.flatnonzero(same & (c.zero == zero)))
        yield from self._walk(self._order[(c.ranks == c.ranks.max())[self._order]], 1, 8)

    def _savings(self, cluster: Cluster, *, save_memory: bool) -> Iterator[Scored]:
        """Replicas on all devices, or on one, with offload or chunks where they need it."""
        c = self._space.columns
        whole = (c.tp * c.pp * c.cp == 1) & (c.shard == c.dp)
        plain = whole & ((c.dp == c.dp[whole].max()) | (c.dp == 1))
        plans: list[Plan] = []
        for i in np.flatnonzero(plain).tolist():
            plan = self._space.layouts[i].plan(self._base)
            if save_memory:
                plans += most_savings(plan, cluster)
            elif not self._model.fits(plan):
                plans += fewest_savings(plan, cluster, self._model.fits)
        plans = list(dict.fromkeys(plans))
        by = [self._model.memory(p).total for p in plans] if save_memory else self._model.seconds(plans)
        for k in np.argsort(by, kind="stable")[:SAVINGS].tolist():
            yield plans[k], self._model.estimate(plans[k])
