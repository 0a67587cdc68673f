"""The table of parity claims (jobs x plans), a pairwise cover of it, and the function that ranks run for one row."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import small_jobs
import torch

from drumline.core.errors import PlanError
from drumline.core.job import Job
from drumline.plans import Plan
from drumline.plans.combinations import TESTED_VALUES, UNRESTRICTED_KEYS, refusal
from drumline.runtime.engine import initialize
from drumline.runtime.verification.reference import run_reference
from drumline.runtime.verification.verify import Verification, verify

SEEDS = 6
"""Starting pairs tried for each row of the cover."""
STEPS = 4
"""Two full batches, a ragged one, and one of the next epoch."""

TRIED: dict[str, tuple[object, ...]] = {"dp": (1, 2, 3, 4), "micro": (1, 2, 3), "shard": (0, 2), "chunk": (1, 3)}
"""Values to try for keys that may have any value."""
SAME: dict[str, tuple[object, ...]] = {"offload": ("optimizer", "all"), "precision": ("tf32", "fp8")}
"""Values that do the same as the default on a CPU (nothing to move or round), and fp8, which needs a GPU: see
test_float8.py."""
SPLITS = {"pp", "virtual", "split", "schedule", "tp", "cp", "tile", "halo", "ep"}
"""Keys of plans that split the model: their table is split_cells.py, ep's is test_experts_engine.py, and that of tiles
without halos is test_no_halo.py."""
WITHOUT_WAITING = {"sync", "servers", "backup", "damping", "outer", "sync_first", "across"}
"""Keys of replicas that do not wait for each other: test_local_sgd.py, test_gossip.py and others."""
ELSEWHERE = {"allreduce", "backend", "bucket", "compile", "graph"} | SPLITS | WITHOUT_WAITING
"""Covered by tests of their own: algorithms and buckets need a model larger than one bucket, `nccl` and `graph` need GPUs,
compiling takes minutes."""

TABLE: dict[str, tuple[object, ...]] = {
    "job": small_jobs.JOBS,
    **{key: tuple(v for v in values if v not in SAME.get(key, ())) for key, values in TESTED_VALUES.items()},
    **{key: TRIED.get(key, ()) for key in sorted(UNRESTRICTED_KEYS)},
}
"""Every value that the planner may choose, for every job."""
for _key in ELSEWHERE | {key for key, values in TABLE.items() if len(values) == 1}:
    del TABLE[_key]

Row = tuple[object, ...]


def rows() -> list[Row]:
    """List the rows of the table that are valid plans."""
    return [row for row in itertools.product(*TABLE.values()) if is_plan(row)]


NOT_HERE = {
    ("unet", "chunk"): "it has no layer that is cut, and the engine says so",
}
"""Jobs that torch cannot compute on a CPU in a precision, or on which a key has no effect."""


@functools.cache
def is_plan(row: Row) -> bool:
    """Check that the values of a row form a valid plan."""
    try:
        plan = plan_of(row)
        features = [plan.precision, *(["chunk"] if plan.chunk > 1 else [])]
        if plan.ranks == 1 and (plan.compress != "none" or plan.static):
            return False  # one rank sends nothing
        return refusal(plan) == "" and not any((row[0], feature) in NOT_HERE for feature in features)
    except PlanError:
        return False


@functools.cache
def cover() -> list[Row]:
    """The pairwise cover of the table."""
    return pairwise()


def pairwise(table: Mapping[str, Sequence[object]] = TABLE) -> list[Row]:
    """Build a small set of rows with every valid pair of values of two keys in at least one row."""
    keys = list(table)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(keys)), 2)
        for x in table[keys[a]]
        for y in table[keys[b]]
        if _completed({a: x, b: y}, table)
    }
    results = []
    while missing:
        made = max(
            (_row(pair, table, missing) for pair in _some(missing)), key=lambda row: len(missing & set(pairs(row)))
        )
        results.append(made)
        missing -= set(pairs(made))
    return sorted(results, key=lambda made: (made[keys.index("dp")], repr(made)))


def _some(missing: set[Any]) -> list[Any]:
    """Select a few missing pairs, spread evenly; each starts a candidate row."""
    ordered = sorted(missing, key=repr)
    return ordered[:: max(1, len(ordered) // SEEDS)]


def _row(pair: Any, table: Mapping[str, Sequence[object]], missing: set[Any]) -> Row:
    """Complete a row from two values so that it covers as many missing pairs as possible."""
    keys = list(table)
    a, x, b, y = pair
    row: dict[int, object] = {a: x, b: y}
    for k in (k for k in range(len(keys)) if k not in row):
        fits = [value for value in table[keys[k]] if _completed({**row, k: value}, table)]
        row[k] = max(fits, key=lambda value, k=k: _gain(row, k, value, missing))  # type: ignore[misc]
    return tuple(row[k] for k in range(len(keys)))


def _completed(row: Mapping[int, object], table: Mapping[str, Sequence[object]]) -> bool:
    """Check that the values chosen so far can be completed to a row with defaults and some number of ranks."""
    keys = list(table)
    dps = [row[keys.index("dp")]] if keys.index("dp") in row else table["dp"]
    zeros = [row[keys.index("zero")]] if keys.index("zero") in row else table["zero"]
    for dp, zero in itertools.product(dps, zeros):
        made = [row.get(k, table[key][0]) for k, key in enumerate(keys)]
        made[keys.index("dp")], made[keys.index("zero")] = dp, zero
        if is_plan(tuple(made)):
            return True
    return False


def pairs(row: Row) -> list[tuple[int, object, int, object]]:
    """List all pairs of values of a row, with their positions."""
    return [(a, row[a], b, row[b]) for a, b in itertools.combinations(range(len(row)), 2)]


def _gain(row: Mapping[int, object], k: int, value: object, missing: set[Any]) -> int:
    """Count the missing pairs that a value would cover in the row so far."""
    return sum(((a, x, k, value) if a < k else (k, value, a, x)) in missing for a, x in row.items())


def plan_of(row: Row) -> Plan:
    """The plan of a row."""
    return Plan.from_table(dict(zip(list(TABLE)[1:], row[1:], strict=True)), "the parity table")


@contextmanager
def shard_small_layers(plan: str) -> Iterator[None]:
    """Shard small layers like large ones, and ignore known, harmless warnings of torch."""
    with mock.patch("drumline.tracing.layers.LEAST_UNIT", 40), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # no loss here writes to it
        if "compile=true" in plan:
            warnings.simplefilter("ignore")  # torch's compiler reads what it warns of
        yield


@functools.cache
def same_job(name: str) -> Job:
    """One job for all plans: what the engine knows of a job it need not find out again."""
    return small_jobs.make(name)


def run_verify(name: str, plan: str, steps: int = STEPS, changes: Mapping[str, Any] | None = None) -> Any:
    """On every rank: verify a job under a plan."""
    with shard_small_layers(plan):
        return verify(small_jobs.make(name, **changes) if changes else same_job(name), Plan.parse(plan), steps=steps)


def check(result: Verification) -> None:
    """Check the claim: in float64 to 1e-10, in the plan's own precision to its bound."""
    assert result.passed, result
    assert result.errors["float64"] <= 1e-10, result
    assert set(result.parts["float64"]) == {"losses", "gradients", "last gradients", "parameters"}
    assert all(result.errors[name] <= bound for name, bound in result.bounds.items())
    assert result.first_divergence is None


def run_losses(name: str, plan: str, steps: int = STEPS, changes: Mapping[str, Any] | None = None) -> Any:
    """On every rank: the losses, step by step, the norm of the gradients before clipping, the rates and the buffers."""
    with shard_small_layers(plan):
        engine = initialize(small_jobs.make(name, **(changes or {})), plan, dtype=torch.float64)
    losses, norms, rates = [], [], []
    for batch in engine.data(steps):
        losses.append(engine.step(batch))
        norms.append(engine.grad_norm)
        rates.append(engine.optimizer.param_groups[0]["lr"])
    buffers = {k: b.clone() for k, b in engine.model.named_buffers()}
    weights = {k: p.clone() for k, p in engine.whole_parameters().items()}
    return {"losses": losses, "norms": norms, "rates": rates, "buffers": buffers, "weights": weights}


def serial(name: str, *, micro: int = 1, steps: int = STEPS, changes: Mapping[str, Any] | None = None) -> Any:
    """The results of one device, by the plain loop of the reference."""
    norms: list[float] = []

    def before_update(step: int, model: torch.nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    losses, model = run_reference(
        small_jobs.make(name, **(changes or {})),
        micro=micro,
        steps=steps,
        device=torch.device("cpu"),
        dtype=torch.float64,
        precision="fp32",
        prepare=lambda model: None,
        before_micro=lambda step, i: None,
        before_update=before_update,
    )
    weights = {k: p.detach() for k, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "buffers": dict(model.named_buffers()), "weights": weights}


class Wide(torch.nn.Module):
    """A model of several buckets: 646,000 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = torch.nn.Linear(6, 400), small_jobs.Residual(400), torch.nn.Linear(400, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))
