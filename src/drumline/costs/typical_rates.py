"""Typical rates of a GPU that was not measured, as fractions of its data sheet, and typical times of its host.

All are typical of an H200 with torch 2.11 and models in eager mode. They were chosen so that steps measured there
(docs/gpu.md) are met: ResNet-50, ViT, BERT and an MLP, plain and captured. No other GPU was measured, so on others they
are as good as the assumption that fractions carry over. A cluster file with `rates = "typical"` gets them; every curve,
overhead and slowdown that it states itself counts instead.
"""

from __future__ import annotations

from dataclasses import replace

from ..clusters import Cluster, DeviceSpec, KernelCurve
from ..models.profile import Profile, ProfiledOp

BANDWIDTH_SHARE = {
    "pointwise": 0.80,
    "special": 0.60,
    "update": 0.80,
    "norm": 0.60,
    "softmax": 0.80,
    "reduce": 0.30,
    "gather": 0.50,
    "native_batch_norm": 0.40,
    "native_batch_norm_backward": 0.40,
    "batch_norm": 0.40,
    "batch_norm_backward": 0.40,
}
"""Share of the memory bandwidth that large kernels reach, by kind. Row sums (`reduce`) and batch norms over
channels-first images read with strides. Moves models that are no transformers of the fitted cost model."""

SMALLEST_KERNEL = 1.8e-6
"""Seconds of a kernel that does nothing. Moves captured steps of small operators."""

IN_STEP_SLOWDOWN = {"compute": 1.2, "conv": 1.0}
"""Time of kernels inside a step over that at the rates of a cluster file's curves, which are those of the best shapes
on a cool GPU: inner dimensions of 768 are short."""

AUTOCAST_BYTES = {"pointwise": 2.5, "norm": 3.5}
"""Bytes that kernels move under autocast, over those of the same kernels in 16 bits: residual sums and norms
are in fp32, and are cast to 16 bits. Counted for profiles without casts of their own (the zoo)."""

AUTOCAST_LAUNCHES = 3
"""Casts that a matmul or convolution needs under autocast, of its weight and its bias, and as many in the backward."""

CONVOLUTION_COPIES = 4.0
"""Bytes that convolutions in 16 bits of channels-first images copy, to channels last and back, over their own."""

HOST_OVERHEAD = {"forward": 3.4e-5, "entry": 3.4e-5, "backward": 3.4e-5, "cast": 1.2e-5, "update": 4e-6}
"""Seconds of the host by call, as in `DeviceSpec.host_overhead`: 32 to 47 us for an operator were measured on hosts of
H200 machines. Moves steps that wait for their host."""

_SAME_UNDER_AUTOCAST = ("native_batch_norm", "_to_copy")
"""Operators whose bytes autocast does not change: batch norms stay in 16 bits, and casts are counted as they are."""
_HALF = ("bf16", "fp16")
_SIZES = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9)


def with_typical_rates(cluster: Cluster) -> Cluster:
    """A cluster whose GPUs have typical rates and overheads, if its file asks for them and does not state its own."""
    device = cluster.device
    if device.rates != "typical" or device.kind != "cuda":
        return cluster
    if cluster.measured:
        return replace(cluster, device=replace(device, rates="data-sheet"))
    stated = {(curve.kernel, curve.dtype) for curve in device.curve}
    curves = (_memory_curve(kind, share * device.bandwidth) for kind, share in BANDWIDTH_SHARE.items())
    typical = replace(
        device,
        curve=(*device.curve, *(c for c in curves if (c.kernel, c.dtype) not in stated)),
        host_overhead=HOST_OVERHEAD | device.host_overhead,
        in_step_slowdown=IN_STEP_SLOWDOWN | device.in_step_slowdown,
    )
    return replace(cluster, device=typical)


class FormulaWork:
    """Bytes and launches of a step in eager mode beyond the operators of a profile that counts the least of both.

    Traced profiles have casts of their own, and layout copies are assumed only where rates are typical ones.
    """

    def __init__(self, profile: Profile, device: DeviceSpec, precision: str) -> None:
        self._copies = device.rates == "typical" and device.kind == "cuda" and precision in _HALF
        self._casts = self._copies and not profile.precision

    def moved(self, op: ProfiledOp, size: float) -> float:
        """Bytes that a memory-bound operator moves."""
        if not self._casts or op.name.startswith(_SAME_UNDER_AUTOCAST):
            return size
        return size * AUTOCAST_BYTES.get(op.kind, 1.0)

    def copied(self, op: ProfiledOp, size: float) -> float:
        """Bytes that are copied next to a convolution to change its layout."""
        return CONVOLUTION_COPIES * size if self._copies and op.kind.startswith("conv") else 0.0

    def casts(self, op: ProfiledOp) -> int:
        """Casts around one call of an operator, which the host launches."""
        return AUTOCAST_LAUNCHES if self._casts and op.kind in ("matmul", "conv") and op.phase == "forward" else 0


def _memory_curve(kind: str, rate: float) -> KernelCurve:
    """Bytes per second by size: every kernel takes at least `SMALLEST_KERNEL`."""
    rates = tuple(size / (SMALLEST_KERNEL + size / rate) for size in _SIZES)
    return KernelCurve(kind, "fp32", _SIZES, rates)
