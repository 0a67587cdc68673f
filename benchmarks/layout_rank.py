"""One rank of benchmarks/layouts.py: measures with the others, asks the planner, and runs plans in turns.

    layout_rank.py TASK BLOCKS STEPS [PLANS]

Without plans (a JSON list) it plans first, for the cluster in LAYOUTS_CLUSTER, or, where that file is not there, for
what the ranks measure into it. Every plan is tried for some steps; those that come near the fastest then take turns, in
blocks. Rank 0 prints the results as one JSON document.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_tasks import RANKS, TASKS, Task, priced

from drumline.clusters import Cluster
from drumline.comm.environment import connect, disconnect
from drumline.core.errors import PlanError
from drumline.core.units import format_rate, format_seconds
from drumline.costs import OperatorCostModel
from drumline.measurement.machine import measure_rank, to_cluster
from drumline.planner import search
from drumline.runtime.engine import initialize
from drumline.tracing import trace

TRIED, SLOW, HOPELESS = 3, 1.6, 3.0
"""Steps of every plan, after one to warm up. Where that one took so much of the fastest plan's time, one more is
enough, or it says enough by itself."""
NEAR = 1.3
"""Plans whose step takes at most this multiple of the fastest one's are timed again, in turns with it."""


def main() -> None:
    task, blocks, steps = TASKS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    connect(backend="gloo")
    torch.set_num_threads(1)
    job = task.job()
    results: dict[str, Any] = {} if sys.argv[4:] else _planned(task, job)
    plans = json.loads(sys.argv[4]) if sys.argv[4:] else list(results["predicted"])
    tried, refused = _tried(job, plans)
    fastest = min(statistics.median(t) for t in tried.values())
    near = [p for p, t in tried.items() if min(t) <= NEAR * fastest or p == results.get("chosen")]
    results |= {"tried": tried, "refused": refused, "turns": _turns(job, near, blocks, steps) if blocks else {}}
    if dist.get_rank() == 0:
        print(json.dumps(results))
    disconnect()


def _planned(task: Task, job: Any) -> dict[str, Any]:
    """Plan for this cluster: the planner's first choice and the price of every layout."""
    planned: list[Any] = [None]
    cluster = _measured(Path(os.environ["LAYOUTS_CLUSTER"]))
    if dist.get_rank() == 0:
        assert cluster.network is not None
        profile = trace(job)
        answer, _ = search(profile, cluster)
        first = answer.candidates[0]
        chosen = next(c for c in answer.candidates if c.plan.ranks == RANKS)
        predicted = priced(task.samples, OperatorCostModel(profile, cluster, chosen.plan.precision))
        predicted |= {str(chosen.plan): chosen.step_seconds}
        links = [
            f"{format_seconds(x.alpha)} and {format_rate(x.bandwidth)} {where}"
            for x, where in ((cluster.node.link, "inside"), (cluster.network.link, "between"))
        ]
        planned = [
            {
                "chosen": str(chosen.plan),
                "idle": str(first.plan) if first != chosen else "",
                "candidates": len(answer.candidates),
                "predicted": dict(sorted(predicted.items(), key=lambda item: item[1])),
                "links": ", ".join(links),
            }
        ]
    dist.broadcast_object_list(planned)
    result: dict[str, Any] = planned[0]
    return result


def _measured(file: Path) -> Cluster:
    """Load the cluster that the ranks measured for the previous task, or measure it now."""
    if not file.exists():
        mine = measure_rank(lambda event: None)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, mine)
        if dist.get_rank() == 0:
            to_cluster(results).save(file)
            _log_progress("measured")
        dist.barrier()
    return Cluster.load(file)


def _tried(job: Any, plans: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time some steps of every plan, one plan after the other, the cheapest first; also why plans were refused."""
    times: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for p in plans:
        try:
            engine = initialize(job, f"{p},backend=gloo")
        except PlanError as e:  # by all ranks alike
            refused[p] = e.what
            continue
        batch = next(iter(engine.data(1)))
        first = _seconds(engine, batch, 1)
        fastest = min((statistics.median(t) for t in times.values()), default=first)
        more = TRIED if first < SLOW * fastest else 1 if first < HOPELESS * fastest else 0
        times[p] = [_seconds(engine, batch, 1) for _ in range(more)] or [first]
        if dist.get_rank() == 0:
            _log_progress(f"{p}: {statistics.median(times[p]):.3f} s")
        del engine, batch
        gc.collect()
    return times, refused


def _log_progress(text: str) -> None:
    """Append a line to the file named by LAYOUTS_PROGRESS: the output of ranks is shown only at the end."""
    if os.environ.get("LAYOUTS_PROGRESS"):
        with open(os.environ["LAYOUTS_PROGRESS"], "a", encoding="utf-8") as f:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=f)


def _turns(job: Any, plans: Sequence[str], blocks: int, steps: int) -> dict[str, list[float]]:
    """Time blocks of steps of the plans in turns: seconds per step of the slowest rank, by plan and block."""
    engines = {p: initialize(job, f"{p},backend=gloo") for p in plans}
    batches = {p: next(iter(e.data(1))) for p, e in engines.items()}
    for p, engine in engines.items():
        engine.step(batches[p])
    times: dict[str, list[float]] = {p: [] for p in plans}
    for block in range(blocks):
        for p in random.Random(block).sample(list(plans), len(plans)):
            times[p].append(_seconds(engines[p], batches[p], steps))
    return times


def _seconds(engine: Any, batch: Any, steps: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step(batch)
    taken = torch.tensor([(time.perf_counter() - begin) / steps], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


if __name__ == "__main__":
    main()
