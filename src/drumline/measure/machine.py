"""Measures the ranks of this machine into a `Cluster`, every number with its origin."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Callable
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from ..cluster import Cluster, Curve, Device, Link, Node, Table
from ..comm.environment import connect, device_of
from .fit import alpha_beta
from .host import measure_host, measure_workspace
from .kernels import Point, geometric_mean, measure_kernels, measure_launch
from .links import measure_collectives, measure_overlap, measure_pair
from .situ import Waiting, measure_situ, measure_waiting

STAGES = (
    "matmul", "attention", "conv", "memory", "launch", "steps", "point to point", "all_reduce", "all_gather",
    "reduce_scatter", "overlap",
)  # fmt: skip
"""What is measured, in this order."""


def measure_rank(emit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """One rank's part: kernels at the same time as all others, then the messages between them."""
    where = connect()
    device = device_of(where)
    precisions = {"fp32": torch.float32} | ({"bf16": torch.bfloat16} if device.type == "cuda" else {})

    last = [""]

    def report(what: str) -> None:
        if where.rank == 0 and what != last[0]:
            last[0] = what
            emit({"measuring": what})

    context = float(psutil.Process().memory_info().rss)
    points: dict[str, list[Point]] = {}
    dist.barrier()
    for name, dtype in precisions.items():
        points[name] = measure_kernels(device, dtype, report)
        dist.barrier()
    report("launch")
    launch = measure_launch(device)
    dist.barrier()
    alone = where.size == 1
    measured = {
        "points": {name: [(p.kernel, p.size, p.rate, p.timing.spread) for p in ps] for name, ps in points.items()},
        "launch": launch,
    }
    report("steps")
    situ = measure_situ(_device_alone(measured, device), device)
    dist.barrier()
    waiting = Waiting(1.0, 1.0, 0.0, 0.0, 1, 1.0) if alone else measure_waiting(device)
    report("point to point")
    return {
        **measured,
        "situ": situ,
        "waiting": waiting,
        "context": context if device.type == "cpu" else 0.0,
        "pair": [] if alone else measure_pair(where.rank, device),
        "collectives": {} if alone else measure_collectives(where.size, device, report),
        "overlap": 1.0 if alone else measure_overlap(device),
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "memory": _memory(device),
        "workspace": measure_workspace(device) if device.type == "cuda" else 0.0,
        "host": measure_host(device, _memory(torch.device("cpu")) / where.size) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transport": "nccl" if device.type == "cuda" else dist.get_backend(),
    }


def to_cluster(results: list[dict[str, Any]]) -> Cluster:
    """What the ranks measured, as a cluster of one node."""
    first, ranks = results[0], len(results)
    waiting: Waiting = first["waiting"]
    cpu = first["device"] == "cpu"
    curves, spreads = _curves(results)
    peak = {c.dtype: max(c.rates) for c in curves if c.kernel == "matmul"}
    streams = [c for c in curves if c.kernel == "pointwise"]
    bandwidth = max(max(c.rates) for c in streams)
    launch = statistics.median(r["launch"] for r in results)
    alpha, beta, left = alpha_beta(first["pair"]) if ranks > 1 else (launch, 1 / bandwidth, 0.0)
    tables = tuple(
        Table(name, first["transport"], ranks, tuple(m for m, _ in points), tuple(t for _, t in points))
        for name, points in first["collectives"].items()
    )
    straggle, unit = _beyond_messages(waiting, {t.collective: t for t in tables})
    return Cluster(
        name=platform.node() or "this-machine",
        device=Device(
            name=first["device_name"],
            kind=first["device"],
            memory=first["memory"] / (ranks if cpu else 1),
            bandwidth=bandwidth,
            peak=peak,
            launch=launch,
            context=max(r["context"] for r in results),
            threads=first["threads"] if cpu else 0,
            situ={k: statistics.mean(r["situ"][k] for r in results) for k in first["situ"]},
            host=first["host"],
            workspace=first["workspace"],
            curve=curves,
        ),
        node=Node(ranks, Link(alpha, 1 / beta)),
        overlap=min(r["overlap"] for r in results),
        straggle=straggle,
        stall=waiting.stall,
        unit=unit,
        spread=statistics.median(spreads),
        collective=tables,
        origin=_origins(first, ranks, left),
    )


def _origins(first: dict[str, Any], ranks: int, left: float) -> dict[str, str]:
    """Where each number comes from: when and where it was measured, and how."""
    cpu = first["device"] == "cpu"
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    stamp = f"measured {when} on {platform.node()}, {ranks} ranks at once, torch {first['torch']}"
    if cpu:
        stamp += f", {first['threads']} thread{'s' if first['threads'] > 1 else ''} each"
    alone = "assumed: one rank alone sends no messages"
    between = {
        "node.link": f"alpha-beta fit of messages over {first['transport']}, mean error {left:.0%}",
        "overlap": "an all-reduce beside matmuls",
        "straggle": "small steps replicated and not, less their messages",
        "stall": "small steps with messages amid",
        "unit": "small steps sharded, less their messages",
    }
    return {
        "device": stamp,
        "device.peak": f"{stamp}: the best matmul",
        "device.situ": f"{stamp}: two small training steps",
        "device.bandwidth": f"{stamp}: the best stream",
        "device.workspace": f"{stamp}: what is left after a product and its backward",
        "device.host": f"{stamp}: pinned copies both ways, Adam's fused kernel in host memory",
        "device.memory": f"what was free when measured, shared by {ranks} ranks" if cpu else "told by the driver",
        "node.devices": "ranks that were started to measure",
        **{k: f"{stamp}: {how}" if ranks > 1 else alone for k, how in between.items()},
        "spread": f"{stamp}: median over all kernels",
        "collective": stamp,
    }


def _beyond_messages(waiting: Waiting, tables: dict[str, Table]) -> tuple[float, float]:
    """(straggle, unit): what replicating and sharding cost a step beyond what their messages cost alone."""
    if not tables:
        return 1.0, 0.0
    message = tables["all_reduce"].at(waiting.blocks * waiting.block_bytes)
    messages = 2 * tables["all_gather"].at(waiting.block_bytes) + tables["reduce_scatter"].at(waiting.block_bytes)
    return max(1.0, (waiting.replicated - message) / waiting.apart), max(0.0, waiting.unit - messages)


def _device_alone(measured: dict[str, Any], device: torch.device) -> Device:
    """This rank's kernels as a device, to price a small step with."""
    curves, _ = _curves([measured])
    best = {c.dtype: max(c.rates) for c in curves if c.kernel == "matmul"}
    stream = max(max(c.rates) for c in curves if c.kernel == "pointwise")
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return Device("this rank", kind, 1.0, stream, best, measured["launch"], curve=curves)


def _curves(results: list[dict[str, Any]]) -> tuple[tuple[Curve, ...], list[float]]:
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
            curves.append(Curve(kernel, dtype, sizes, tuple(geometric_mean(found[s]) for s in sizes)))
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
