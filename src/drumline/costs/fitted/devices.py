"""Device types, and the constants and columns of the fitted cost model for a cluster."""

from __future__ import annotations

import re
from dataclasses import replace

from ...clusters import Cluster
from ...core.errors import ClusterError
from ...models.profile import Layer, Profile
from ..kernel_time import launch_overhead
from ..step import gap_between_steps
from .compute import FFN_VALUES, HALF, HEAD_VALUES, HIDDEN_VALUES
from .constants import Constants
from .constants_file import REFERENCE_MATMUL, DeviceConstants, FittedConstants, load_constants
from .inputs import MachineColumns, ModelColumns

DEVICE_TYPES = (
    "V100",
    "A100-40",
    "A100",
    "A100-PCIe",
    "A800",
    "H100",
    "H100-PCIe",
    "H800",
    "H200",
    "B200",
    "GB200",
    "GB300",
    "MI250X",
    "MI300X",
    "RTX4090",
)
SAME_CHIP = {"A100-40": "A100", "A800": "A100", "H800": "H100", "H200": "H100"}
"""Device types that are the same chip as another one with other memory or links; they share its constants."""


def device_type(name: str) -> str | None:
    """Parse the device type from a name such as `A100-80GB-SXM`, `H100-SXM-80GB`, `RTX-4090-24GB`."""
    head = re.match(r"(RTX[ -]?4090|GB[23]00|MI250X|MI300X|[VABH]\d{3})(?![0-9A-Za-z])", name, re.IGNORECASE)
    if not head:
        return None
    kind = "RTX4090" if head[1].upper().startswith("RTX") else head[1].upper()
    if "pcie" in name.lower() and f"{kind}-PCIe" in DEVICE_TYPES:
        return f"{kind}-PCIe"
    if kind == "A100" and re.search(r"\b40\s*GB", name):
        return "A100-40"
    return kind if kind in DEVICE_TYPES else None


def best_matmul(cluster: Cluster) -> float:
    """Fraction of the 16-bit peak that the best matmul of the cluster's curve reaches."""
    device = cluster.device
    dtype = "bf16" if "bf16" in device.peak else "fp16"
    curve = device.curve_of("matmul", dtype) if dtype in device.peak else None
    return min(1.0, max(curve.rates) / device.peak[dtype]) if curve else REFERENCE_MATMUL


def constants_for(cluster: Cluster, fitted: FittedConstants | None = None) -> Constants:
    """Constants of a cluster's devices; an unseen type gets the shared ones."""
    kind = device_type(cluster.device.name) or cluster.device.name
    return (fitted or load_constants()).constants(SAME_CHIP.get(kind, kind), best_matmul(cluster))


def device_constants_for(cluster: Cluster, fitted: FittedConstants | None = None) -> DeviceConstants | None:
    """Constants of the cluster's device type, if it has any."""
    return (fitted or load_constants()).device.get(device_type(cluster.device.name) or "")


def machine_for(cluster: Cluster, precision: str) -> MachineColumns:
    """A cluster as one row."""
    device = cluster.device
    if precision not in device.peak:
        raise ClusterError(
            f"{device.name} has no {precision}", where="device.peak", rule=f"one of {', '.join(device.peak)}"
        )
    half = device.peak.get("bf16", device.peak.get("fp16", device.peak[precision]))
    link = cluster.network.link if cluster.network else cluster.node.link
    return MachineColumns.of(
        peak=device.peak[precision],
        peak16=half if precision == "fp8" else device.peak[precision],
        bandwidth=device.bandwidth,
        memory=device.memory,
        link=cluster.node.link.bandwidth,
        devices_per_node=cluster.node.devices,
        network=link.bandwidth,
        link_startup=cluster.node.link.alpha,
        network_startup=link.alpha,
        power_fraction=1.0,
    )


OPERATORS_PER_BLOCK, CASTS_PER_BLOCK = 10, 10
"""Forward operators of a GPT block in 16 bits, as traced: four matmuls, attention, norms, residuals; and the casts."""


def adapt_to_engine(constants: Constants, profile: Profile, model: ModelColumns, cluster: Cluster) -> Constants:
    """Replace constants that the engine and a trace determine better than the software behind published runs.

    These are the launch time of a block, the time between two steps, and the bytes of a user's elementwise kernels.
    """
    device = cluster.device
    each = device.host_overhead.get("forward", device.launch)
    launch = OPERATORS_PER_BLOCK * each + CASTS_PER_BLOCK * device.host_overhead.get("cast", each)
    adapted = replace(constants, step_overhead=gap_between_steps(cluster), layer_launch=launch)
    if not profile.precision:  # a formula, or a trace in fp32, which has no casts
        return adapted
    block = next(x for x in profile.layers if any(op.kind == "attention" for op in x.ops))
    launch = sum(op.count * launch_overhead(op, device) for op in block.ops if op.phase == "forward")
    bytes_over_minimum = elementwise_factor(block, model)
    return replace(adapted, layer_launch=launch, elementwise_eager=bytes_over_minimum, elementwise_rotary=1.0)


def elementwise_factor(block: Layer, model: ModelColumns) -> float:
    """Bytes that the elementwise kernels of a traced block move, forward and backward, over the minimum."""
    moved = sum(op.bytes.per_sample * op.count for op in block.ops if not op.kind.startswith(("matmul", "attention")))
    heads = model.projected_heads
    ffn = (1.0 + model.gated) * model.ffn
    minimum = sum(
        HALF * model.sequence * (a * model.hidden + b * ffn + e * heads)
        for a, b, e in zip(HIDDEN_VALUES, FFN_VALUES, HEAD_VALUES, strict=True)
    )
    return float(moved / minimum[0])  # type: ignore[index]  # a sum of arrays
