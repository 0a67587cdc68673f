"""Maps of the strategy space: for every value of two keys of a plan, the best plan that has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..clusters import Cluster
from ..costs import cost_model
from ..costs.model import CostModel
from ..models.profile import Profile
from ..plans import Plan
from .objectives import Scored
from .reserve import without_reserve

MAP_KEYS = (("tp", "pp"), ("zero", "micro"))
"""The keys of each map: columns and rows."""
PricedPlan = tuple[Plan, float, float, bool]
"""Plan, seconds of a step, bytes of the fullest rank, whether it fits."""


@dataclass(frozen=True, slots=True)
class StrategyCell:
    """The fastest plan that fits with these values of two keys, or the proposed one; if none fits, the one that needs
    the least memory. A plan that fits only into the reserve does not count as fitting."""

    column: int
    row: int
    plan: str
    step_seconds: float
    memory_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class StrategyMap:
    """The strategy space seen along two keys of a plan."""

    column_key: str
    row_key: str
    cells: tuple[StrategyCell, ...]
    """By row, then by column. Rows are powers of two, and that of the best plan; combinations without a plan are
    missing."""

    @property
    def best(self) -> StrategyCell | None:
        """The fastest that fits."""
        return min((c for c in self.cells if c.fits), key=lambda c: c.step_seconds, default=None)


def strategy_maps(profile: Profile, cluster: Cluster, precision: str, ranked: Sequence[Scored]) -> list[StrategyMap]:
    """A map for each of MAP_KEYS that the space has several values of, in rows and in columns.

    `ranked` are the candidates of a search. Where that scored the whole space on arrays and kept its finalists, the
    space is scored again, and the best layouts of each cell are estimated.
    """
    best = ranked[0][1]
    cluster = without_reserve(cluster, 0.0 if best.in_reserve else best.reserve_bytes)
    model = cost_model(profile, cluster, precision)
    scored = [(p, e.step_seconds, e.memory_bytes, e.fits and e.in_reserve == best.in_reserve) for p, e in ranked]
    if model.scores_whole_space:
        scored += _best_layouts(profile, cluster, Plan(precision=precision), model, ranked[0][0])
    return candidate_maps(scored)


def candidate_maps(plans: Sequence[PricedPlan]) -> list[StrategyMap]:
    """The maps of these plans alone, best first."""
    maps = [StrategyMap(columns, rows, _cells(plans, columns, rows)) for columns, rows in MAP_KEYS]
    return [m for m in maps if len({c.column for c in m.cells}) > 1 and len({c.row for c in m.cells}) > 1]


def _cells(plans: Sequence[PricedPlan], columns: str, rows: str) -> tuple[StrategyCell, ...]:
    best: dict[tuple[int, int], StrategyCell] = {}
    for plan, seconds, size, fits in plans:
        cell = StrategyCell(getattr(plan, columns), getattr(plan, rows), str(plan), seconds, size, fits)
        key = cell.row, cell.column
        if not _is_shown(cell.row, getattr(plans[0][0], rows)):
            continue
        proposed = key in best and best[key].plan == str(plans[0][0])  # it may be a tie that is simpler
        if key not in best or (not proposed and _order(cell) < _order(best[key])):
            best[key] = cell
    return tuple(best[key] for key in sorted(best))


def _is_shown(row: int, winner: int) -> bool:
    """Whether a row is part of the map: powers of two, 0, and the row of the best plan."""
    return row & (row - 1) == 0 or row == winner


def _order(cell: StrategyCell) -> tuple[bool, float]:
    return not cell.fits, cell.step_seconds if cell.fits else cell.memory_bytes


def _best_layouts(
    profile: Profile, cluster: Cluster, base: Plan, model: CostModel, winner: Plan
) -> Iterator[PricedPlan]:
    """The layouts of every cell of every map in the order of their time, until one fits; else the smallest."""
    import numpy as np

    from .finalists import SLACK, score_space

    space = score_space(profile, cluster, base, model)
    for columns, rows in MAP_KEYS:
        across, down = getattr(space.columns, columns), getattr(space.columns, rows)
        for x, y in sorted({*zip(across.astype(int).tolist(), down.astype(int).tolist(), strict=True)}):
            if not _is_shown(y, getattr(winner, rows)):
                continue
            own = np.flatnonzero((across == x) & (down == y))
            small = own[space.bytes[own] <= SLACK * space.limit]
            fastest = small[np.argsort(space.seconds[small], kind="stable")].tolist()
            smallest = space.layouts[int(own[space.bytes[own].argmin()])].plan(base)
            plans = (space.layouts[i].plan(base) for i in fastest) if model.fits(smallest) else ()
            plan = next(filter(model.fits, plans), smallest)
            e = model.estimate(plan)
            yield plan, e.step_seconds, e.memory_bytes, e.fits
