"""Work and roofline: how long operators take on a device, from measured curves where there are any."""

from __future__ import annotations

from ..cluster import Device
from ..errors import ClusterError
from ..model.profile import COMPUTE_KINDS, FALLBACK, Layer, Op, Profile
from ..model.selective import AGAIN, verdicts

STREAM = 0.8
"""The share of the memory bandwidth that a kernel reaches, where no curve was measured."""

WIDTH = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "bf16-pure": 2, "fp8": 1}
"""Bytes of a value by precision."""


class Pricer:
    """Seconds of operators and layers on one device in one precision. Remembers what it has priced.

    An operator is priced as it was measured, alone; a layer as it runs in a step, which takes longer (`Device.situ`).
    """

    def __init__(self, profile: Profile, device: Device, precision: str) -> None:
        if precision not in device.peak:
            raise ClusterError(
                f"{device.name} has no rate for {precision}",
                rule=f"device.peak has {', '.join(device.peak)}",
                fix=f"--precision {next(iter(device.peak))}, or add the rate to the cluster file",
            )
        self._device, self._precision = device, precision
        self._width = profile.activation_bytes
        self._scale = WIDTH[precision] / profile.activation_bytes
        self._known: dict[tuple[int, str, float], float] = {}

    def op_seconds(self, op: Op, n: float) -> float:
        """One call of an operator on n samples: bound by compute or by memory, and never free."""
        moved = op.bytes.at(n) * self._scale
        device = self._device
        if op.kind in COMPUTE_KINDS:
            flops = op.flops.at(n)
            busy = max(flops / self._compute_rate(op.kind, max(flops, 1.0)), moved / device.bandwidth)
        else:
            busy = moved / self.memory_rate(op.kind, max(moved, 1.0))
        return max(device.launch, busy)

    def layer_seconds(self, layer: Layer, phase: str, n: float) -> float:
        """One layer's forward or backward on n samples."""
        key = (id(layer.ops), phase, n)
        if key not in self._known:
            alone = sum(self.op_seconds(op, n) * op.count for op in layer.ops if op.phase == phase)
            self._known[key] = self._situ(layer) * alone
        return self._known[key]

    def again_seconds(self, layer: Layer, n: float) -> float:
        """What selective recomputation computes again of one layer."""
        key = (id(layer.ops), "again", n)
        if key not in self._known:
            words = verdicts(layer.ops, self._device.kind, self._width)
            alone = sum(
                self.op_seconds(op, n) * op.count for op, word in zip(layer.ops, words, strict=True) if word == AGAIN
            )
            self._known[key] = self._situ(layer) * alone
        return self._known[key]

    def memory_rate(self, kind: str, size: float) -> float:
        """Bytes per second of a kernel bound by memory."""
        for name in (kind, "pointwise"):
            curve = self._device.curve_of(name, self._precision) or self._device.curve_of(name, "fp32")
            if curve is not None:
                return curve.at(size)
        return self._device.bandwidth * STREAM

    def update_seconds(self, layer: Layer, bytes_per_number: float, ops: float, share: float) -> float:
        """The optimizer's update of one layer's trained numbers, of which this rank holds `share`."""
        if not layer.tensors:
            return 0.0
        each = layer.parameters * share * bytes_per_number / (layer.tensors * max(1.0, ops))
        once = max(self._device.launch, each / self.memory_rate("update", max(each, 1.0)))
        return layer.tensors * ops * once * self._device.situ.get("update", 1.0)

    def _situ(self, layer: Layer) -> float:
        """How much longer the layer's kernels take in a step than alone."""
        convolves = any(op.kind == "conv" for op in layer.ops)
        return self._device.situ.get("conv" if convolves else "compute", 1.0)

    def _compute_rate(self, kind: str, flops: float) -> float:
        curve = self._device.curve_of(kind, self._precision)
        if curve is not None:
            return curve.at(flops)
        curve = self._device.curve_of("matmul", self._precision)
        best = curve.at(flops) if curve is not None else 0.7 * self._device.peak[self._precision]
        return best * FALLBACK.get(kind, 1.0)
