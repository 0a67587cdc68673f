"""The cells of the data-parallel parity matrix: every plan with `dp` and at most two choices, for every job and type. They come
from the table of supported combinations; this file adds which choices are the same on a CPU, and what it cannot do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import parity
import small_jobs

from drumline.core.errors import PlanError
from drumline.plans import Plan
from drumline.plans.combinations import TESTED_VALUES, UNRESTRICTED_KEYS, conflict, refusal
from drumline.runtime.verification.tolerances import COMPUTE_DTYPES

RANKS = (1, 2, 3, 4)
CHOICES = 2
"""Number of keys other than `dp` that differ from their defaults."""
TRIED: dict[str, tuple[object, ...]] = {**parity.TRIED, "bucket": (256,)}
"""Of the keys that may have any value: these."""
COMPILED_RANKS = 2
"""Compiling takes most of an hour by itself, and what is compiled on a rank seldom knows of the others."""
COMPILED_JOB = "cnn"
"""Its norms send inside of what is compiled, and ranks without samples compile something else."""
ALGORITHM_JOB = "cnn"
"""A sum of gradients does not depend on the model; its norms send while the gradients are under way."""

_DEFAULTS = {f.name: f.default for f in fields(Plan)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One job under one plan, computed in one type."""

    job: str
    plan: str
    computed: str


@dataclass(frozen=True, slots=True)
class Fate:
    """The outcome of a cell that does not run."""

    kind: str
    """`same`, `refused`, `not here` or `not run`."""
    words: str


@dataclass(frozen=True, slots=True)
class Same:
    """A choice that has the same effect as the default here."""

    holds: Callable[[Plan], bool]
    back: tuple[str, ...]
    """The keys that go back to their defaults."""
    reason: str


SAMES = (
    Same(lambda p: p.offload != "none", ("offload",), "a CPU's memory is the host's: nothing moves"),
    Same(lambda p: p.precision == "tf32", ("precision",), "a CPU does not round to tf32"),
    Same(lambda p: p.backend == "gloo", ("backend",), "the ranks have joined by gloo already"),
    Same(lambda p: p.ranks == 1 and p.compress != "none", ("compress",), "one rank sends nothing"),
    Same(lambda p: p.ranks == 1 and p.static, ("static",), "one rank does not replicate"),
    Same(lambda p: p.ranks == 1 and p.allreduce != "auto", ("allreduce",), "one rank sends nothing"),
    Same(lambda p: p.allreduce == "native", ("allreduce",), "ranks of one host: `auto` is the backend's own"),
    Same(lambda p: p.shard == p.dp, ("shard",), "all replicas share one copy anyway"),
    Same(
        lambda p: p.bucket != _DEFAULTS["bucket"] and p.zero not in (1, 2),
        ("bucket",),
        "these models are smaller than the smallest bucket of torch's, 1 MiB",
    ),
)
"""In this order."""


ELSEWHERE = parity.SPLITS | parity.WITHOUT_WAITING | {"graph"}
"""Keys with tests of their own; `graph` needs a GPU."""


def plans(dp: int) -> Iterator[tuple[dict[str, object], Plan | PlanError]]:
    """Every table with at most two choices, and its plan, or why it is invalid."""
    values = {**TESTED_VALUES, **{key: TRIED.get(key, ()) for key in sorted(UNRESTRICTED_KEYS - {"dp"})}}
    data = {key: result for key, result in values.items() if key not in ELSEWHERE}
    chosen = {key: [v for v in result if v != _DEFAULTS[key]] for key, result in data.items()}
    for n in range(CHOICES + 1):
        for keys in itertools.combinations(chosen, n):
            for picked in itertools.product(*(chosen[key] for key in keys)):
                table = dict(zip(keys, picked, strict=True))
                try:
                    yield table, Plan.from_table({"dp": dp, **table}, "the matrix")
                except PlanError as e:
                    yield table, e


def types_of(plan: Plan) -> tuple[str, str]:
    """The types in which a plan is verified: float64, and that of its own precision."""
    return "float64", COMPUTE_DTYPES[plan.precision]


def refused(plan: Plan | PlanError) -> str:
    """Why the engine refuses it for every job."""
    if isinstance(plan, PlanError):
        return plan.rule or plan.what
    result = conflict(plan)
    return result.reason_for(plan) if result else refusal(plan)


def same_as(plan: Plan, computed: str) -> tuple[Plan, str]:
    """The plan that does the same here in this type, and why; itself if there is none."""
    made, reasons = plan, []
    for rule in SAMES:
        if rule.holds(made):
            made = replace(made, **{key: _DEFAULTS[key] for key in rule.back})
            reasons.append(rule.reason)
    if computed == "float64" and made.precision != "fp32":
        made = replace(made, precision="fp32")
        reasons.append("float64 shows the plan's arithmetic, not its precision")
    if computed == "float64" and made.compress != "none":
        made = replace(made, compress="none")
        reasons.append("float64 shows the plan's arithmetic, not what compression loses")
    return made, "; ".join(reasons)


def not_here(job: str, plan: Plan) -> str:
    """Why this machine cannot run it."""
    if plan.backend == "nccl":
        return "nccl joins GPUs"
    if plan.backend == "mpi":
        return "mpiexec starts its ranks: see test_mpi_training.py"
    if plan.precision == "fp8":
        return "only GPUs have float8 units: see test_float8.py"
    words = [plan.precision, *(["chunk"] if plan.chunk > 1 else [])]
    results = [parity.NOT_HERE[job, word] for word in words if (job, word) in parity.NOT_HERE]
    return small_jobs.missing(job) or "; ".join(results)


def fate(cell: Cell) -> Fate | None:
    """The outcome of a cell of a valid plan that does not run; None: it runs."""
    plan = Plan.parse(cell.plan)
    if why := refused(plan):
        return Fate("refused", why)
    if why := not_here(cell.job, plan):
        return Fate("not here", why)
    other, why = same_as(plan, cell.computed)
    if other != plan:
        return Fate("same", f"{other}: {why}")
    if plan.compile and plan.ranks != COMPILED_RANKS and cell.job != COMPILED_JOB:
        return Fate("not run", f"compiling takes long; see {COMPILED_RANKS} ranks, and {COMPILED_JOB} on all")
    if plan.allreduce != "auto" and cell.job != ALGORITHM_JOB:
        return Fate("not run", f"the sum does not depend on the model; see {ALGORITHM_JOB}")
    return None


def world_of(plan: Plan) -> tuple[int, str]:
    """The ranks that a plan runs on: number of processes, and backend."""
    return plan.processes, "shm" if plan.backend == "shm" else "gloo"
