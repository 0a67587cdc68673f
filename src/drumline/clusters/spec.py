"""The `Cluster` value: devices, links and measured tables, each number with its origin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..core import files
from ..core.display import NotebookValue
from ..core.errors import ClusterError
from ..core.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_flops,
)
from .checks import (
    add_line,
    known_topology,
    line_of,
    parse_shape,
    refuse_implausible,
    refuse_mixed_hardware,
    refuse_wrong_topology,
    shape_of_part,
)
from .corrections import Corrections
from .links import Bandwidth, Link, RankLink
from .measured import (
    STRICT,
    CollectiveTable,
    Count,
    KernelCurve,
    PartialOccupancy,
    Positive,
    Seconds,
    ShapeTimes,
    as_partial_occupancy,
)
from .step_times import StepTimeDistribution

Bytes = Annotated[float, BeforeValidator(parse_bytes), Positive]
Flops = Annotated[float, BeforeValidator(parse_flops), Positive]

SET_BY_USER = "set by the user"
_OLD_OVERHEADS = {
    "again": "recompute",
    "watched": "selective_recompute",
    "look": "speed_probe",
    "each_forward": "operator_forward",
    "each_backward": "operator_backward",
}
"""Keys of `DeviceSpec.host_overhead` that earlier releases wrote."""


def _current_overheads(table: Any) -> Any:
    return {_OLD_OVERHEADS.get(key, key): value for key, value in table.items()} if isinstance(table, dict) else table


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of a GPU rank while all ranks of the node use theirs: the target of offloading."""

    __pydantic_config__ = STRICT
    memory: Bytes
    """Bytes available to one rank."""
    bandwidth: Bandwidth
    """Bytes per second to that memory; bounds an optimizer update on the host."""
    copy: Bandwidth
    """Bytes per second between pinned host memory and the device, in one direction."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator, or one CPU rank."""

    __pydantic_config__ = STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {"start": "host_overhead", "situ": "in_step_slowdown", "cloud": "shape_times"}
    name: str
    """Its product name, for people."""
    kind: Literal["cpu", "cuda"]
    """`cuda` is a GPU, `cpu` one rank on some cores."""
    memory: Bytes
    """Bytes available to one rank."""
    bandwidth: Bandwidth
    """Bytes per second to its memory."""
    peak: dict[str, Flops]
    """Operations per second by precision, from the data sheet (or the best measured)."""
    launch: Seconds
    """Minimum time of one operator, however small."""
    host_overhead: Annotated[dict[str, Seconds], BeforeValidator(_current_overheads)] = field(default_factory=dict)
    """Host time beyond the kernels, in seconds.

    GPU: time to launch an operator in `forward` or `backward`, a `cast` of autocast and its `cast_backward`, and the
    norm and `update` of a tensor (`launch` where missing); `entry` and `backward_entry`: the same, counted with views,
    functions and parameters; `recompute`: extra time of a recomputed layer each time it runs; `selective_recompute`:
    extra time per operator of a selectively recomputed layer; `speed_probe`: the small step that later measures how
    fast the host is.
    CPU: `update` per tensor, `operator_forward` and `operator_backward` per operator of a step.
    """
    context: Annotated[float, BeforeValidator(parse_bytes), Field(ge=0)] = 0.0
    """Memory that the framework allocates before the first tensor."""
    workspace: Annotated[float, BeforeValidator(parse_bytes), Field(ge=0)] = 0.0
    """Memory that the libraries allocate with the first matmul, where torch counts it as its own."""
    threads: Annotated[int, Field(ge=0, le=4096)] = 0
    """CPU: threads of a rank when measured and when run; 0 leaves it to the launcher."""
    in_step_slowdown: dict[str, Annotated[float, Field(ge=0.1, le=100)]] = field(default_factory=dict)
    """Factor by which kernels are slower inside a training step: `compute`, `conv`, `update`; 1 where missing.
    CPU: `compute_forward`, `compute_backward`, ... where both were measured."""
    host: HostMemory | None = None
    """GPU: target of offloading; None if unknown, and then offloading cannot be priced."""
    curve: tuple[KernelCurve, ...] = ()
    shape_times: tuple[ShapeTimes, ...] = ()
    """Compute-bound kernels, measured shape by shape; without them `curve` is used."""
    rates: Literal["data-sheet", "typical"] = "data-sheet"
    """Rates and host times that are not stated here: peaks and `launch`, or the usual fractions of the peaks and the
    usual times of a host, as in the catalogue. Without effect on a machine that was measured."""

    def curve_of(self, kernel: str, dtype: str) -> KernelCurve | None:
        """The measured curve of a kernel, or None."""
        return next((c for c in self.curve if c.kernel == kernel and c.dtype == dtype), None)


@dataclass(frozen=True, slots=True)
class Node:
    """Devices that share a host."""

    __pydantic_config__ = STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {"reduces": "in_switch_reduction"}
    devices: Count
    """Devices of one node."""
    link: Link
    in_switch_reduction: bool = False
    """Whether the switch reduces in transit: an all-reduce then sends (p+1)/p m bytes, not 2(p-1)/p m."""
    storage: Bandwidth = 1e9
    """Bytes per second that a node writes to storage while all nodes do: bounds how often checkpoints are saved. The
    default is about that of Llama 3's training: 2 TB/s for 2,048 nodes."""


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes and the link between them."""

    __pydantic_config__ = STRICT
    nodes: Count
    """Number of nodes."""
    link: Link
    """The link of a node, all ports together."""
    ports: Annotated[int, Field(ge=0, le=4096)] = 0
    """Network ports (NICs) of a node; 0 if unknown."""
    topology: Annotated[str, AfterValidator(known_topology)] = ""
    """How nodes are connected: `fat-tree`, `rail`, `ethernet` or `torus`. Empty: `fat-tree` if a node has several
    ports, else `ethernet`."""
    nodes_per_switch: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Nodes under one switch of the lowest level; 0: all."""
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Bandwidth of such a switch to its nodes over that to other switches."""
    shape: Annotated[tuple[Count, ...], BeforeValidator(parse_shape)] = ()
    """Nodes of a torus in each direction, the slowest first: `[4, 8]` or `"4x8"`."""

    @property
    def port_bandwidth(self) -> float:
        """Bytes per second of one port: the limit of a single rank, or of a server."""
        return self.link.bandwidth / max(1, self.ports)


@dataclass(frozen=True, slots=True)
class Cluster(NotebookValue):
    """The machines: one kind of device, in nodes, in a network."""

    __pydantic_config__ = STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {
        "fewer": "partial_occupancy",
        "pair": "rank_link",
        "spread": "measurement_spread",
        "stall": "mid_step_message_s",
        "straggle": "straggler_slowdown",
        "unit": "sharded_unit_s",
    }
    name: str
    """Name in answers and reports."""
    device: DeviceSpec
    node: Node
    network: Network | None = None
    overlap: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of communication that proceeds while the device computes: 1 is free, 0 means they take turns."""
    straggler_slowdown: Annotated[float, Field(ge=1, le=100)] = 1.0
    """Factor on a replicated step beyond its messages: ranks wait for the slowest and share the host."""
    mid_step_message_s: Seconds = 0.0
    """Seconds of a small message in the middle of a step, where ranks arrive at different times; 0 if not measured."""
    sharded_unit_s: Seconds = 0.0
    """Seconds that one sharded unit adds to a step beyond its messages: bookkeeping, copies, late ranks."""
    partial_occupancy: dict[str, Annotated[PartialOccupancy, BeforeValidator(as_partial_occupancy)]] = field(
        default_factory=dict
    )
    """Numbers that differ when only some ranks of a node are active, by their number. All other numbers here were
    measured with every rank active; ranks that share cores and memory are faster when some are idle."""
    measurement_spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Relative spread of repeated measurements: half of the interquartile range over the median."""
    collective: tuple[CollectiveTable, ...] = ()
    rank_link: tuple[RankLink, ...] = ()
    """Measured links between single ranks: rings are ordered by them."""
    origin: dict[str, str] = field(default_factory=dict)
    """Source of each number, by key or key prefix; the longest match counts."""
    corrections: Corrections = field(default_factory=Corrections)
    """Factors learnt from earlier runs on these machines; empty unless asked for. They correct estimates."""
    step_times: StepTimeDistribution = field(default_factory=StepTimeDistribution)
    """How the compute times of ranks differ: slow ranks and jitter; empty unless asked for."""

    @property
    def devices(self) -> int:
        """Number of devices in all nodes."""
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
        nodes = n // self.node.devices
        shape = shape_of_part(self.network.shape, nodes)
        return dataclasses.replace(self, network=dataclasses.replace(self.network, nodes=nodes, shape=shape))

    def compute_factor(self, ranks: int) -> float:
        """Factor on the compute time of a rank when `ranks` of its node are active and the others idle."""
        factors = sorted((int(count), there.compute_factor) for count, there in self.partial_occupancy.items())
        for (a, low), (b, high) in itertools.pairwise(factors):
            if a <= ranks < b:
                return low + (high - low) * (ranks - a) / (b - a)
        return 1.0

    def with_active_ranks(self, ranks: int) -> Cluster:
        """The cluster as `ranks` active ranks see it while the other devices of their node are idle.

        A number of ranks that was not measured behaves like the next larger one that was.
        """
        counts = [int(count) for count in self.partial_occupancy if int(count) >= ranks]
        there = self.partial_occupancy[str(min(counts))] if counts else None
        if there is None or not there.collective:
            return self
        return dataclasses.replace(
            self,
            straggler_slowdown=there.straggler_slowdown,
            mid_step_message_s=there.mid_step_message_s,
            sharded_unit_s=there.sharded_unit_s,
            collective=(*there.collective, *self.collective),
        )

    def with_memory(self, size: float) -> Cluster:
        """The same machines with `size` bytes a device."""
        if size <= 0:
            raise ClusterError(f"memory of {size:g} bytes", rule="memory > 0")
        origin = {**self.origin, "device.memory": "given on the command line"}
        return dataclasses.replace(self, device=dataclasses.replace(self.device, memory=size), origin=origin)

    def table(self, collective: str, ranks: int) -> CollectiveTable | None:
        """The measured table of a collective over exactly `ranks` ranks, by the backend's own algorithm."""
        return self.algorithm_table(collective, ranks, "native")

    def algorithm_table(self, collective: str, ranks: int, algorithm: str, segments: int = 1) -> CollectiveTable | None:
        """The same by a named algorithm in some segments, over the transport of the backend's own if that is known."""
        key = (collective, ranks, algorithm, segments)
        tables = [t for t in self.collective if (t.collective, t.ranks, t.algorithm, t.segments) == key]
        own = None if algorithm == "native" else self.table(collective, ranks)
        return next((t for t in tables if own is None or t.transport == own.transport), None)

    def origin_of(self, key: str) -> str:
        """Source of the number at a dotted key."""
        best = max((k for k in self.origin if key == k or key.startswith(k + ".")), key=len, default=None)
        return self.origin[best] if best is not None else SET_BY_USER

    def numbers(self) -> Iterator[tuple[str, float, str]]:
        """All numbers, each with its dotted key and its origin."""
        for key, value in _leaves("", files.to_plain(dataclasses.replace(self, origin={}))):
            yield key, value, self.origin_of(key)

    @property
    def measured(self) -> bool:
        """Whether the rates were measured rather than taken from a data sheet."""
        return self.origin_of("device.peak").startswith("measured")

    def save(self, path: str | Path) -> None:
        """Write the TOML form."""
        files.write_toml(path, self, comment=f"Cluster {self.name}. SI units: bytes, seconds, operations per second.")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read the TOML form that a person or `drumline measure` wrote."""
        table = files.read_toml(path, ClusterError)
        text = files.read_text(path, ClusterError)
        try:
            refuse_mixed_hardware(table, str(path))
            cluster = files.from_plain(cls, table, str(path), ClusterError, lambda key: line_of(text, key, cls))
            refuse_implausible(cluster, str(path))
            refuse_wrong_topology(cluster, str(path))
        except ClusterError as e:
            raise add_line(e, text, cls) from None
        origin = {files.current_key(cls, key): text for key, text in cluster.origin.items()}
        return dataclasses.replace(cluster, origin=origin)

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
    short = f", {link.logp}" if link.logp else ""
    return f"alpha {format_seconds(link.alpha)}, {format_rate(link.bandwidth)}{short}"


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _leaves(f"{prefix}.{k}" if prefix else k, v)
    elif isinstance(value, list):
        for v in value:
            yield from _leaves(prefix, v)
    elif isinstance(value, int | float):
        yield prefix, float(value)
