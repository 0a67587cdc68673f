"""The `Cluster` value: devices, links and measured tables, each number with its origin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..core import files
from ..core.errors import ClusterError
from ..core.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
)
from .checks import at_line, one_kind, plausible
from .cloud import ShapeTimes
from .corrections import Corrections
from .fewer import PartialOccupancy, number_as_compute_factor
from .measured import STRICT, CollectiveTable, Count, Positive, RateCurve, Seconds

Bytes = Annotated[float, BeforeValidator(parse_bytes), Positive]
Bandwidth = Annotated[float, BeforeValidator(parse_bandwidth), Positive]
Flops = Annotated[float, BeforeValidator(parse_flops), Positive]

SET_BY_USER = "given by hand"


@dataclass(frozen=True, slots=True)
class Link:
    """A level of the network in the alpha-beta model: a message of m bytes takes alpha + m / bandwidth."""

    __pydantic_config__ = STRICT
    alpha: Seconds
    """Start-up time of a message."""
    bandwidth: Bandwidth
    """Bytes per second in one direction: of one device inside a node, of one node between nodes."""
    type: str = ""
    """What it is made of, as wires.toml names it (`nvswitch`, `infiniband`, ...); empty where that is not known."""

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return 1 / self.bandwidth


@dataclass(frozen=True, slots=True)
class RankLink:
    """The link from one rank to another, where each pair was measured."""

    __pydantic_config__ = STRICT
    src: Annotated[int, Field(ge=0)]
    dst: Annotated[int, Field(ge=0)]
    link: Link


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host of a GPU, as one rank sees it while all ranks of the node use it: where offloaded states live."""

    __pydantic_config__ = STRICT
    memory: Bytes
    """What one rank may use of it."""
    bandwidth: Bandwidth
    """Bytes per second to that memory: an update in host memory runs at this rate."""
    copy: Bandwidth
    """Bytes per second between host and device, in one direction, from pinned memory."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator, or one CPU rank."""

    __pydantic_config__ = STRICT
    name: str
    kind: Literal["cpu", "cuda"]
    memory: Bytes
    """What one rank may use."""
    bandwidth: Bandwidth
    """Bytes per second to its memory."""
    peak: dict[str, Flops]
    """Operations per second by precision, as data sheets give it (or the best that was measured)."""
    launch: Seconds
    """Time that one operator costs however small it is."""
    host_overhead: dict[str, Seconds] = field(default_factory=dict)
    """What a GPU's host takes to start an operator, by where it is: `forward`, `backward`, `cast` (one of autocast's),
    `update` (for a tensor); `launch` where it is not given. Then `again`, which is more for a layer that is recomputed,
    each time it runs, and `watched`, which is more for each operator of one that is recomputed selectively. `look` is
    the small step by which the host's pace is told later. Of a CPU what is beside the kernels: `update`, of an
    optimizer for a tensor, `each_forward` and `each_backward`, of a step for an operator."""
    context: Annotated[float, BeforeValidator(parse_bytes), Field(ge=0)] = 0.0
    """Memory that the framework takes before the first tensor."""
    workspace: Annotated[float, BeforeValidator(parse_bytes), Field(ge=0)] = 0.0
    """Memory that the libraries take with the first products, where torch counts it as its own."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """Of a CPU rank: how many it was measured with, and is run with; 0 leaves it to the launcher."""
    in_step_slowdown: dict[str, Annotated[float, Field(ge=0.1, le=100)]] = field(default_factory=dict)
    """By what factor kernels in a training step take longer than alone: `compute`, `conv`, `update`; 1 if not given.
    Of a CPU `compute_forward`, `compute_backward`, ... where both were measured."""
    host: HostMemory | None = None
    """Of a GPU: what offloading goes to; None where it is not known, and then offloading cannot be priced."""
    curve: tuple[RateCurve, ...] = ()
    shape_times: tuple[ShapeTimes, ...] = ()
    """Kernels bound by compute, measured shape by shape; where there is none, their curves tell."""

    def curve_of(self, kernel: str, dtype: str) -> RateCurve | None:
        """The measured curve of a kernel, if there is one."""
        return next((c for c in self.curve if c.kernel == kernel and c.dtype == dtype), None)


@dataclass(frozen=True, slots=True)
class Node:
    """Devices that share a host."""

    __pydantic_config__ = STRICT
    devices: Count
    link: Link
    in_switch_reduction: bool = False
    """Whether the switch between the devices adds up what passes: an all-reduce then sends (p+1)/p m, not 2(p-1)/p."""


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes and the link between them."""

    __pydantic_config__ = STRICT
    nodes: Count
    link: Link
    """Of a node, with all of its ports together."""
    ports: Annotated[int, Field(ge=0, le=4096)] = 0
    """Network ports (NICs) of a node; 0 where that is not known."""

    @property
    def port_bandwidth(self) -> float:
        """Bytes per second of one port: what one rank alone, or a server, can get."""
        return self.link.bandwidth / max(1, self.ports)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines: one kind of device, in nodes, in a network."""

    __pydantic_config__ = STRICT
    name: str
    device: DeviceSpec
    node: Node
    network: Network | None = None
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The share of communication that proceeds while the device computes: 1 is free, 0 means they take turns."""
    straggler_slowdown: Annotated[float, Field(ge=1, le=100)] = 1.0
    """By what factor a replicated step is slower beyond its messages: ranks wait for the slowest and share the host."""
    mid_step_message_s: Seconds = 0.0
    """What a small message costs in the middle of a step, where ranks arrive apart; 0 if only its own time is known."""
    sharded_unit_s: Seconds = 0.0
    """What sharding one unit costs a step beyond its messages: bookkeeping, copies, ranks that arrive apart."""
    partial_occupancy: dict[str, Annotated[PartialOccupancy, BeforeValidator(number_as_compute_factor)]] = field(
        default_factory=dict
    )
    """By how many ranks of a node work: what is otherwise. All numbers here are those of ranks that work beside all
    others; where they share cores and memory, they are faster when some of them are idle."""
    measurement_spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The relative spread of repeated measurements (half of the interquartile range over the median)."""
    collective: tuple[CollectiveTable, ...] = ()
    rank_link: tuple[RankLink, ...] = ()
    """The links between single ranks, where they were measured: rings are ordered by them."""
    origin: dict[str, str] = field(default_factory=dict)
    """Where each number comes from, by key or by the beginning of keys; the longest match counts."""
    corrections: Corrections = field(default_factory=Corrections)
    """What earlier runs on these machines taught; empty unless asked for. Estimates are corrected by it."""

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return self.node.devices * (self.network.nodes if self.network else 1)

    def with_devices(self, n: int) -> Cluster:
        """The same machines with `n` devices: part of one node, or as many nodes as it takes."""
        if n < 1:
            raise ClusterError(f"{n} devices", rule="a cluster has at least one device")
        if n <= self.node.devices:
            return dataclasses.replace(self, node=dataclasses.replace(self.node, devices=n), network=None)
        if self.network is None:
            raise ClusterError(
                f"{n} devices asked of {self.name}, which is one node of {self.node.devices}",
                rule="more than one node needs a link between nodes",
                fix="add [network] with nodes and link.alpha, link.bandwidth to the cluster file",
            )
        if n % self.node.devices:
            raise ClusterError(
                f"{n} devices do not fill nodes of {self.node.devices}",
                rule=f"{n} % {self.node.devices} = {n % self.node.devices}",
                fix=f"--devices {n - n % self.node.devices} or {n + self.node.devices - n % self.node.devices}",
            )
        return dataclasses.replace(self, network=dataclasses.replace(self.network, nodes=n // self.node.devices))

    def compute_factor(self, ranks: int) -> float:
        """The factor on what a rank computes when so many work, and the other devices of its node are idle."""
        known = sorted((int(k), there.compute_factor) for k, there in self.partial_occupancy.items())
        for (a, low), (b, high) in itertools.pairwise(known):
            if a <= ranks < b:
                return low + (high - low) * (ranks - a) / (b - a)
        return 1.0

    def with_active_ranks(self, ranks: int) -> Cluster:
        """The same machines, as so many ranks meet when they work and the other devices of their node are idle.

        A number of ranks that was not measured is taken to be like the next larger one.
        """
        counts = [int(k) for k in self.partial_occupancy if int(k) >= ranks]
        there = self.partial_occupancy[str(min(counts))] if counts else None
        if there is None or not there.meet:
            return self
        return dataclasses.replace(
            self,
            straggle=there.straggler_slowdown,
            stall=there.mid_step_message_s,
            unit=there.sharded_unit_s,
            collective=(*there.collective, *self.collective),
        )

    def with_memory(self, size: float) -> Cluster:
        """The same machines with `size` bytes a device."""
        if size <= 0:
            raise ClusterError(f"memory of {size:g} bytes", rule="memory > 0")
        origin = {**self.origin, "device.memory": "given on the command line"}
        return dataclasses.replace(self, device=dataclasses.replace(self.device, memory=size), origin=origin)

    def table(self, collective: str, ranks: int) -> CollectiveTable | None:
        """The measured table for a collective over exactly that many ranks, by what the backend itself offers."""
        found = (t for t in self.collective if (t.collective, t.ranks, t.algorithm) == (collective, ranks, "native"))
        return next(found, None)

    def origin_of(self, key: str) -> str:
        """Where the number at a dotted key comes from."""
        found = max((k for k in self.origin if key == k or key.startswith(k + ".")), key=len, default=None)
        return self.origin[found] if found is not None else SET_BY_USER

    def numbers(self) -> Iterator[tuple[str, float, str]]:
        """Every number with its dotted key and its origin."""
        for key, value in _leaves("", files.to_plain(dataclasses.replace(self, origin={}))):
            yield key, value, self.origin_of(key)

    @property
    def measured(self) -> bool:
        """Whether the rates were measured, and not taken from a data sheet."""
        return self.origin_of("device.peak").startswith("measured")

    def save(self, path: str | Path) -> None:
        """Write the TOML form."""
        files.write_toml(path, self, comment=f"Cluster {self.name}. SI units: bytes, seconds, operations per second.")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read the TOML form that a person or `drumline measure` wrote."""
        table = files.read_toml(path, ClusterError)
        try:
            one_kind(table, str(path))
            cluster = files.from_plain(cls, table, str(path), ClusterError)
            plausible(cluster, str(path))
        except ClusterError as e:
            raise at_line(e, files.read_text(path, ClusterError)) from None
        return cluster

    def __str__(self) -> str:
        d = self.device
        lines = [
            f"cluster {self.name}: {self.devices} x {d.name}, {format_bytes(d.memory)} each",
            "  peak "
            + ", ".join(f"{k} {format_count(v, 'FLOP/s')}" for k, v in d.peak.items())
            + f" ({self.origin_of('device.peak')})",
            f"  memory {format_rate(d.bandwidth)}, launch {format_seconds(d.launch)} ({self.origin_of('device')})",
            f"  node: {self.node.devices} devices, {_link(self.node.link)} ({self.origin_of('node.link')})",
        ]
        if d.host:
            lines.append(
                f"  host: {format_bytes(d.host.memory)} a rank, copies {format_rate(d.host.copy)} "
                f"({self.origin_of('device.host')})"
            )
        if self.network:
            lines.append(
                f"  network: {self.network.nodes} nodes, {_link(self.network.link)} ({self.origin_of('network.link')})"
            )
        return "\n".join(lines)


def _link(link: Link) -> str:
    return f"alpha {format_seconds(link.alpha)}, {format_rate(link.bandwidth)}"


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _leaves(f"{prefix}.{k}" if prefix else k, v)
    elif isinstance(value, list):
        for v in value:
            yield from _leaves(prefix, v)
    elif isinstance(value, int | float):
        yield prefix, float(value)
