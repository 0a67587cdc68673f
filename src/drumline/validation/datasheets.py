"""Data sheets of the GPUs in a table of runs, and the links that the table describes in words."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from ..clusters.catalogue import load
from ..core.errors import InputError, nearest
from ..costs.fitted.devices import SAME_CHIP, best_matmul, device_type

_CLUSTERS = {
    "V100": "dgx-v100",
    "A100-40": "dgx-a100-40",
    "A100": "dgx-a100",
    "A100-PCIe": "one-a100",
    "A800": "a800",
    "H100": "dgx-h100",
    "H100-PCIe": "one-h100-pcie",
    "H800": "h800",
    "H200": "dgx-h200",
    "B200": "hgx-b200",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI250X": "mi250x",
    "MI300X": "mi300x",
    "RTX4090": "rtx4090",
}
_USUAL_WATTS = {"H100": 700.0}
_INFINIBAND = {"FDR": 56, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
"""Gb/s of one InfiniBand port, by generation."""
_OMNI_PATH = 0.65
"""Efficiency of Omni-Path, whose protocol runs on the host, relative to InfiniBand: a published all-reduce of four
nodes reached 40 of 100 Gb/s per port, where InfiniBand reaches 62."""
_HBM2E = 2.4e12
"""Memory bandwidth of the H100 variant with HBM2e, as published."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Data sheet of a device, and of its usual node."""

    type: str
    chip: str
    peaks: dict[str, float]
    best: float
    """Fraction of the bf16 (or fp16) peak that the best published matmul reached."""
    bandwidth: float
    memory: float
    context: float
    node: int
    link: float
    network: float
    power: float
    """Power limit as a fraction of the usual one of its type."""


def parse_datasheet(text: str, where: str) -> DataSheet:
    """Data sheet of a GPU name such as `A100-80GB-SXM`, `H100-96GB-SXM HBM2e 500W`, `V100-32GB-SXM2 (DGX-1)`."""
    name = text.split("(")[0].strip()
    kind = device_type(name)
    if kind is None:
        raise InputError(
            f"unknown GPU {text!r}",
            where=where,
            rule=f"one of {', '.join(_CLUSTERS)}, with its memory and form, such as A100-80GB-SXM",
            fix=nearest(name, _CLUSTERS),
        )
    watts = re.search(r"(\d{3,4})\s*W\b", name)
    return _datasheet(kind, float(watts[1]) if watts else 0.0, "hbm2e" in name.lower())


@functools.cache
def _datasheet(kind: str, watts: float, old_memory: bool) -> DataSheet:
    cluster = load(_CLUSTERS[kind])
    d = cluster.device
    return DataSheet(
        type=kind,
        chip=SAME_CHIP.get(kind, kind),
        peaks=dict(d.peak),
        best=best_matmul(cluster),
        bandwidth=_HBM2E if old_memory and kind == "H100" else d.bandwidth,
        memory=d.memory,
        context=d.context,
        node=cluster.node.devices,
        link=cluster.node.link.bandwidth,
        network=cluster.network.link.bandwidth if cluster.network else cluster.node.link.bandwidth,
        power=watts / _USUAL_WATTS.get(kind, watts) if watts else 1.0,
    )


def best_matmul_of(kind: str) -> float:
    """Fraction of peak that the best published matmul on a device type reached."""
    return _datasheet(kind, 0.0, False).best


def device_types() -> tuple[str, ...]:
    """Device types with a data sheet."""
    return tuple(_CLUSTERS)


def parse_node_bandwidth(text: str, sheet: DataSheet) -> float:
    """Bandwidth inside a node, one direction, from `NVLink3+NVSwitch 600 GB/s bidir` or the data sheet."""
    match = re.search(r"([\d.]+)\s*GB/s\s*(bidir)?", text)
    if not match:
        return sheet.link
    return float(match[1]) * 1e9 / (2.0 if match[2] else 1.0)


def parse_link_domain(text: str, per_node: int) -> int:
    """Devices that fast links connect: those of a node, or more where the name says so (`NVL72`)."""
    match = re.search(r"NVL(\d+)\b", text)
    return max(per_node, int(match[1])) if match else per_node


def parse_network_bandwidth(text: str, sheet: DataSheet, per_node: int, domain: int) -> float:
    """Network bandwidth of a link domain, one direction, in bytes per second.

    From `8x HDR IB 200 Gb/s per node` or `400 Gb/s per GPU`, or the usual one of the device type.
    """
    match = re.search(r"([\d.]+)\s*(G|T)b/s", text)
    ports = re.match(r"\s*(\d+)x\b", text)
    named = re.search(r"\b(FDR|EDR|HDR|NDR|XDR)\b", text)
    if match:
        rate = float(match[1]) * (1e9 if match[2] == "G" else 1e12) / 8.0
    elif named and ports:
        rate = _INFINIBAND[named[1]] * 1e9 / 8.0
    else:
        return sheet.network * domain / sheet.node
    if re.search(r"omni-?path|\bOPA\b", text, re.IGNORECASE):
        rate *= _OMNI_PATH
    if "per gpu" in text.lower():
        return rate * domain
    return (rate * int(ports[1]) if ports else rate) * domain / per_node
