"""Which device type a name means, which chip that is, and what the closed form reads of a cluster."""

from __future__ import annotations

import re

from ...clusters import Cluster
from ...core.errors import ClusterError
from .constants import Constants
from .inputs import Machines
from .profiles import REFERENCE, Device, Profiles, load_profiles

TYPES = (
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
    "MI250X",
    "MI300X",
    "RTX4090",
)
SAME_CHIP = {"A100-40": "A100", "A800": "A100", "H800": "H100", "H200": "H100"}
"""Device types that are the same chip as another one, with other memory or links: they share its profile."""


def type_of(name: str) -> str | None:
    """The device type in a name as people write it: `A100-80GB-SXM`, `H100-SXM-80GB`, `RTX-4090-24GB`."""
    head = re.match(r"(RTX[ -]?4090|GB200|MI250X|MI300X|[VABH]\d{3})(?![0-9A-Za-z])", name, re.IGNORECASE)
    if not head:
        return None
    kind = "RTX4090" if head[1].upper().startswith("RTX") else head[1].upper()
    if "pcie" in name.lower() and f"{kind}-PCIe" in TYPES:
        return f"{kind}-PCIe"
    if kind == "A100" and re.search(r"\b40\s*GB", name):
        return "A100-40"
    return kind if kind in TYPES else None


def best_product(cluster: Cluster) -> float:
    """Share of the 16-bit peak that the best product reached, as far as the cluster's curve tells."""
    device = cluster.device
    dtype = "bf16" if "bf16" in device.peak else "fp16"
    curve = device.curve_of("matmul", dtype) if dtype in device.peak else None
    return min(1.0, max(curve.rates) / device.peak[dtype]) if curve else REFERENCE


def constants_for(cluster: Cluster, profiles: Profiles | None = None) -> Constants:
    """The constants of a cluster's devices; those of a type that was never seen are what devices share."""
    kind = type_of(cluster.device.name) or cluster.device.name
    return (profiles or load_profiles()).constants(SAME_CHIP.get(kind, kind), best_product(cluster))


def profile_for(cluster: Cluster, profiles: Profiles | None = None) -> Device | None:
    """The profile of a cluster's device type, if there is one."""
    return (profiles or load_profiles()).device.get(type_of(cluster.device.name) or "")


def machines_for(cluster: Cluster, precision: str) -> Machines:
    """A cluster's numbers as one row of arrays."""
    device = cluster.device
    if precision not in device.peak:
        raise ClusterError(
            f"{device.name} has no {precision}", where="device.peak", rule=f"one of {', '.join(device.peak)}"
        )
    half = device.peak.get("bf16", device.peak.get("fp16", device.peak[precision]))
    link = cluster.network.link if cluster.network else cluster.node.link
    return Machines.of(
        peak=device.peak[precision],
        peak16=half if precision == "fp8" else device.peak[precision],
        bandwidth=device.bandwidth,
        memory=device.memory,
        link=cluster.node.link.bandwidth,
        node=cluster.node.devices,
        network=link.bandwidth,
        start=cluster.node.link.alpha,
        start_network=link.alpha,
        power=1.0,
    )
