"""Measures the ranks of this machine into a `Cluster`, every number with its origin."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from ..clusters import ShapeTimes, Cluster, RateCurve, DeviceSpec, PartialOccupancy, Link, Network, Node, CollectiveTable
from ..comm.environment import connect, device_of
from .cpu import measure_cpu
from .fit import alpha_beta
from .gpu import measure_gpu
from .gpu_steps import measure_amid
from .host import measure_host, measure_workspace
from .idle import AtWork, measure_fewer
from .journal import Journal
from .kernels import geometric_mean, measure_launch
from .levels import Levels, find_levels
from .links import measure_collectives, measure_overlap, measure_pair
from .meeting import Meetings, Waiting
from .shared import crowding
from .situ import Situ, Steps
from .starts import Starts

STAGES = (
    "matmul",
    "attention",
    "conv",
    "memory",
    "launch",
    "steps",
    "point to point",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "overlap",
)
"""What is measured, in this order."""


def measure_rank(emit: Callable[[dict[str, Any]], None], journal: str | None = None) -> dict[str, Any]:
    """One rank's part: kernels at the same time as all others, then the messages between them.

    `journal` is where the ranks write down what they have; what an earlier run has left there is not measured again.
    """
    where = connect()
    device = device_of(where)
    levels = find_levels()

    last = [""]

    def report(what: str) -> None:
        if where.rank == 0 and what != last[0]:
            last[0] = what
            emit({"measuring": what})

    context = float(psutil.Process().memory_info().rss)
    dist.barrier()
    written = Journal(Path(f"{journal}.{where.rank}") if journal else None, device)
    crowd = max(levels.crowd, crowding(levels.per_host, torch.get_num_threads())) if device.type == "cpu" else 1.0
    on_gpu = device.type == "cuda"
    small = Starts(device) if on_gpu else Steps(crowd)
    starts = small if isinstance(small, Starts) else None
    steps = small if isinstance(small, Steps) else None
    measured = _kernels(device, crowd, report, written, small) | {"start": starts.look() if starts else {}}
    dist.barrier()
    report("steps")
    rank_alone = _device_alone(measured, device)
    amid = steps.beside(rank_alone) if steps else Situ(measure_amid(rank_alone, device), {})
    start = starts.look() if starts else amid.start
    dist.barrier()
    fewer = measure_fewer(levels, steps, crowd) if steps and levels.near else {}
    del small, starts, steps  # and their models
    report("point to point")
    return {
        **measured,
        **(_ALONE if where.size == 1 else _messages(where.rank, device, levels, report)),
        "start": start,
        "situ": amid.factors,
        "context": context if device.type == "cpu" else 0.0,
        "hosts": levels.hosts,
        "fewer": fewer,
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "memory": _memory(device),
        "workspace": measure_workspace(device) if device.type == "cuda" else 0.0,
        "host": measure_host(device, _memory(torch.device("cpu")) / where.size) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transport": "nccl" if device.type == "cuda" else dist.get_backend(),
    }


_ALONE = {"waiting": Waiting(1.0, 1.0, 0.0, 0.0, 1, 1.0), "pair": [], "far": [], "collectives": [], "overlap": 1.0}
"""Of a rank that has nobody to send messages to."""


def _messages(rank: int, device: torch.device, levels: Levels, report: Callable[[str], None]) -> dict[str, Any]:
    """What messages take, and what ranks that meet take beyond them: their steps are taken before, amid and after."""
    meetings = Meetings(device, levels.inside)
    meetings.take()

    def between(what: str) -> None:
        meetings.take()
        report(what)

    found = {
        "pair": measure_pair(rank, device, levels.near) if levels.near else [],
        "far": measure_pair(rank, device, levels.far) if levels.far else [],
        "collectives": [
            (dist.get_world_size(group), measure_collectives(group, device, report if i else between))
            for i, group in enumerate(_groups(levels))
        ],
        "overlap": measure_overlap(device, levels.inside),
    }
    meetings.take()
    return found | {"waiting": meetings.waiting()}


def _groups(levels: Levels) -> list[dist.ProcessGroup | None]:
    """Whose collectives are measured: all ranks of a host, all ranks, and on one host also pairs side by side."""
    found: list[dist.ProcessGroup | None] = [levels.inside] if levels.near else []
    if levels.far:
        return [*found, None]
    if levels.per_host > 2 and levels.per_host % 2 == 0:
        pairs = [dist.new_group([i, i + 1]) for i in range(0, levels.per_host, 2)]
        found.append(pairs[dist.get_rank() // 2])
    return found


def _kernels(
    device: torch.device, crowd: float, report: Callable[[str], None], journal: Journal, small: Steps | Starts
) -> dict[str, Any]:
    """Points of curves, shapes, the start of an operator: all ranks at once, because they share memory and caches.

    Small steps are taken amid them.
    """
    if device.type == "cuda":
        kernels = measure_gpu(device, report, journal, small.take)
    else:
        kernels = measure_cpu(device, crowd, report, journal, small.take)
    report("launch")
    return {
        "points": {
            name: [(p.kernel, p.size, p.rate, p.timing.spread) for p in points]
            for name, points in kernels.points.items()
        },
        "spots": {
            name: [(s.kernel, s.shape, s.timing.seconds, s.timing.spread) for s in spots]
            for name, spots in kernels.spots.items()
        },
        "launch": measure_launch(device, crowd),
    }


def to_cluster(results: list[dict[str, Any]]) -> Cluster:
    """What the ranks measured, as a cluster of one node, or of as many as there were hosts."""
    first, ranks = results[0], len(results)
    hosts = first["hosts"]
    waiting: Waiting = first["waiting"]
    cpu = first["device"] == "cpu"
    curves, spreads = _curves(results)
    peak = {c.dtype: max(c.rates) for c in curves if c.kernel == "matmul"}
    streams = [c for c in curves if c.kernel == "pointwise"]
    bandwidth = max(max(c.rates) for c in streams)
    launch = statistics.median(r["launch"] for r in results)
    alpha, beta, left = alpha_beta(first["pair"]) if first["pair"] else (launch, 1 / bandwidth, 0.0)
    far, far_beta, far_left = alpha_beta(first["far"]) if hosts > 1 else (0.0, 1.0, 0.0)
    tables = tuple(t for count, found in first["collectives"] for t in _tables(first["transport"], count, found))
    nearest = tuple(t for t in tables if t.ranks == tables[0].ranks)
    straggle, unit = _beyond_messages(waiting, nearest)
    return Cluster(
        name=platform.node() or "this-machine",
        device=DeviceSpec(
            name=first["device_name"],
            kind=first["device"],
            memory=first["memory"] / (ranks // hosts if cpu else 1),
            bandwidth=bandwidth,
            peak=peak,
            launch=launch,
            host_overhead={k: statistics.median(r["start"][k] for r in results) for k in first["start"]},
            context=max(r["context"] for r in results),
            threads=first["threads"] if cpu else 0,
            in_step_slowdown={k: statistics.mean(r["situ"][k] for r in results) for k in first["situ"]},
            host=first["host"],
            workspace=first["workspace"],
            curve=curves,
            shape_times=_clouds(results),
        ),
        node=Node(ranks // hosts, Link(alpha, 1 / beta)),
        network=Network(hosts, Link(far, 1 / far_beta)) if hosts > 1 else None,
        overlap=min(r["overlap"] for r in results),
        straggler_slowdown=straggle,
        mid_step_message_s=waiting.stall,
        sharded_unit_s=unit,
        partial_occupancy={str(count): _fewer(count, found, first["transport"]) for count, found in first["fewer"].items()},
        measurement_spread=statistics.median(spreads),
        collective=tables,
        origin=_origins(first, ranks, left, far_left),
    )


def _origins(first: dict[str, Any], ranks: int, left: float, far: float) -> dict[str, str]:
    """Where each number comes from: when and where it was measured, and how."""
    cpu = first["device"] == "cpu"
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    many = f" of {first['hosts']} hosts" if first["hosts"] > 1 else ""
    stamp = f"measured {when} on {platform.node()}, {ranks} ranks{many} at once, torch {first['torch']}"
    if cpu:
        stamp += f", {first['threads']} thread{'s' if first['threads'] > 1 else ''} each"
    alone, here = "assumed: one rank alone sends no messages", ranks // first["hosts"]
    near = {"node.link": f"alpha-beta fit of messages over {first['transport']}, mean error {left:.0%}"}
    between = {
        **(near if first["pair"] else {}),
        "network.link": f"alpha-beta fit of messages between hosts over {first['transport']}, mean error {far:.0%}",
        "overlap": "an all-reduce beside matmuls",
        "straggle": "small steps replicated and not, less their messages",
        "stall": "small steps with messages amid",
        "unit": "small steps sharded, less their messages",
        "fewer": "small steps, and messages, of some of the ranks, the others idle",
    }
    return {
        "device": stamp,
        "device.peak": f"{stamp}: the best matmul",
        "device.situ": f"{stamp}: two small training steps",
        "device.bandwidth": f"{stamp}: the best stream",
        "device.workspace": f"{stamp}: what is left after a product and its backward",
        "device.host": f"{stamp}: pinned copies both ways, Adam's fused kernel in host memory",
        "device.memory": f"what was free when measured, shared by {here} ranks" if cpu else "told by the driver",
        "node.devices": "ranks that were started to measure",
        **({} if first["pair"] else {"node.link": alone}),
        **{k: f"{stamp}: {how}" if ranks > 1 else alone for k, how in between.items()},
        "spread": f"{stamp}: median over all kernels",
        "collective": stamp,
    }


def _tables(transport: str, ranks: int, found: dict[str, list[tuple[float, float]]]) -> tuple[CollectiveTable, ...]:
    """What collectives of so many ranks took."""
    return tuple(
        CollectiveTable(name, transport, ranks, tuple(m for m, _ in points), tuple(t for _, t in points))
        for name, points in found.items()
    )


def _fewer(count: int, found: AtWork, transport: str) -> PartialOccupancy:
    """What is otherwise when so many ranks of a host work."""
    if found.waiting is None:
        return PartialOccupancy(found.pace)
    tables = _tables(transport, count, found.collectives)
    straggle, unit = _beyond_messages(found.waiting, tables)
    return PartialOccupancy(found.pace, straggle, found.waiting.stall, unit, tables)


def _beyond_messages(waiting: Waiting, measured: tuple[CollectiveTable, ...]) -> tuple[float, float]:
    """(straggle, unit): what replicating and sharding cost a step beyond what their messages cost alone."""
    if not measured:
        return 1.0, 0.0
    tables = {t.collective: t for t in measured}
    message = tables["all_reduce"].at(waiting.blocks * waiting.block_bytes)
    messages = 2 * tables["all_gather"].at(waiting.block_bytes) + tables["reduce_scatter"].at(waiting.block_bytes)
    return max(1.0, (waiting.replicated - message) / waiting.apart), max(0.0, waiting.unit - messages)


def _device_alone(measured: dict[str, Any], device: torch.device) -> DeviceSpec:
    """This rank's kernels as a device, to price a small step with."""
    curves, _ = _curves([measured])
    best = {c.dtype: max(c.rates) for c in curves if c.kernel == "matmul"}
    stream = max(max(c.rates) for c in curves if c.kernel == "pointwise")
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return DeviceSpec(
        "this rank",
        kind,
        1.0,
        stream,
        best,
        measured["launch"],
        curve=curves,
        shape_times=_clouds([measured]),
        host_overhead=measured["start"],
    )


def _clouds(results: list[dict[str, Any]]) -> tuple[ShapeTimes, ...]:
    """The ranks' shapes, each the mean of theirs."""
    found: dict[tuple[str, str], dict[tuple[float, ...], list[float]]] = {}
    for r in results:
        for dtype, spots in r["spots"].items():
            for kernel, shape, seconds, _ in spots:
                found.setdefault((kernel, dtype), {}).setdefault(shape, []).append(seconds)
    return tuple(
        ShapeTimes(kernel, dtype, tuple(shapes), tuple(geometric_mean(times) for times in shapes.values()))
        for (kernel, dtype), shapes in found.items()
    )


def _curves(results: list[dict[str, Any]]) -> tuple[tuple[RateCurve, ...], list[float]]:
    """The ranks' curves, averaged; and the spread of every point."""
    curves, spreads = [], []
    for dtype in results[0]["points"]:
        kernels = dict.fromkeys(kernel for kernel, *_ in results[0]["points"][dtype])
        for kernel in kernels:
            found: dict[float, list[float]] = {}
            for r in results:
                for name, size, rate, spread in r["points"][dtype]:
                    if name == kernel:
                        found.setdefault(size, []).append(rate)
                        spreads.append(spread)
            sizes = tuple(sorted(found))
            curves.append(RateCurve(kernel, dtype, sizes, tuple(geometric_mean(found[s]) for s in sizes)))
    return tuple(curves), spreads


def cpu_name() -> str:
    """The processor's name, as people call it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            names = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or platform.machine()} core"


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    free = float(psutil.virtual_memory().available)
    limit = _cgroup_limit()
    return min(free, limit) if limit else free


def _cgroup_limit() -> float:
    """What a container may use, when it is limited."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                text = f.read().strip()
            if text.isdigit() and int(text) < 2**60:
                return float(text)
    return 0.0


__all__ = ["measure_rank", "to_cluster"]
