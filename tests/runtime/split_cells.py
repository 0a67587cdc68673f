"""The cells of the parity matrix for plans that split the model: every product of the axes on 2, 4 and 8 ranks, with at
most one choice beside it, for every job that has something along these axes; and a small cover of them for every day.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import small_jobs
from cells import Cell, Fate, not_here, refused, types_of

from drumline.errors import PlanError
from drumline.plan import Plan
from drumline.plan.combinations import HELD

KEYS = frozenset({"pp", "virtual", "split", "schedule", "tp", "cp", "tile"})
"""The keys of a plan that this family holds, beside what it has in common with the data-parallel one."""
RANKS = (2, 4, 8)
TILES = ("2x1", "1x2", "2x2")
MICRO = 3
"""Micro-batches in a pipeline: 7 samples do not divide by it."""

CHOICES: tuple[dict[str, object], ...] = (
    {}, {"zero": 1}, {"zero": 2}, {"zero": 1, "shard": 2}, {"micro": 1}, {"micro": 2}, {"precision": "bf16"}, {"recompute": "full"},
)  # fmt: skip
"""Beside the axes and, in a pipeline, its order."""
ORDERS: tuple[dict[str, object], ...] = (
    *({"schedule": name} for name in HELD["schedule"] if name != "1f1b"),
    {"schedule": "interleaved", "virtual": 2}, {"schedule": "zero-bubble", "virtual": 2},
)  # fmt: skip


def layouts(ranks: int) -> Iterator[dict[str, object]]:
    """Every product of axes with that many ranks in which something splits the model; at most two tiles a side."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pp, dp, cp, tp in itertools.product(sizes, repeat=4):
        for tile in ("1x1", *TILES):
            rows, columns = map(int, tile.split("x"))
            made: dict[str, object] = {"pp": pp, "dp": dp, "tile": tile, "cp": cp, "tp": tp}
            alone = pp * rows * columns * cp * tp == 1
            if pp * dp * rows * columns * cp * tp != ranks or alone or (ranks == 8 and max(pp, dp, cp, tp) > 4):
                continue
            yield {k: v for k, v in made.items() if v not in (1, "1x1")}


def plans(ranks: int) -> Iterator[tuple[dict[str, object], Plan | PlanError]]:
    """Every layout with at most one choice: its table, and the plan, or why it is none."""
    for layout in layouts(ranks):
        base: dict[str, object] = {**layout, "micro": MICRO} if "pp" in layout else layout
        more = [*CHOICES, *(ORDERS if "pp" in layout else ())]
        for choice in more:
            table = {**base, **choice}
            if table == base and choice:
                continue
            if choice.get("zero") and "dp" not in layout:
                continue  # nothing is replicated
            try:
                yield table, Plan.from_table(table, "the matrix")
            except PlanError as e:
                yield table, e


def unfit(job: str, plan: Plan) -> str:
    """Why the engine refuses a plan for this job, as its error begins; nothing where it takes it."""
    if plan.cp > 1 and job not in small_jobs.TOKENS:
        return f"cp={plan.cp}" if job in WITHOUT_TOKENS else "cp for a batch without tokens"
    if plan.tile != (1, 1) and job not in small_jobs.IMAGES:
        return "tile for a batch without images"
    if heads := HEADS.get(job):
        if plan.tp > 1 and heads % plan.tp:
            return f"tp={plan.tp}"
    if plan.pp * plan.virtual > LAYERS.get(job, 8):
        return f"{plan.pp * plan.virtual} stages"
    return ""


WITHOUT_TOKENS: frozenset[str] = frozenset()
HEADS: dict[str, int] = {}
LAYERS: dict[str, int] = {}


def fate(cell: Cell) -> Fate | None:
    """What becomes of a cell of a plan that is one; None: it is run."""
    plan = Plan.parse(cell.plan)
    if why := refused(plan):
        return Fate("refused", why)
    if why := not_here(cell.job, plan):
        return Fate("not here", why)
    if cell.computed == "float64" and plan.precision != "fp32":
        return Fate("same", "float64 shows the plan's arithmetic, not its precision")
    return None


def cells_of(jobs: Sequence[str], ranks: int) -> list[Cell]:
    """Every cell that is run on so many ranks."""
    found = [
        Cell(job, str(plan), computed)
        for _, plan in plans(ranks) if isinstance(plan, Plan) and not refused(plan)
        for job in jobs for computed in types_of(plan)
    ]  # fmt: skip
    return [cell for cell in found if fate(cell) is None]
