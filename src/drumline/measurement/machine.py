"""Measure the ranks of this machine and build a `Cluster`, each number with its origin."""

from __future__ import annotations

import datetime
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from ..clusters import (
    Cluster,
    CollectiveTable,
    DeviceSpec,
    KernelCurve,
    Link,
    LogPTimes,
    Network,
    Node,
    PartialOccupancy,
    ShapeTimes,
)
from ..comm.environment import connect, device_of
from .cgroup import memory_limit, oversubscription
from .cpu_kernels import measure_cpu
from .gpu_kernels import measure_gpu, measure_host_memory, measure_workspace
from .host_overhead import HostOverheadSteps
from .in_step_slowdown import SmallSteps, StepOverhead, measure_gpu_slowdown
from .kernels import geometric_mean, measure_launch
from .links import (
    SIZES,
    HostGroups,
    alpha_beta,
    find_host_groups,
    logp_times,
    measure_collectives,
    measure_overlap,
    measure_pair,
    measure_short_messages,
)
from .resume_journal import ResumeJournal
from .synchronisation import ActiveRanks, SynchronisationCost, SynchronisedSteps, measure_partial_occupancy

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
"""Stages of the measurement, in this order."""


def measure_rank(emit: Callable[[dict[str, Any]], None], journal: str | None = None) -> dict[str, Any]:
    """Measure one rank: kernels at the same time as all others, then the messages between them.

    `journal` is the path of the resume journals; cases that an earlier run has recorded there are not measured again.
    """
    where = connect()
    device = device_of(where)
    groups = find_host_groups()

    last = [""]

    def report(stage: str) -> None:
        if where.rank == 0 and stage != last[0]:
            last[0] = stage
            emit({"measuring": stage})

    context = float(psutil.Process().memory_info().rss)
    dist.barrier()
    resume = ResumeJournal(Path(f"{journal}.{where.rank}") if journal else None, device)
    threads_per_core = (
        max(groups.oversubscription, oversubscription(groups.per_host, torch.get_num_threads()))
        if device.type == "cpu"
        else 1.0
    )
    on_gpu = device.type == "cuda"
    host_steps = HostOverheadSteps(device) if on_gpu else None
    small_steps = None if host_steps else SmallSteps(threads_per_core)
    between = host_steps.take if host_steps else small_steps.take if small_steps else lambda: None
    measured = _kernels(device, threads_per_core, report, resume, between)
    measured["host_overhead"] = host_steps.measure() if host_steps else {}
    dist.barrier()
    report("steps")
    rank_alone = _device_alone(measured, device)
    if small_steps:
        overhead = small_steps.compare(rank_alone)
    else:
        overhead = StepOverhead(measure_gpu_slowdown(rank_alone, device), {})
    host_overhead = host_steps.measure() if host_steps else overhead.host_overhead
    dist.barrier()
    occupancy = (
        measure_partial_occupancy(groups, small_steps, threads_per_core) if small_steps and groups.near_pair else {}
    )
    del between, host_steps, small_steps  # and their models
    report("point to point")
    return {
        **measured,
        **(_ONE_RANK if where.size == 1 else _messages(where.rank, device, groups, report)),
        "host_overhead": host_overhead,
        "in_step_slowdown": overhead.slowdown,
        "context": context if device.type == "cpu" else 0.0,
        "hosts": groups.hosts,
        "partial_occupancy": occupancy,
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "memory": _memory(device),
        "workspace": measure_workspace(device) if on_gpu else 0.0,
        "host": measure_host_memory(device, _memory(torch.device("cpu")) / where.size) if on_gpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transport": "nccl" if on_gpu else dist.get_backend(),
    }


_ONE_RANK = {
    "synchronisation": SynchronisationCost(1.0, 1.0, 0.0, 0.0, 1, 1.0),
    "near_messages": [],
    "far_messages": [],
    "near_short": (0.0, 0.0),
    "far_short": (0.0, 0.0),
    "collectives": [],
    "overlap": 1.0,
}
"""Results of `_messages` for a single rank."""


def _messages(rank: int, device: torch.device, groups: HostGroups, report: Callable[[str], None]) -> dict[str, Any]:
    """Times of messages and cost of synchronisation, whose steps are taken before, between and after the messages."""
    steps = SynchronisedSteps(device, groups.inside)
    steps.take()

    def between(stage: str) -> None:
        steps.take()
        report(stage)

    results = {
        "near_messages": measure_pair(rank, device, groups.near_pair) if groups.near_pair else [],
        "far_messages": measure_pair(rank, device, groups.far_pair) if groups.far_pair else [],
        "near_short": measure_short_messages(rank, device, groups.near_pair) if groups.near_pair else (0.0, 0.0),
        "far_short": measure_short_messages(rank, device, groups.far_pair) if groups.far_pair else (0.0, 0.0),
        "collectives": [
            (dist.get_world_size(group), measure_collectives(group, device, report if i else between))
            for i, group in enumerate(_collective_groups(groups))
        ],
        "overlap": measure_overlap(device, groups.inside),
    }
    steps.take()
    return results | {"synchronisation": steps.cost()}


def _collective_groups(groups: HostGroups) -> list[dist.ProcessGroup | None]:
    """Groups whose collectives are measured: the ranks of a host, all ranks, and on one host also pairs in parallel."""
    measured: list[dist.ProcessGroup | None] = [groups.inside] if groups.near_pair else []
    if groups.far_pair:
        return [*measured, None]
    if groups.per_host > 2 and groups.per_host % 2 == 0:
        pairs = [dist.new_group([i, i + 1]) for i in range(0, groups.per_host, 2)]
        measured.append(pairs[dist.get_rank() // 2])
    return measured


def _kernels(
    device: torch.device,
    threads_per_core: float,
    report: Callable[[str], None],
    journal: ResumeJournal,
    between: Callable[[], None],
) -> dict[str, Any]:
    """Kernels by size and shape, and the launch time; all ranks at once, because they share memory and caches.

    `between` takes small steps throughout.
    """
    if device.type == "cuda":
        kernels = measure_gpu(device, report, journal, between)
    else:
        kernels = measure_cpu(device, threads_per_core, report, journal, between)
    report("launch")
    return {
        "points": {
            name: [(p.kernel, p.size, p.rate, p.timing.spread) for p in points]
            for name, points in kernels.points.items()
        },
        "shapes": {
            name: [(s.kernel, s.shape, s.timing.seconds) for s in timings] for name, timings in kernels.shapes.items()
        },
        "launch": measure_launch(device, threads_per_core),
    }


def to_cluster(results: list[dict[str, Any]]) -> Cluster:
    """The results of all ranks as a cluster of one node per host."""
    first, ranks = results[0], len(results)
    hosts = first["hosts"]
    synchronisation: SynchronisationCost = first["synchronisation"]
    cpu = first["device"] == "cpu"
    curves, spreads = _curves(results)
    bandwidth = _best_rate(curves, "pointwise")
    launch = statistics.median(r["launch"] for r in results)
    near, far = first["near_messages"], first["far_messages"]
    alpha, beta, error = alpha_beta(near) if near else (launch, 1 / bandwidth, 0.0)
    far_alpha, far_beta, far_error = alpha_beta(far) if hosts > 1 else (0.0, 1.0, 0.0)
    tables = tuple(t for count, times in first["collectives"] for t in _tables(first["transport"], count, times))
    node_tables = tuple(t for t in tables if t.ranks == tables[0].ranks)
    slowdown, unit = _beyond_messages(synchronisation, node_tables)
    return Cluster(
        name=platform.node() or "this-machine",
        device=DeviceSpec(
            name=first["device_name"],
            kind=first["device"],
            memory=first["memory"] / (ranks // hosts if cpu else 1),
            bandwidth=bandwidth,
            peak=_peaks(curves),
            launch=launch,
            host_overhead={
                k: statistics.median(r["host_overhead"][k] for r in results) for k in first["host_overhead"]
            },
            context=max(r["context"] for r in results),
            threads=first["threads"] if cpu else 0,
            in_step_slowdown={
                k: statistics.mean(r["in_step_slowdown"][k] for r in results) for k in first["in_step_slowdown"]
            },
            host=first["host"],
            workspace=first["workspace"],
            curve=curves,
            shape_times=_shape_times(results),
        ),
        node=Node(ranks // hosts, Link(alpha, 1 / beta, logp=_short(near, first["near_short"]))),
        network=Network(hosts, Link(far_alpha, 1 / far_beta, logp=_short(far, first["far_short"])))
        if hosts > 1
        else None,
        overlap=min(r["overlap"] for r in results),
        straggler_slowdown=slowdown,
        mid_step_message_s=synchronisation.mid_step_message,
        sharded_unit_s=unit,
        partial_occupancy={
            str(count): _partial_occupancy(count, active, first["transport"])
            for count, active in first["partial_occupancy"].items()
        },
        measurement_spread=statistics.median(spreads),
        collective=tables,
        origin=_origins(first, ranks, error, far_error),
    )


def _short(points: list[tuple[float, float]], measured: tuple[float, float]) -> LogPTimes | None:
    return logp_times(points, *measured) if points else None


def _origins(first: dict[str, Any], ranks: int, error: float, far_error: float) -> dict[str, str]:
    """Source of each number: when, where and how it was measured."""
    cpu = first["device"] == "cpu"
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    many = f" of {first['hosts']} hosts" if first["hosts"] > 1 else ""
    stamp = f"measured {when} on {platform.node()}, {ranks} ranks{many} at once, torch {first['torch']}"
    if cpu:
        stamp += f", {first['threads']} thread{'s' if first['threads'] > 1 else ''} each"
    alone, here = "assumed: one rank alone sends no messages", ranks // first["hosts"]
    fit = "alpha-beta fit of messages"
    short = f"trains of {SIZES[0]}-byte messages over {first['transport']}"
    near = {"node.link": f"{fit} over {first['transport']}, mean error {error:.0%}"}
    between = {
        **(near if first["near_messages"] else {}),
        **({"node.link.logp": short} if first["near_messages"] else {}),
        "network.link": f"{fit} between hosts over {first['transport']}, mean error {far_error:.0%}",
        "network.link.logp": f"{short}, between hosts",
        "overlap": "an all-reduce during matmuls",
        "straggler_slowdown": "small steps replicated and not, less their messages",
        "mid_step_message_s": "small steps with messages in between",
        "sharded_unit_s": "small steps sharded, less their messages",
        "partial_occupancy": "small steps and messages of some ranks, the others idle",
    }
    return {
        "device": stamp,
        "device.peak": f"{stamp}: the best matmul",
        "device.in_step_slowdown": f"{stamp}: two small training steps",
        "device.bandwidth": f"{stamp}: the best elementwise kernel",
        "device.workspace": f"{stamp}: memory left after a matmul and its backward",
        "device.host": f"{stamp}: pinned copies both ways, Adam's fused kernel in host memory",
        "device.memory": f"free memory when measured, shared by {here} ranks" if cpu else "reported by the driver",
        "node.devices": "number of ranks measured",
        **({} if first["near_messages"] else {"node.link": alone}),
        **{k: f"{stamp}: {how}" if ranks > 1 else alone for k, how in between.items()},
        "measurement_spread": f"{stamp}: median over all kernels",
        "collective": stamp,
    }


def _tables(transport: str, ranks: int, times: dict[str, list[tuple[float, float]]]) -> tuple[CollectiveTable, ...]:
    """Measured collectives of a group of `ranks` ranks."""
    return tuple(
        CollectiveTable(name, transport, ranks, tuple(m for m, _ in points), tuple(t for _, t in points))
        for name, points in times.items()
    )


def _partial_occupancy(count: int, active: ActiveRanks, transport: str) -> PartialOccupancy:
    """The cluster's numbers for `count` active ranks of a host."""
    if active.synchronisation is None:
        return PartialOccupancy(active.compute_factor)
    tables = _tables(transport, count, active.collectives)
    slowdown, unit = _beyond_messages(active.synchronisation, tables)
    return PartialOccupancy(active.compute_factor, slowdown, active.synchronisation.mid_step_message, unit, tables)


def _beyond_messages(cost: SynchronisationCost, measured: tuple[CollectiveTable, ...]) -> tuple[float, float]:
    """(straggler slowdown, seconds per sharded unit): cost of replication and sharding beyond their messages."""
    if not measured:
        return 1.0, 0.0
    tables = {t.collective: t for t in measured}
    message = tables["all_reduce"].at(cost.blocks * cost.block_bytes)
    messages = 2 * tables["all_gather"].at(cost.block_bytes) + tables["reduce_scatter"].at(cost.block_bytes)
    return max(1.0, (cost.replicated - message) / cost.independent), max(0.0, cost.sharded_unit - messages)


def _device_alone(measured: dict[str, Any], device: torch.device) -> DeviceSpec:
    """This rank's kernels as a device, to price a small step with."""
    curves, _ = _curves([measured])
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    return DeviceSpec(
        "this rank",
        kind,
        1.0,
        _best_rate(curves, "pointwise"),
        _peaks(curves),
        measured["launch"],
        curve=curves,
        shape_times=_shape_times([measured]),
        host_overhead=measured["host_overhead"],
    )


def _peaks(curves: tuple[KernelCurve, ...]) -> dict[str, float]:
    return {c.dtype: max(c.rates) for c in curves if c.kernel == "matmul"}


def _best_rate(curves: tuple[KernelCurve, ...], kernel: str) -> float:
    return max(max(c.rates) for c in curves if c.kernel == kernel)


def _shape_times(results: list[dict[str, Any]]) -> tuple[ShapeTimes, ...]:
    """Times of all shapes, averaged over the ranks."""
    times: dict[tuple[str, str], dict[tuple[float, ...], list[float]]] = {}
    for r in results:
        for dtype, timings in r["shapes"].items():
            for kernel, shape, seconds in timings:
                times.setdefault((kernel, dtype), {}).setdefault(shape, []).append(seconds)
    return tuple(
        ShapeTimes(kernel, dtype, tuple(shapes), tuple(map(geometric_mean, shapes.values())))
        for (kernel, dtype), shapes in times.items()
    )


def _curves(results: list[dict[str, Any]]) -> tuple[tuple[KernelCurve, ...], list[float]]:
    """Curves averaged over the ranks, and the spread of each point."""
    curves, spreads = [], []
    for dtype in results[0]["points"]:
        kernels = dict.fromkeys(kernel for kernel, *_ in results[0]["points"][dtype])
        for kernel in kernels:
            rates: dict[float, list[float]] = {}
            for r in results:
                for name, size, rate, spread in r["points"][dtype]:
                    if name == kernel:
                        rates.setdefault(size, []).append(rate)
                        spreads.append(spread)
            sizes = tuple(sorted(rates))
            curves.append(KernelCurve(kernel, dtype, sizes, tuple(geometric_mean(rates[s]) for s in sizes)))
    return tuple(curves), spreads


def cpu_name() -> str:
    """Name of the processor."""
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
    limit = memory_limit()
    return min(free, limit) if limit else free
