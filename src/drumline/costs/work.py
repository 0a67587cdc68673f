"""Work and roofline: how long operators take on a device, from measured curves where there are any."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..clusters import DeviceSpec
from ..core.errors import ClusterError, PlanError
from ..models.profile import ALIKE, COMPUTE_KINDS, FALLBACK, Layer, Op, Profile
from ..models.selective import AGAIN, verdicts
from ..theory.roofline import BYTES_PER_VALUE, MEMORY_EFFICIENCY
from .clouds import ROWS, Clouds, work_of
from .entries import CAST, entries

FRESH = 2.0**25
"""Bytes from which the C library hands memory back at once, so that a CPU makes every page of the next tensor anew."""

ARRANGED = frozenset({"transpose", "strided", "widen", "narrow"})
"""Kinds that say more of a call than its name does: they have one curve. Others may have one for each operator."""

ENTRY = "entry"
"""The key of `Device.start` for what the host of a GPU takes for one of the `entries` of a forward."""

EACH = {"forward": "each_forward", "backward": "each_backward"}
"""Keys of `Device.start`: what a CPU takes for an operator of a step beside its kernel, in Python and autograd."""

LOOPED = 4
"""An operator that a layer calls more often, with the same sizes, is called in a loop."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a layer costs the two that work on it."""

    host: float
    """Seconds that the host takes to tell a GPU what to do; 0 on a CPU, which is its own host."""
    busy: float
    """Seconds that the device works."""

    @property
    def seconds(self) -> float:
        """When the device has nothing else to do, and the host is not ahead."""
        return max(self.host, self.busy)


class Pricer:
    """Seconds of operators and layers on one device in one precision. Remembers what it has priced.

    An operator is priced as it was measured, alone; a layer as it runs in a step, which takes longer (`Device.situ`).
    A GPU is told what to do ahead of time: there, a layer takes the longer of what the host needs to tell all of it and
    what the device needs to do it. A CPU does one operator after the other.
    """

    def __init__(self, profile: Profile, device: DeviceSpec, precision: str) -> None:
        if precision not in device.peak:
            raise ClusterError(
                f"{device.name} has no rate for {precision}",
                rule=f"device.peak has {', '.join(device.peak)}",
                fix=f"--precision {next(iter(device.peak))}, or add the rate to the cluster file",
            )
        if profile.precision not in ("", precision):
            raise PlanError(
                f"a profile that was traced in {profile.precision} cannot be priced in {precision}",
                rule="what is cast, and how often, was counted for one precision",
                fix=f"trace the job once more, with precision={precision}",
            )
        self._device, self._precision = device, precision
        self._width = profile.activation_bytes
        self._scale = BYTES_PER_VALUE[precision] / profile.activation_bytes
        self._known: dict[tuple[int, int, int, str, float], Told] = {}
        self._clouds = Clouds(device)
        self._ahead = device.kind == "cuda"
        self._plain = "fp32" if profile.precision and precision != "tf32" else precision
        """The type of operators that say nothing of theirs."""
        stream = device.curve_of("pointwise", "fp32")
        self.least = stream.sizes[0] / stream.rates[0] if stream else 0.0
        """What the smallest kernel takes."""
        self._around = max(0.0, device.launch - self.least) if stream else 0.0
        """What an operator takes beside its kernel: a CPU does one after the other, so that it adds up."""

    def op_seconds(self, op: Op, n: float) -> float:
        """One call of an operator on n samples, alone: bound by compute or by memory, and never free."""
        busy = self._busy(op, n)
        return busy + self._around if self.least and not self._ahead else max(self._device.launch, busy)

    def _busy(self, op: Op, n: float) -> float:
        """What the device needs for one call."""
        moved, dtype = op.bytes.at(n) * self._scale, op.dtype or self._plain
        flops = op.flops.at(n)
        measured = self._measured(op, n, flops, dtype)
        if measured is not None:
            return max(self.least, measured)
        if op.kind not in COMPUTE_KINDS:
            return max(self.least, moved / self.memory_rate(op.kind, max(moved, 1.0), dtype, name=op.name))
        return max(flops / self._compute_rate(op.kind, max(flops, 1.0), dtype), moved / self._device.bandwidth)

    def _measured(self, op: Op, n: float, flops: float, dtype: str) -> float | None:
        """By the shapes that were measured; an operator of which ranks share a part is no longer of its shape."""
        if not op.shape or not self._device.shape_times:
            return None
        shape = tuple(size.at(n) for size in op.shape)
        kind = ROWS if op.kind == "reduce" else op.kind
        work = work_of(kind, shape)
        if op.kind in ("recurrent", "recurrent_backward"):
            if not self._ahead:  # a CPU does one layer after the other
                return self._clouds.seconds(op.kind, dtype, shape)
            # layers that are equal run side by side, each a few steps behind the one before
            seconds = self._clouds.seconds(op.kind, dtype, (*shape, float(op.count)))
            return None if seconds is None else seconds / op.count
        if op.kind == "conv_backward" and 0.45 * work < flops < 0.55 * work:
            work = flops = flops * 2  # the first layer needs no gradient of its input: half of the time is left
            seconds = self._clouds.seconds(op.kind, dtype, shape)
            return None if seconds is None else seconds / 2
        if not 0.98 * work < flops < 1.02 * work:
            return None
        seconds = self._clouds.seconds(kind, dtype, shape)
        made = 4.0 * math.prod(shape[:3]) if op.kind == "matmul" else 0.0
        return None if seconds is None else seconds + self._made(made)

    def _made(self, size: float) -> float:
        """What it takes to make the memory of a large result, where a CPU's shapes were measured on smaller ones."""
        curve = self._device.curve_of("fresh", "fp32") if size >= FRESH and not self._ahead else None
        return size / curve.at(size) if curve else 0.0

    def layer_seconds(self, layer: Layer, phase: str, n: float) -> float:
        """One layer's forward or backward on n samples."""
        return self.told(layer, phase, n).seconds

    def again_seconds(self, layer: Layer, n: float) -> float:
        """What selective recomputation computes again of one layer."""
        return self.told(layer, "again", n).seconds

    def told(self, layer: Layer, phase: str, n: float, *, recompute: str = "none") -> Told:
        """One layer's `forward`, `backward`, or what selective recomputation computes `again` of it.

        A layer that is recomputed costs its host more, each time it runs forward; where it is recomputed selectively,
        each operator of the forward is watched, also those that are not repeated.
        """
        if recompute != "none" and layer.composite:
            plain, start = self.told(layer, phase, n), self._device.host_overhead
            more = start.get("again", 0.0)
            if recompute == "selective":
                more += start.get("watched", 0.0) * _started(layer)
            return Told(plain.host + more, plain.busy)
        key = (id(layer.ops), layer.views, layer.entered, phase, n)
        if key not in self._known:
            if phase == "again":
                words = verdicts(layer.ops, self._device.kind, self._width)
                ops = [op for op, word in zip(layer.ops, words, strict=True) if word == AGAIN]
            else:
                ops = [op for op in layer.ops if op.phase == phase]
            told = self._told(ops, self._situ(layer, phase), n)
            if phase == "forward" and self._ahead and ENTRY in self._device.host_overhead:
                told = replace(told, host=told.host + self._device.host_overhead[ENTRY] * entries(layer))
            self._known[key] = told
        return self._known[key]

    def _told(self, ops: list[Op], situ: float, n: float) -> Told:
        """Operators of one layer, which take `situ` times as long as alone."""
        if not self._ahead:
            around = sum(self._device.host_overhead.get(EACH[op.phase], 0.0) * entered(op) for op in ops)
            return Told(0.0, situ * sum(self.op_seconds(op, n) * op.count for op in ops) + around)
        host = busy = 0.0
        for op in ops:
            seconds = self._busy(op, n)
            if op.kind.startswith("recurrent"):  # thousands of kernels
                host, busy = host + op.count * self._recurrent_host(op, n, seconds), busy + op.count * seconds
            else:
                host, busy = host + op.count * start_of(op, self._device), busy + situ * op.count * seconds
        return Told(host, busy)

    def _recurrent_host(self, op: Op, n: float, seconds: float) -> float:
        """What the host takes to tell of a recurrent layer, step by step; as long as the layer itself takes where that
        was not measured.
        """
        step = self._device.host_overhead.get(op.kind)
        return seconds if step is None or not op.shape else step * op.shape[0].at(n)

    def memory_rate(self, kind: str, size: float, dtype: str = "", *, name: str = "") -> float:
        """Bytes per second of a kernel bound by memory; by the operator's own name, if it was measured."""
        own = () if kind in ARRANGED or not name else (name, name.rstrip("_"))
        for name in (*own, kind, ALIKE.get(kind, "pointwise"), "pointwise"):
            curve = self._device.curve_of(name, dtype or self._plain) or self._device.curve_of(name, "fp32")
            if curve is not None:
                return curve.at(size)
        return self._device.bandwidth * MEMORY_EFFICIENCY

    def update_seconds(self, layer: Layer, bytes_per_number: float, ops: float, share: float) -> float:
        """The optimizer's update of one layer's trained numbers, of which this rank holds `share`.

        Without operators of its own (`ops` is 0) they are only read.
        """
        if not layer.tensors:
            return 0.0
        if ops == 0 and not self._ahead:
            each = layer.parameters * share * bytes_per_number / layer.tensors
            return layer.tensors * (self._device.launch + each / self.memory_rate("reduce", max(each, 1.0)))
        each = layer.parameters * share * bytes_per_number / (layer.tensors * max(1.0, ops))
        rate = self.memory_rate("update", max(each, 1.0))
        device = self._device
        if "update" in device.host_overhead:  # the smallest updates were measured, and what is around them
            return layer.tensors * (
                ops * each / rate * device.in_step_slowdown.get("update", 1.0) + device.host_overhead["update"]
            )
        return layer.tensors * ops * max(device.launch, each / rate) * device.in_step_slowdown.get("update", 1.0)

    def _situ(self, layer: Layer, phase: str) -> float:
        """How much longer the layer's kernels take in a step than alone; what is computed `again` is forward."""
        kind = "conv" if any(op.kind == "conv" for op in layer.ops) else "compute"
        way = "backward" if phase == "backward" else "forward"
        situ = self._device.in_step_slowdown
        return situ.get(f"{kind}_{way}", situ.get(kind, 1.0))

    def _compute_rate(self, kind: str, flops: float, dtype: str) -> float:
        curve = self._device.curve_of(kind, dtype)
        if curve is not None:
            return curve.at(flops)
        curve = self._device.curve_of("matmul", dtype)
        peak = self._device.peak
        best = curve.at(flops) if curve is not None else 0.7 * peak.get(dtype, peak[self._precision])
        return best * FALLBACK.get(kind, 1.0)


def entered(op: Op) -> int:
    """How often a CPU comes to an operator of a layer from something else; one in a loop, as of a GRU, is at hand."""
    return min(op.count, LOOPED)


def start_of(op: Op, device: DeviceSpec) -> float:
    """What the host of a GPU takes to start an operator: autocast's casts come without a line of Python. Those of a
    forward may be told with all that is around them (`ENTRY`).
    """
    start = device.host_overhead.get("backward" if op.phase == "backward" else "forward", device.launch)
    if op.name == CAST:
        return device.host_overhead.get("cast", start)
    return 0.0 if op.phase == "forward" and ENTRY in device.host_overhead else start


def _started(layer: Layer) -> int:
    """Operators of a layer's forward, casts aside."""
    return sum(op.count for op in layer.ops if op.phase == "forward" and op.name != CAST)
