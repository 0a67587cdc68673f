"""Seconds of operators and layers on a device: measured shapes and curves where there are any, else the roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..clusters import DeviceSpec
from ..core.errors import ClusterError, PlanError
from ..models.profile import COMPUTE_KINDS, MATMUL_RATE_SHARE, SIMILAR_KINDS, Layer, Profile, ProfiledOp
from ..models.recompute_choice import RECOMPUTED, recompute_verdicts
from ..theory.roofline import MEMORY_EFFICIENCY, STORED_BYTES, compute_type
from .shape_interpolation import GROUP_NORM, ROW_SUMS, ShapeInterpolation, kernel_work
from .tuning import (
    ATTENTION_CALLS,
    BACKWARD_ATTENTION_CALLS,
    CALLS_PER_OP,
    FLOAT8_COPY_BYTES,
    FRESH_MEMORY_BYTES,
    FUNCTION_CALLS,
    HALF_CONVOLUTION_CALLS,
    LOOP_CALLS,
    PARAMETER_CALLS,
    RECURRENT_CALL_LAYERS,
    RECURRENT_LAYERS,
    UNMEASURED_MATMUL_EFFICIENCY,
    VIEW_CALLS,
)
from .typical_rates import FormulaWork

LAYOUT_KINDS = frozenset({"transpose", "strided", "widen", "narrow"})
"""Kinds that describe a call better than its name: they have one curve. Others may have one for each operator."""

HOST_CALL = "entry"
"""The key of `DeviceSpec.host_overhead` for the time of one of the `host_calls` of a forward on the host of a GPU."""

BACKWARD_CALL = "backward_entry"
"""The same for the `backward_calls` of a backward."""

BACKWARD_CAST = "cast_backward"
"""The key for the time of the backward of a cast; without it, one of the forward (`cast`) counts."""

LAUNCHES = (
    *("forward", "cast", HOST_CALL, "recurrent"),
    *("backward", BACKWARD_CAST, BACKWARD_CALL, "recurrent_backward"),
)
"""All keys for the time of a launch."""

OPERATOR_OVERHEAD = {"forward": "operator_forward", "backward": "operator_backward"}
"""Keys of `DeviceSpec.host_overhead`: the time of an operator of a step on a CPU without its kernel, in Python and
autograd."""

FLOAT8_MATMULS = frozenset({"mm", "addmm", "linear"})
"""The matmuls of linear layers, which `precision=fp8` computes in fp8; those of attention are batched."""

CAST = "_to_copy"
"""The operator that autocast adds."""


@dataclass(frozen=True, slots=True)
class LaunchAndKernelTime:
    """Seconds of a layer on the host that launches it, and on the device that runs it."""

    launch: float
    """Seconds that the host takes to launch a GPU's kernels; 0 on a CPU, which is its own host."""
    kernel: float
    """Seconds that the device works."""

    @property
    def seconds(self) -> float:
        """The time of the layer alone: the host is not ahead, the device not behind."""
        return max(self.launch, self.kernel)


class Pricer:
    """Seconds of operators and layers on one device in one precision, cached.

    An operator is priced as it was measured, alone; a layer as it runs in a step, which takes longer
    (`DeviceSpec.in_step_slowdown`). The kernels of a GPU are launched ahead of time: a layer takes as long as its
    launches or its kernels, whichever is longer. A CPU does one operator after the other.
    """

    def __init__(self, profile: Profile, device: DeviceSpec, precision: str) -> None:
        self._float8 = precision == "fp8"
        if compute_type(precision) not in device.peak:
            raise ClusterError(
                f"{device.name} has no rate for {precision}",
                rule=f"device.peak has {', '.join(device.peak)}",
                fix=f"--precision {next(iter(device.peak))}, or add the rate to the cluster file",
            )
        if profile.precision not in ("", precision):
            raise PlanError(
                f"a profile that was traced in {profile.precision} cannot be priced in {precision}",
                rule="casts were counted for one precision",
                fix=f"trace the job once more, with precision={precision}",
            )
        self._half = next((name for name in ("bf16", "fp16") if name in device.peak), "fp8")
        """The type of what `fp8` leaves in half precision."""
        self._device, self._precision = device, self._half if self._float8 else compute_type(precision)
        self._beyond = FormulaWork(profile, device, self._precision)
        self._width = profile.activation_bytes
        self._scale = STORED_BYTES[precision] / profile.activation_bytes
        self._times: dict[tuple[int, int, int, str, float], LaunchAndKernelTime] = {}
        self._shapes = ShapeInterpolation(device)
        self._ahead = device.kind == "cuda"
        self._plain = "fp32" if profile.precision and precision != "tf32" else self._precision
        """The type of operators that do not state theirs."""
        elementwise = device.curve_of("pointwise", "fp32")
        self.least = elementwise.sizes[0] / elementwise.rates[0] if elementwise else 0.0
        """Seconds of the smallest kernel."""
        self._around = max(0.0, device.launch - self.least) if elementwise else 0.0
        """Seconds of an operator without its kernel: on a CPU they add up."""

    def op_seconds(self, op: ProfiledOp, n: float) -> float:
        """One call of an operator on n samples, alone: bound by compute or by memory, and never free."""
        kernel = self._kernel_seconds(op, n)
        return kernel + self._around if self.least and not self._ahead else max(self._device.launch, kernel)

    def _kernel_seconds(self, op: ProfiledOp, n: float) -> float:
        """One call on the device, without its launch."""
        if self._float8 and op.kind == "matmul" and op.name in FLOAT8_MATMULS:
            return self._float8_seconds(op, n)
        moved, dtype = op.bytes.at(n) * self._scale, op.dtype or self._plain
        flops = op.flops.at(n)
        measured = self._measured(op, n, flops, dtype)
        if measured is not None:
            return max(self.least, measured)
        if op.kind not in COMPUTE_KINDS:
            moved = self._beyond.moved(op, moved)
            return max(self.least, moved / self.memory_rate(op.kind, max(moved, 1.0), dtype, name=op.name))
        seconds = max(flops / self._compute_rate(op.kind, max(flops, 1.0), dtype), moved / self._device.bandwidth)
        copied = self._beyond.copied(op, moved)
        return seconds + copied / self.memory_rate("pointwise", copied) if copied else seconds

    def _float8_seconds(self, op: ProfiledOp, n: float) -> float:
        """A matmul of a linear layer in fp8, and the scales and copies of its inputs.

        Where matmuls were measured in bf16 only, fp8 is faster by the ratio of the peaks.
        """
        flops, moved = op.flops.at(n), op.bytes.at(n) * self._scale
        peak, half = self._device.peak, self._half
        measured = self._measured(op, n, flops, half)
        curve = self._device.curve_of("matmul", half)
        if measured is not None:
            seconds = measured * peak[half] / peak["fp8"]
        elif curve is not None:
            seconds = flops / (curve.at(max(flops, 1.0)) * peak["fp8"] / peak[half])
        else:
            seconds = flops / (UNMEASURED_MATMUL_EFFICIENCY * peak["fp8"])
        values = moved / STORED_BYTES["fp8"]
        copies = values * FLOAT8_COPY_BYTES
        return max(self.least, seconds, values / self._device.bandwidth) + copies / self.memory_rate(
            "pointwise", max(copies, 1.0), half
        )

    def _measured(self, op: ProfiledOp, n: float, flops: float, dtype: str) -> float | None:
        """By measured shapes; an operator that ranks divide no longer has its shape."""
        if not op.shape or not self._device.shape_times:
            return None
        shape = tuple(size.at(n) for size in op.shape)
        kind = _measured_kind(op)
        work = kernel_work(kind, shape)
        if op.kind in ("recurrent", "recurrent_backward"):
            if not self._ahead:  # a CPU does one layer after the other
                return self._shapes.seconds(op.kind, dtype, shape)
            # layers that are equal run side by side, each a few steps behind the one before
            seconds = self._shapes.seconds(op.kind, dtype, (*shape, float(op.count)))
            return None if seconds is None else seconds / op.count
        if op.kind == "conv_backward" and 0.45 * work < flops < 0.55 * work:
            work = flops = flops * 2  # the first layer needs no gradient of its input: half of the time is left
            seconds = self._shapes.seconds(op.kind, dtype, shape)
            return None if seconds is None else seconds / 2
        if not 0.98 * work < flops < 1.02 * work:
            return None
        seconds = self._shapes.seconds(kind, dtype, shape)
        made = 4.0 * math.prod(shape[:3]) if op.kind == "matmul" else 0.0
        return None if seconds is None else seconds + self._page_faults(made)

    def _page_faults(self, size: float) -> float:
        """Seconds to map the memory of a large output, where a CPU's shapes were measured on smaller ones."""
        curve = self._device.curve_of("new_pages", "fp32") if size >= FRESH_MEMORY_BYTES and not self._ahead else None
        return size / curve.at(size) if curve else 0.0

    def layer_seconds(self, layer: Layer, phase: str, n: float) -> float:
        """One layer's `forward` or `backward` on n samples, or what selective recomputation computes `again` of it."""
        return self.layer_time(layer, phase, n).seconds

    def layer_time(self, layer: Layer, phase: str, n: float, *, recompute: str = "none") -> LaunchAndKernelTime:
        """One layer's `forward`, `backward`, or what selective recomputation computes `again` of it.

        A recomputed layer costs its host more each time it runs forward; with selective recomputation every operator of
        the forward is intercepted, also those that are not repeated.
        """
        if recompute != "none" and layer.composite:
            plain, overhead = self.layer_time(layer, phase, n), self._device.host_overhead
            more = overhead.get("recompute", 0.0)
            if recompute == "selective":
                more += overhead.get("selective_recompute", 0.0) * _forward_ops(layer)
            return LaunchAndKernelTime(plain.launch + more, plain.kernel)
        key = (id(layer.ops), layer.views, layer.python_calls, phase, n)
        if key not in self._times:
            if phase == "again":
                words = recompute_verdicts(layer.ops, self._device.kind, self._width)
                ops = [op for op, word in zip(layer.ops, words, strict=True) if word == RECOMPUTED]
            else:
                ops = [op for op in layer.ops if op.phase == phase]
            time = self._time(ops, self._slowdown(layer, phase), n)
            if self._ahead:
                time = replace(time, launch=time.launch + self._calls_seconds(layer, phase))
            self._times[key] = time
        return self._times[key]

    def _calls_seconds(self, layer: Layer, phase: str) -> float:
        """Host time of a GPU that was measured per call; without it, `launch_overhead` counts per operator."""
        overhead = self._device.host_overhead
        if phase == "forward" and HOST_CALL in overhead:
            return overhead[HOST_CALL] * host_calls(layer)
        if phase == "backward" and BACKWARD_CALL in overhead:
            return overhead[BACKWARD_CALL] * backward_calls(layer)
        return 0.0

    def _time(self, ops: list[ProfiledOp], slowdown: float, n: float) -> LaunchAndKernelTime:
        """Operators of one layer, which take `slowdown` times as long as alone."""
        if not self._ahead:
            around = sum(
                self._device.host_overhead.get(OPERATOR_OVERHEAD[op.phase], 0.0) * loop_calls(op) for op in ops
            )
            return LaunchAndKernelTime(0.0, slowdown * sum(self.op_seconds(op, n) * op.count for op in ops) + around)
        launch = kernel = 0.0
        called = False
        for op in ops:
            seconds = self._kernel_seconds(op, n)
            if op.kind.startswith("recurrent"):  # thousands of kernels; layers of other sizes are of the same call
                launch += self._recurrent_launch(op, n, seconds, first=not called)
                kernel, called = kernel + op.count * seconds, True
            else:
                cast = cast_overhead(op.phase, self._device) if self._beyond.casts(op) else 0.0
                launch += op.count * (launch_overhead(op, self._device) + self._beyond.casts(op) * cast)
                kernel += slowdown * op.count * seconds
        return LaunchAndKernelTime(launch, kernel)

    def _recurrent_launch(self, op: ProfiledOp, n: float, seconds: float, *, first: bool) -> float:
        """Launches of equal recurrent layers, step by step; as long as their kernels where that was not measured.

        The `first` layers of a forward have the time of the call itself.
        """
        layer_step = self._device.host_overhead.get(op.kind)
        if layer_step is None or not op.shape:
            return op.count * seconds
        layers = float(op.count)
        if op.kind == "recurrent":  # measured with some layers, of which each has its share of the call
            share = RECURRENT_LAYERS / (RECURRENT_LAYERS + RECURRENT_CALL_LAYERS)
            layers = (layers + (RECURRENT_CALL_LAYERS if first else 0.0)) * share
        return layers * layer_step * op.shape[0].at(n)

    def memory_rate(self, kind: str, size: float, dtype: str = "", *, name: str = "") -> float:
        """Bytes per second of a kernel bound by memory; by the operator's own name, if it was measured."""
        own = () if kind in LAYOUT_KINDS or not name else (name, name.rstrip("_"))
        for name in (*own, kind, SIMILAR_KINDS.get(kind, "pointwise"), "pointwise"):
            curve = self._device.curve_of(name, dtype or self._plain) or self._device.curve_of(name, "fp32")
            if curve is not None:
                return curve.at(size)
        return self._device.bandwidth * MEMORY_EFFICIENCY

    def update_seconds(self, layer: Layer, bytes_per_number: float, ops: float, share: float) -> float:
        """The optimizer's update of one layer's trained parameters, of which this rank has `share`.

        Without operators (`ops` is 0) they are only read.
        """
        if not layer.tensors:
            return 0.0
        if ops == 0 and not self._ahead:
            each = layer.parameters * share * bytes_per_number / layer.tensors
            return layer.tensors * (self._device.launch + each / self.memory_rate("reduce", max(each, 1.0)))
        each = layer.parameters * share * bytes_per_number / (layer.tensors * max(1.0, ops))
        rate = self.memory_rate("update", max(each, 1.0))
        device = self._device
        if "update" in device.host_overhead:  # small updates were measured with their overhead
            return layer.tensors * (
                ops * each / rate * device.in_step_slowdown.get("update", 1.0) + device.host_overhead["update"]
            )
        return layer.tensors * ops * max(device.launch, each / rate) * device.in_step_slowdown.get("update", 1.0)

    def _slowdown(self, layer: Layer, phase: str) -> float:
        """How much longer the layer's kernels take in a step than alone; recomputation counts as forward."""
        kind = "conv" if any(op.kind == "conv" for op in layer.ops) else "compute"
        direction = "backward" if phase == "backward" else "forward"
        slowdown = self._device.in_step_slowdown
        return slowdown.get(f"{kind}_{direction}", slowdown.get(kind, 1.0))

    def _compute_rate(self, kind: str, flops: float, dtype: str) -> float:
        curve = self._device.curve_of(kind, dtype)
        if curve is not None:
            return curve.at(flops)
        curve = self._device.curve_of("matmul", dtype)
        peak = self._device.peak
        best = (
            curve.at(flops)
            if curve is not None
            else UNMEASURED_MATMUL_EFFICIENCY * peak.get(dtype, peak[self._precision])
        )
        return best * MATMUL_RATE_SHARE.get(kind, 1.0)


def _measured_kind(op: ProfiledOp) -> str:
    """The kind under which the shapes of an operator are measured."""
    if op.name.startswith("native_group_norm"):
        return op.kind.replace("norm", GROUP_NORM)
    return ROW_SUMS if op.kind == "reduce" else op.kind


def loop_calls(op: ProfiledOp) -> int:
    """Calls of an operator that a CPU pays overhead for: in a loop, as of a GRU, only the first ones count."""
    return min(op.count, LOOP_CALLS)


def launch_overhead(op: ProfiledOp, device: DeviceSpec) -> float:
    """Seconds of a GPU's host to launch an operator, or a cast of autocast.

    That of a forward may be counted by `host_calls` instead (`HOST_CALL`), of a backward by `backward_calls`.
    """
    if op.name == CAST:
        return cast_overhead(op.phase, device)
    start = device.host_overhead.get("backward" if op.phase == "backward" else "forward", device.launch)
    by_calls = BACKWARD_CALL if op.phase == "backward" else HOST_CALL
    return 0.0 if by_calls in device.host_overhead else start


def cast_overhead(phase: str, device: DeviceSpec) -> float:
    """Seconds of a GPU's host to launch a cast of autocast, or its backward."""
    overhead = device.host_overhead
    cast = overhead.get("cast", overhead.get("backward" if phase == "backward" else "forward", device.launch))
    return overhead.get(BACKWARD_CAST, cast) if phase == "backward" else cast


def _forward_ops(layer: Layer) -> int:
    """Operators of a layer's forward, without casts."""
    return sum(op.count for op in layer.ops if op.phase == "forward" and op.name != CAST)


def backward_calls(layer: Layer) -> float:
    """The host's time for a layer's backward on a GPU, without casts, counted in operators."""
    ops = [op for op in layer.ops if op.phase == "backward" and op.name != CAST]
    attentions = sum(op.count for op in ops if op.kind == "attention_backward")
    converted = sum(op.count for op in ops if op.kind == "conv_backward" and op.dtype in ("bf16", "fp16"))
    return (
        sum(op.count for op in ops)
        + BACKWARD_ATTENTION_CALLS * attentions
        + HALF_CONVOLUTION_CALLS * converted
        + PARAMETER_CALLS * layer.tensors
    )


def host_calls(layer: Layer) -> float:
    """The host's time for a layer's forward on a GPU, without casts, counted in operators."""
    ops = [op for op in layer.ops if op.phase == "forward" and op.name != CAST]
    plain = float(sum(op.count for op in ops))
    if not layer.python_calls:
        return CALLS_PER_OP * plain
    attentions = sum(op.count for op in ops if op.kind == "attention")
    return plain + ATTENTION_CALLS * attentions + VIEW_CALLS * layer.views + FUNCTION_CALLS * layer.python_calls
