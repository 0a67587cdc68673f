"""The cells of the parity matrix for plans that split the model: every product of the axes on 2, 4 and 8 ranks, with at
most one more choice, for every job; and a small cover of them for every day.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import small_jobs
from cells import Cell, Fate, not_here, refused

from drumline.core.errors import PlanError
from drumline.plans import Plan
from drumline.plans.combinations import TESTED_VALUES
from drumline.runtime.verification.tolerances import COMPUTE_DTYPES
from drumline.schedules import ASYNCHRONOUS

RANKS = (2, 4, 8)
TILES = ("2x1", "1x2", "2x2")
MICRO = 3
"""Micro-batches in a pipeline: neither 7 samples nor 2 ranks divide by it."""

CHOICES: tuple[dict[str, object], ...] = (
    {},
    {"zero": 1},
    {"zero": 2},
    {"micro": 1},
    {"micro": 2},
    {"precision": "bf16"},
    {"recompute": "full"},
)
"""Besides the axes and, in a pipeline, its order."""
ORDERS: tuple[dict[str, object], ...] = (
    *({"schedule": str(name)} for name in TESTED_VALUES["schedule"] if name not in ("1f1b", *ASYNCHRONOUS)),
    {"schedule": "pipedream", "micro": 1},
    {"schedule": "pipedream-2bw", "micro": 4},
    {"schedule": "interleaved", "virtual": 2},
    {"schedule": "zero-bubble", "virtual": 2},
)
FEW: tuple[dict[str, object], ...] = ({}, {"zero": 1}, {"schedule": "zero-bubble"})
"""Of the choices on 8 ranks."""

HEADS = dict.fromkeys(("gpt", "masked", "dropout", "llama", "bert", "t5"), 2) | {"keys": 4}
LAYERS = {"convnet": 5, "mlp": 5, "huge": 5, "named": 4, "partial": 4}
"""Jobs of fewer layers than the most stages that are tried, 8."""
TIED = {
    "dropout": "token.weight is used in stages 0",
    "bert": "bert.embeddings.word_embeddings.weight is used in stages 0",
}
"""Jobs without clipping whose first and last stage share a parameter."""


plan_of = functools.cache(Plan.parse)


def layouts(ranks: int) -> Iterator[dict[str, object]]:
    """Every product of axes with that many ranks in which something splits the model; at most two tiles a side."""
    sizes = [n for n in (1, 2, 4) if ranks % n == 0]
    for pp, dp, cp, tp in itertools.product(sizes, repeat=4):
        for tile in ("1x1", *TILES):
            tiles = int(tile[0]) * int(tile[2])
            if pp * dp * tiles * cp * tp != ranks or pp * tiles * cp * tp == 1 or (tiles > 1 and cp > 1):
                continue
            made: dict[str, object] = {"pp": pp, "dp": dp, "tile": tile, "cp": cp, "tp": tp}
            yield {k: v for k, v in made.items() if v not in (1, "1x1")}


def plans(ranks: int) -> Iterator[tuple[dict[str, object], Plan | PlanError]]:
    """Every layout with at most one choice: its table, and the plan, or why it is invalid."""
    for layout in layouts(ranks):
        base: dict[str, object] = {**layout, "micro": MICRO} if "pp" in layout else layout
        for choice in (*CHOICES, *ORDERS) if ranks < 8 else FEW:
            idle = ("zero" in choice and "dp" not in layout) or ("schedule" in choice and "pp" not in layout)
            if idle or (choice and {"micro": 1, **base, **choice} == {"micro": 1, **base}):
                continue  # it chooses nothing
            try:
                yield {**base, **choice}, Plan.from_table({**base, **choice}, "the matrix")
            except PlanError as e:
                yield {**base, **choice}, e


def unfit(job: str, plan: Plan) -> str:
    """Why the engine refuses a plan for this job, as in its error; empty if it does not."""
    if plan.tile != (1, 1) and job not in small_jobs.IMAGES:
        return "tile for a batch without images"
    if plan.cp > 1 and job in small_jobs.IMAGES:
        return f"cp={plan.cp} for 1 tokens"
    if HEADS.get(job, plan.tp) % plan.tp:
        return f"tp={plan.tp} cannot share the {HEADS[job]} heads"
    if plan.schedule == "pipedream" and small_jobs.make(job).clip is not None:
        return f"clip={small_jobs.make(job).clip:g} with schedule=pipedream"
    if plan.schedule == "pipedream" and job in TIED:
        return TIED[job]
    if plan.recompute == "full" and job in small_jobs.FLAT:
        return "recompute=full saves nothing"
    stages = plan.pp * plan.virtual
    return f"{stages} stages for a model of {LAYERS[job]} layers" if stages > LAYERS.get(job, stages) else ""


def types_of(plan: Plan) -> tuple[str, ...]:
    """List the dtypes to run a plan in: float64, and for pure layouts and precisions the plan's own type."""
    plain = plan.zero == 0 and plan.recompute == "none" and plan.schedule == "1f1b" and plan.ranks < 8
    return ("float64", COMPUTE_DTYPES[plan.precision]) if plain else ("float64",)


def fate(cell: Cell) -> Fate | None:
    """The outcome of a cell of a valid plan that does not run; None: it runs."""
    plan = plan_of(cell.plan)
    if why := refused(plan):
        return Fate("refused", why)
    if why := not_here(cell.job, plan):
        return Fate("not here", why)
    if cell.computed == "float64" and plan.precision != "fp32":
        return Fate("same", "float64 shows the plan's arithmetic, not its precision")
    if (why := unfit(cell.job, plan)) and not _asks(cell, plan):
        return Fate("refused", why)
    return None


def _asks(cell: Cell, plan: Plan) -> bool:
    """Decide whether a refused cell runs anyway, to check the engine's refusal."""
    return cell.computed == "float64" and plan.ranks < 8 and len(plan.table()) <= 2 + (plan.pp > 1)


def cells_of(ranks: int, jobs: Sequence[str] = small_jobs.SPLIT_JOBS) -> list[Cell]:
    """Every cell that runs on that many ranks."""
    kept = [plan for _, plan in plans(ranks) if isinstance(plan, Plan) and not refused(plan)]
    results = [Cell(job, str(plan), computed) for plan in kept for job in jobs for computed in types_of(plan)]
    return [cell for cell in results if fate(cell) is None]


# -- the cover


def wanted(cell: Cell) -> frozenset[tuple[str, str]]:
    """List what a cover must contain: every job along every axis, every two axes, every axis with every choice, every order.
    Tiles of every form are met by the jobs and the other axes, tiles of some form by the choices."""
    table = plan_of(cell.plan).table()
    along = [k for k in ("pp", "dp", "tile", "cp", "tp") if table.get(k, 1) != 1]
    axes = [f"tile={table[k]}" if k == "tile" else k for k in along]
    usual = MICRO if "pp" in table else 1
    chosen = [f"{k}={table[k]}" for k in ("zero", "precision", "recompute") if k in table]
    chosen += ["micro"] if table.get("micro", 1) != usual else []
    order = f"{table.get('schedule', '1f1b')} {table.get('virtual', 1)}"
    pairs = {*itertools.combinations(axes, 2), *itertools.product((cell.job,), axes)}
    pairs |= set(itertools.product((cell.computed, *chosen), along))
    return frozenset(pairs | ({(order, "order")} if "pp" in table else set()))


def cover(cells: Sequence[Cell]) -> list[Cell]:
    """Few cells that hold every pair that some cell holds: always the next that holds most of what is missing."""
    pairs = {cell: wanted(cell) for cell in cells}
    missing = set().union(*pairs.values())
    results = []
    while missing:
        best = max(cells, key=lambda cell: (len(missing & pairs[cell]), -plan_of(cell.plan).ranks))
        results.append(best)
        missing -= pairs[best]
    return sorted(results, key=lambda cell: (plan_of(cell.plan).ranks, cell.job, cell.plan))


QUICK = ("gpt", "masked", "groups", "resnet", "huge", "partial")
"""The jobs of the cover: each of another kind."""


def quick() -> list[Cell]:
    """The cells that run every day."""
    tried = [cell for ranks in (2, 4) for cell in cells_of(ranks, QUICK)]
    return cover([cell for cell in tried if not unfit(cell.job, plan_of(cell.plan))])
