"""The whole parity matrix: `make parity`, or a part of it, `make parity ARGS="--jobs gpt --ranks 2"`.

The plans that split the model are a family of their own, `--family split`. The outcome of a cell is `passed` with its
largest error, FAILED, `same` as another cell on a CPU, `refused` by the table of combinations, `not here` (impossible on
this machine) or `not run`; each with its reason. The table goes to build/parity.txt. With `--log FILE` every result is
stored as soon as it is known, and a stopped run resumes: cells in the file are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cells
import parity
import small_jobs
import split_cells
import torch
from cells import Cell
from references import reference
from world import LARGEST, World

from drumline.core.errors import PlanError
from drumline.plans import Plan
from drumline.runtime.strategies.parameter_usage import has_unused_parameters
from drumline.runtime.verification.tolerances import (
    APPROXIMATE_LOSS,
    BOUNDS,
    COMPRESSED,
    bounds_of,
    errors_of,
    limits_of,
    worst_of,
)
from drumline.runtime.verification.verify import build_engine, run_plan

STEPS = 10
LIMIT, COMPILE_LIMIT = 120.0, 600.0
"""Seconds that a cell may take before its ranks count as hung."""
PAGE = Path(__file__).parents[2] / "build" / "parity.txt"


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a cell."""

    kind: str
    """`passed`, `FAILED`, `same`, `refused`, `not here` or `not run`."""
    error: float = 0.0
    words: str = ""
    seconds: float = 0.0


# -- functions of the ranks

_unused: dict[str, bool] = {}


def run_cell(cell: Cell, steps: int, folder: str = "") -> tuple[dict[str, float], float, dict[str, float]] | None:
    """Train under the plan on every rank, and compare with one device.

    Rank 0 returns the errors, the largest error of any step's loss, and, if an error exceeds its bound, the rounding
    errors of one device against float64. `folder` caches the results of one device.
    """

    def remembered(job: Any) -> bool:
        if cell.job not in _unused:
            _unused[cell.job] = has_unused_parameters(job)
        return _unused[cell.job]

    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or torch would go on without compiling
    with (
        parity.shard_small_layers(cell.plan),
        mock.patch("drumline.runtime.core.rank_state.has_unused_parameters", remembered),
    ):
        engine = build_engine(small_jobs.make(cell.job), Plan.parse(cell.plan), exact=cell.computed == "float64")
        mine = run_plan(engine, steps, set(), locate=False)
        if engine.rank > 0:
            return None
        theirs = reference(engine, cell, steps, folder)
        parts, later = errors_of(mine, theirs, cell.computed, engine.plan)
        if cell.computed == "float64" or all(e <= limits_of(cell.computed, engine.plan)[0] for e in parts.values()):
            return parts, later, {}
        truth = reference(engine, cell, steps, folder, exact=True)
        return parts, later, errors_of(theirs, truth, cell.computed, engine.plan)[0]


# -- functions of the main process


def judge(cell: Cell, parts: Mapping[str, float], later: float, rounding: Mapping[str, float]) -> Result:
    """Judge the errors of a cell by its bounds; `rounding` are the rounding errors of one device."""
    plan = Plan.parse(cell.plan)
    bounds = bounds_of(cell.computed, plan, rounding)
    part = worst_of(parts, bounds)
    worst, bound = parts[part], bounds[part]
    if not worst <= bound:
        return Result("FAILED", worst, f"{part} off by {worst:.1e}, at most {bound:.2g}")
    if plan.compress != "none" and not later <= COMPRESSED[plan.compress]:
        return Result("FAILED", later, f"losses off by {later:.1e}, at most {COMPRESSED[plan.compress]:g}")
    most = APPROXIMATE_LOSS.get(plan.precision, math.inf)
    if cell.computed != "float64" and not later <= most:
        return Result("FAILED", later, f"losses off by {later:.1e}, at most {most:g}")
    if worst > limits_of(cell.computed, plan)[0]:
        return Result(
            "passed", worst, f"{part} off by {worst:.1e}; on one device they are off float64 by {rounding[part]:.1e}"
        )
    return Result("passed", max(worst, later) if plan.compress != "none" else worst)


def limit_of(plan: Plan) -> float:
    """Time limit of a cell in seconds; the same for all cells of a world."""
    return COMPILE_LIMIT if plan.compile else LIMIT


def run_one(world: World, cell: Cell, steps: int, folder: str = "") -> Result:
    """Run a cell on its ranks."""
    start = time.monotonic()
    expected = split_cells.unfit(cell.job, Plan.parse(cell.plan))
    try:
        limit = limit_of(Plan.parse(cell.plan))
        result = judge(cell, *world.run(run_cell, cell, steps, folder, timeout=limit)[0])
        if expected:
            result = Result("FAILED", math.inf, f"it ran, but should have been refused: {expected}")
    except PlanError as e:
        known = expected and e.what.startswith(expected)
        words = f"{e.what}: {e.rule}"
        result = Result("refused", math.inf, words) if known else Result("FAILED", math.inf, f"PlanError: {words}")
    except Exception as e:
        result = Result("FAILED", math.inf, f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
    return Result(result.kind, result.error, result.words, time.monotonic() - start)


def groups_by_world(todo: Sequence[Cell]) -> list[list[Cell]]:
    """Group cells by the world they run in. Few ranks come first, for early results; one rank and the compiler last."""
    result: dict[tuple[bool, int, str, str], list[Cell]] = {}
    for cell in todo:
        plan = Plan.parse(cell.plan)
        ranks, backend = cells.world_of(plan)
        result.setdefault((plan.compile, ranks if ranks > 1 else LARGEST + 1, backend, cell.job), []).append(cell)
    return [result[key] for key in sorted(result, key=lambda key: (*key[:3], -len(result[key])))]


def run_all(todo: Sequence[Cell], steps: int, at_once: int, keep: Callable[[Cell, Result], None]) -> dict[Cell, Result]:
    """Run all cells. Ranks serve one job and world size: process groups and compiled layers are reused between plans."""
    waiting: queue.SimpleQueue[list[Cell]] = queue.SimpleQueue()
    for group in groups_by_world(todo):
        waiting.put(group)
    results: dict[Cell, Result] = {}
    folder = tempfile.TemporaryDirectory(prefix="drumline-references-")

    def work() -> None:
        while True:
            try:
                group = waiting.get_nowait()
            except queue.Empty:
                return
            plan = Plan.parse(group[0].plan)
            world = World(*cells.world_of(plan), patience=limit_of(plan))
            try:
                for cell in group:
                    results[cell] = run_one(world, cell, steps, folder.name)
                    keep(cell, results[cell])
                    _print_progress(cell, results[cell], len(results), len(todo))
            finally:
                world.stop()

    workers = [threading.Thread(target=work) for _ in range(at_once)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    folder.cleanup()
    return results


class Log:
    """A file of results, a line each; failures are not stored, so that they run again."""

    def __init__(self, path: str, steps: int) -> None:
        self._path, self._steps = Path(path) if path else None, steps
        self._lock = threading.Lock()

    def known(self) -> dict[Cell, Result]:
        """Load the results of an earlier run with the same number of steps."""
        if self._path is None or not self._path.exists():
            return {}
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        return {Cell(**x["cell"]): Result(**x["result"]) for x in lines if x["steps"] == self._steps}

    def keep(self, cell: Cell, result: Result) -> None:
        """Append a result."""
        if self._path is None or result.kind == "FAILED":
            return
        outcome = {"cell": dataclasses.asdict(cell), "result": dataclasses.asdict(result), "steps": self._steps}
        with self._lock, self._path.open("a") as f:
            print(json.dumps(outcome), file=f)


def _print_progress(cell: Cell, result: Result, done: int, of: int) -> None:
    if result.kind == "FAILED":
        print(f"FAILED {cell.job} {cell.plan} {cell.computed}: {result.words}", file=sys.stderr, flush=True)
    elif done % 100 == 0:
        print(f"{done} of {of} cells", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a plan on some number of ranks."""

    plan: str
    fate: str
    """Outcome of the whole row, if it does not depend on the job."""
    cells: tuple[Cell, ...] = ()


def split_rows(jobs: Sequence[str], ranks: int, only: str = "", skip: str = "") -> list[Row]:
    """Make the table of plans that split the model, for a number of ranks."""
    rows = []
    for table, plan in split_cells.plans(ranks):
        name = str(plan) if isinstance(plan, Plan) else ",".join(f"{k}={v}" for k, v in table.items())
        name = name.removeprefix("dp=1,")
        if only not in name or (skip and skip in name):
            continue
        if (why := cells.refused(plan)) or not isinstance(plan, Plan):
            rows.append(Row(name, f"refused: {why}"))
            continue
        rows.append(Row(name, "", tuple(Cell(j, str(plan), t) for j in jobs for t in split_cells.types_of(plan))))
    return rows


def rows_of(jobs: Sequence[str], ranks: int, only: str = "", skip: str = "") -> list[Row]:
    """Make the table of data-parallel plans, for a number of ranks."""
    rows = []
    for table, plan in cells.plans(ranks):
        name = str(Plan.from_table({"dp": 1, **{k: v for k, v in table.items() if k != "shard"}}, "")).removeprefix(
            "dp=1"
        )
        name = name.lstrip(",") + (f",shard={table['shard']}" if "shard" in table else "")
        if only not in name or (skip and skip in name):
            continue
        if (why := cells.refused(plan)) or not isinstance(plan, Plan):
            rows.append(Row(name or "dp", f"refused: {why}"))
            continue
        rows.append(Row(name or "dp", "", tuple(Cell(j, str(plan), t) for j in jobs for t in cells.types_of(plan))))
    return rows


def draw(rows: Sequence[Row], jobs: Sequence[str], ranks: int, results: Mapping[Cell, Result]) -> list[str]:
    """Format plans as rows and jobs as columns: the errors in float64 and in the plan's own type."""
    width = max((len(row.plan) for row in rows), default=4)
    lines = [f"{ranks} rank{'s' if ranks > 1 else ''}", f"{'':{width}}  " + "  ".join(f"{j:>17}" for j in jobs)]
    for row in rows:
        if row.fate:
            lines.append(f"{row.plan:{width}}  {row.fate}")
            continue
        result = {cell: results[cell] for cell in row.cells}
        whole = {(r.kind, r.words) for r in result.values()}
        if len(whole) == 1 and (r := next(iter(result.values()))).words and r.kind != "FAILED":
            lines.append(f"{row.plan:{width}}  {r.kind}: {r.words}")
            continue
        columns = [" ".join(_short(result[c]) for c in row.cells if c.job == j) for j in jobs]
        lines.append(f"{row.plan:{width}}  " + "  ".join(f"{c:>17}" for c in columns))
        notes = dict.fromkeys(
            f"{c.computed} {r.kind}: {r.words}" if r.kind == "same" else f"{c.job} {c.computed} {r.kind}: {r.words}"
            for c, r in result.items()
            if r.words
        )
        lines += [f"{'':{width}}    {note}" for note in notes]
    return lines


def _short(result: Result) -> str:
    return (
        f"{result.error:.0e}"
        if result.kind == "passed"
        else {"not here": "-", "not run": "."}.get(result.kind, result.kind)
    )


@dataclass(frozen=True, slots=True)
class Family:
    """Plans of one kind, with the jobs and numbers of ranks to test them on."""

    jobs: tuple[str, ...]
    ranks: tuple[int, ...]
    rows: Callable[[Sequence[str], int, str, str], list[Row]]
    fate: Callable[[Cell], cells.Fate | None]


FAMILIES = {
    "data": Family(small_jobs.JOBS, cells.RANKS, rows_of, cells.fate),
    "split": Family(small_jobs.SPLIT_JOBS, split_cells.RANKS, split_rows, split_cells.fate),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix or the selected part; returns 1 when a cell fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--family", default=",".join(FAMILIES), help="data-parallel plans, or those that split the model"
    )
    parser.add_argument("--jobs", default="", help="names with commas between them; all")
    parser.add_argument("--ranks", default="", help="numbers of ranks; 1 to 4, and 2, 4, 8 where the model is split")
    parser.add_argument("--plans", default="", help="only plans with this text in them, such as zero=1")
    parser.add_argument("--skip", default="", help="no plans with this text in them, such as compile")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--at-once", type=int, default=2, help="worlds of ranks at a time")
    parser.add_argument("--log", default="", help="store results here, and skip cells that are in it")
    parser.add_argument("--list", action="store_true", help="count the cells and run none")
    chosen = parser.parse_args(arguments)
    families = chosen.family.split(",")
    known = {*small_jobs.JOBS, *small_jobs.SPLIT_JOBS}
    asked = [j for j in chosen.jobs.split(",") if j]
    for word, words in [*((f, FAMILIES) for f in families), *((j, known) for j in asked)]:
        if word not in words:
            parser.error(f"{word!r} is not one of {', '.join(sorted(words))}")
    start = time.monotonic()
    tables: dict[tuple[str, int], tuple[list[str], list[Row]]] = {}
    for name, family in ((name, FAMILIES[name]) for name in families):
        jobs = [j for j in family.jobs if not asked or j in asked]
        ranks = [int(n) for n in chosen.ranks.split(",") if n] or family.ranks
        tables |= {(name, n): (jobs, family.rows(jobs, n, chosen.plans, chosen.skip)) for n in ranks}
    results, todo = _known_and_todo(tables)
    refused = sum(2 * len(jobs) for jobs, rows in tables.values() for row in rows if row.fate)
    if chosen.list:
        print(f"{len(todo)} cells to run; {Counter(r.kind for r in results.values())}, {refused} refused")
        return 0
    log = Log(chosen.log, chosen.steps)
    results |= {cell: result for cell, result in log.known().items() if cell in set(todo)}
    results |= run_all([cell for cell in todo if cell not in results], chosen.steps, chosen.at_once, log.keep)
    lines = [line for (_, n), (jobs, rows) in tables.items() for line in [*draw(rows, jobs, n, results), ""]]
    lines += summary(results, refused, time.monotonic() - start)
    print("\n".join(lines))
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n")
    return 1 if any(r.kind == "FAILED" for r in results.values()) else 0


def _known_and_todo(
    tables: Mapping[tuple[str, int], tuple[list[str], list[Row]]],
) -> tuple[dict[Cell, Result], list[Cell]]:
    """Separate the cells whose outcome is known without running from those to run."""
    results: dict[Cell, Result] = {}
    todo = []
    for (family, _), (_, rows) in tables.items():
        for cell in itertools.chain.from_iterable(row.cells for row in rows):
            fate = FAMILIES[family].fate(cell)
            if fate is None:
                todo.append(cell)
            else:
                results[cell] = Result(fate.kind, words=fate.words)
    return results, todo


def summary(results: Mapping[Cell, Result], refused: int, seconds: float) -> list[str]:
    """Count the cells by outcome and find the largest error of each type."""
    counts = Counter(r.kind for r in results.values())
    counts["refused"] += refused
    kinds = ("passed", "FAILED", "same", "refused", "not here", "not run")
    lines = [
        f"{sum(counts.values())} cells: "
        + ", ".join(f"{counts[k]} {k}" for k in kinds)
        + f"; {seconds / 60:.0f} minutes"
    ]
    for computed, bound in BOUNDS.items():
        errors = [
            r.error
            for c, r in results.items()
            if r.kind == "passed" and c.computed == computed and "compress" not in c.plan
        ]
        if errors:
            over = sum(e > bound for e in errors)
            more = f", or twice the rounding of one device ({over} cells)" if over else ""
            lines.append(f"{computed}: {len(errors)} passed, largest error {max(errors):.1e}, at most {bound:g}{more}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
