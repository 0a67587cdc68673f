"""From the whole space to the plans that are looked at closely: the best, the best of each family, the front.

The closed form prices all rows at once, with a quick count of their memory. In the order of what is sought, rows are
then counted tensor by tensor, until enough of them fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..clusters import Cluster
from ..costs.fitted import FittedSteps
from ..costs.fitted.inputs import SCHEDULES, Array
from ..costs.fitted.plans import Rows, plan_of
from ..plans import Plan
from ..plans.combinations import refusal
from .objectives import Scored
from .space import smaller, spared

BEST, TRIED = 40, 160
"""Plans that fit, the best of all; rows that are counted for them at most."""
FEW = 4
"""The same, where only the best is asked for."""
EACH, EACH_TRIED = 6, 30
"""Layouts of every combination of families that fit; rows that are counted for them at most."""
FRONT = 80
"""Rows of the front of time and memory, at most."""
MOVED = 12
"""Plans with offloading or chunks, the best of them."""
SLACK = 1.4
"""The quick count of memory is off by less than this."""
_GPIPE = SCHEDULES.index("gpipe")
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Space:
    """All rows with their prices."""

    rows: Rows
    seconds: Array
    bytes: Array
    """Quickly counted."""
    limit: float
    interrupted: bool = False
    """Whether somebody stopped it: then rows are missing."""

    def sought(self, objective: str) -> Array:
        """What the objective makes small."""
        if objective == "memory":
            return self.bytes
        return self.seconds * (self.rows.ranks if objective == "cost" else 1.0)

    @property
    def unfit(self) -> int:
        """How many do not fit, by the quick count."""
        return int((self.bytes > self.limit).sum())

    @property
    def families(self) -> npt.NDArray[np.int64]:
        """A number for every combination of families, as families.py has them."""
        r = self.rows
        split = (r.tp > 1) + 2 * (r.pp > 1) + 4 * (r.cp > 1)
        whole = np.where(r.dp == 1, 8, np.where(r.zero == 0, 16, 32))
        return np.where(split > 0, split, whole).astype(np.int64)

    @property
    def layouts(self) -> npt.NDArray[np.int64]:
        """A number for every layout: how ranks are arranged, and what they share."""
        found = np.zeros(len(self.seconds), dtype=np.int64)
        r = self.rows
        for column, bits in ((r.dp, 16), (r.shard, 16), (r.tp, 8), (r.pp, 12), (r.cp, 6), (r.zero, 2)):
            found = (found << bits) + column.astype(np.int64)
        return found


class Shortlist:
    """Looks at rows closely, each once."""

    def __init__(self, space: Space, steps: FittedSteps, base: Plan, objective: str) -> None:
        self._space, self._steps, self._base = space, steps, base
        self._sought = space.sought(objective)
        self._layouts, self._families = space.layouts, space.families
        self._seen: dict[int, Scored] = {}
        # gpipe takes as long as 1f1b and holds more: scored, but never a finalist
        offered = (space.bytes <= SLACK * space.limit) & (space.rows.order != _GPIPE)
        self._order = self._sorted(np.flatnonzero(offered), self._sought)

    def scored(self, cluster: Cluster, *, sparing: bool, brief: bool = False) -> Iterator[Scored]:
        """The finalists, as they are found; the best first. `brief` leaves out all that is not about the best."""
        yield from self._walk(self._order, FEW if brief else BEST, TRIED)
        if not any(e.fits for _, e in self._seen.values()):
            least = self._sorted(np.flatnonzero(self._space.rows.order != _GPIPE), self._space.bytes)
            yield from self._walk(least, FEW, TRIED)
        if not brief:
            yield from self._others()
        if not brief or sparing or not any(e.fits for _, e in self._seen.values()):
            yield from self._moved(cluster, sparing=sparing)

    def _others(self) -> Iterator[Scored]:
        """What the best are compared with: the best of each family, the front, and their own neighbours."""
        for family in np.unique(self._families).tolist():
            mine = self._order[self._families[self._order] == family]
            found = list(self._walk(mine, EACH, EACH_TRIED, apart=True))
            yield from found
            if not any(e.fits for _, e in found):
                yield from self._least(np.flatnonzero(self._families == family))
        yield from self._front()
        yield from self._beside_the_best()

    def _sorted(self, some: Index, by: Array) -> Index:
        """Of equals, those with less memory first."""
        return some[np.lexsort((self._space.bytes[some], by[some]))]

    def _look(self, i: int) -> Iterator[Scored]:
        """One row, unless it was looked at before."""
        if i not in self._seen:
            plan = plan_of(self._space.rows, i, self._base)
            assert not refusal(plan), plan
            self._seen[i] = plan, self._steps.estimate(plan)
            yield self._seen[i]

    def _walk(self, order: Index, wanted: int, most: int, *, apart: bool = False) -> Iterator[Scored]:
        """In their order, until so many fit; `apart`, one of each layout."""
        have: set[int] = set()
        for i in order.tolist():
            key = int(self._layouts[i]) if apart else i
            if key in have:
                continue
            if len(have) >= wanted or not most:
                return
            most -= 1
            yield from self._look(i)
            if self._seen[i][1].fits:
                have.add(key)

    def _least(self, some: Index) -> Iterator[Scored]:
        """Where nothing fits: what comes nearest."""
        if len(some):
            yield from self._look(int(some[self._space.bytes[some].argmin()]))

    def _front(self) -> Iterator[Scored]:
        """Rows that no other beats in both time and memory."""
        order = self._sorted(self._order, self._space.seconds)
        held = self._space.bytes[order]
        first = np.concatenate(([True], held[1:] < np.minimum.accumulate(held)[:-1])) if len(order) else held > 0
        points = order[first]
        for i in points[:: max(1, -(-len(points) // FRONT))].tolist():
            yield from self._look(i)

    def _beside_the_best(self) -> Iterator[Scored]:
        """What the winner is compared with: its ranks with less sharding, and the most devices."""
        fitting = [(i, s) for i, s in self._seen.items() if s[1].fits]
        if not fitting:
            return
        r = self._space.rows
        best = min(fitting, key=lambda x: self._sought[x[0]])[0]
        same = np.ones(len(r.dp), dtype=bool)
        for column in (r.dp, r.tp, r.cp, r.pp):
            same &= column == column[best]
        for zero in range(int(r.zero[best])):
            mine = self._order[(same & (r.zero == zero))[self._order]]
            yield from self._walk(mine, 1, 8)
            yield from self._least(np.flatnonzero(same & (r.zero == zero)))
        yield from self._walk(self._order[(r.ranks == r.ranks.max())[self._order]], 1, 8)

    def _moved(self, cluster: Cluster, *, sparing: bool) -> Iterator[Scored]:
        """Replicas on all devices, or one: with states in host memory, or layers in parts, where they need it."""
        r = self._space.rows
        whole = (r.tp * r.pp * r.cp == 1) & (r.shard == r.dp)
        plain = whole & ((r.dp == r.dp[whole].max()) | (r.dp == 1))
        found: list[Plan] = []
        for i in np.flatnonzero(plain).tolist():
            plan = plan_of(r, i, self._base)
            if sparing:
                found += spared(plan, cluster)
            elif not self._steps.fits(plan):
                found += smaller(plan, cluster, self._steps.fits)
        yield from self._priced(list(dict.fromkeys(found)), sparing=sparing)

    def _priced(self, plans: list[Plan], *, sparing: bool) -> Iterator[Scored]:
        """The best of plans that are no rows."""
        by = [self._steps.memory(p).total for p in plans] if sparing else self._steps.seconds(plans)
        for k in np.argsort(by, kind="stable")[:MOVED].tolist():
            yield plans[k], self._steps.estimate(plans[k])
