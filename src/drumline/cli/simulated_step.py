"""Simulated steps of a job on the screen and as JSON, and the sweep over numbers of devices."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from .common import print_json

if TYPE_CHECKING:
    from ..loop.simulate import Simulation


def step_document(replay: Simulation) -> dict[str, Any]:
    """The keys of a job's step in the JSON document."""
    e, path = replay.estimate, replay.critical_path
    assert e is not None
    value: dict[str, Any] = {
        "planned_seconds": replay.planned_seconds,
        "planned_by": replay.planned_by,
        "critical_path_seconds": [part.seconds for part in path],
        "critical_path_ranks": [part.rank for part in path],
        "ranks": replay.timeline.all_ranks,
        "rank_counts": {str(rank): n for rank, n in replay.timeline.rank_counts.items()},
        "samples_per_second": replay.samples_per_second,
        "tokens_per_second": replay.tokens_per_second,
        "latency_seconds": replay.latency_seconds,
        "mfu": replay.mfu,
        "memory_bytes": e.memory_bytes,
        "memory_limit": e.memory_limit,
        "memory": [{"stage": m.stage, "peak": m.peak} for m in replay.memory],
        "links": [dataclasses.asdict(x) for x in replay.links],
        "notes": [*e.notes, *replay.notes],
    }
    if replay.failures is not None:
        value["failures"] = dataclasses.asdict(replay.failures) | {"goodput": replay.failures.goodput}
    return value


def print_step(replay: Simulation) -> None:
    """The step of a job."""
    from ..loop.step_simulation import CONTENTION
    from ..reports.console import console
    from ..reports.plan_text import estimate_lines
    from ..reports.simulation_text import failure_lines, link_lines, memory_lines, path_line, ranks_line, rate_line
    from ..reports.worker_text import worker_lines

    out, e = console(), replay.estimate
    assert e is not None
    out.print(replay.title)
    contention = replay.parts.get(CONTENTION, 0.0)
    parts = {**e.parts, CONTENTION: contention}
    out.print(estimate_lines(dataclasses.replace(e, step_seconds=e.step_seconds + contention, parts=parts)))
    rates = rate_line(replay.samples_per_second, replay.tokens_per_second, replay.latency_seconds, replay.mfu)
    if rates:
        out.print(rates)
    out.print(path_line(replay.critical_path))
    for line in [*link_lines(replay.links), *memory_lines(replay.memory, out.width)]:
        out.print(line)
    if replay.workers is not None:
        out.print(worker_lines(replay.workers))
    if replay.failures is not None:
        for line in failure_lines(replay.failures, replay.step_seconds):
            out.print(line)
    out.print(ranks_line(replay.timeline))
    if replay.planned_by:
        out.print(f"prices: {replay.planned_by}")
    for note in (*e.notes, *replay.notes):
        out.print(f"note: {note}")


def device_counts(text: str) -> list[int]:
    """Read `8,16,32`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise InputError(f"--sweep {text}", rule="numbers of devices, separated by commas", fix="--sweep 8,16,32")
    return [int(word) for word in words]


def print_sweep(
    target: str,
    plan: str,
    cluster: str | None,
    counts: list[int],
    scaling: str,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """One plan on several numbers of devices."""
    from ..loop.simulate_scaling import simulate_scaling
    from ..reports.console import console
    from ..reports.simulation_text import sweep_table

    start = time.perf_counter()
    points = simulate_scaling(target, plan, cluster, counts, scaling=scaling, **options)
    if as_json:
        rows = [dataclasses.asdict(p) for p in points]
        print_json({"scaling": scaling, "points": rows, "seconds": time.perf_counter() - start})
        return
    out = console()
    batch = "the same batch" if scaling == "strong" else "a batch that grows with the replicas"
    out.print(f"{target} with {plan} on more or fewer replicas: {scaling} scaling ({batch})")
    out.print(sweep_table(points, out.width))
