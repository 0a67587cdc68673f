"""The data sheet behind a GPU's name in a table of runs, and the links that such a table describes in words."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from ..clusters.catalogue import load
from ..core.errors import InputError, nearest
from ..costs.fitted.chips import SAME_CHIP, best_product, type_of

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
    "MI250X": "mi250x",
    "MI300X": "mi300x",
    "RTX4090": "rtx4090",
}
_USUAL_WATTS = {"H100": 700.0}
_PORTS = {"FDR": 56, "EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
"""Gb/s of one InfiniBand port by its name."""
_HOST_DRIVEN = 0.65
"""Ports whose protocol runs on the host (Omni-Path), against those that run it themselves: a published all-reduce of
four nodes got 40 of a port's 100 Gb/s, where InfiniBand gives 62 of 100."""
_HBM2E = 2.4e12
"""Bytes per second of an H100 with the older memory, as published for that variant."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """What a data sheet says of one device and of the node that it usually stands in."""

    type: str
    chip: str
    peaks: dict[str, float]
    best: float
    """Share of the bf16 (or fp16) peak that the best published product reached."""
    bandwidth: float
    memory: float
    context: float
    node: int
    link: float
    network: float
    power: float
    """Its power limit as a share of its type's own."""


def sheet_of(text: str, where: str) -> Sheet:
    """The sheet of a GPU as people write it: `A100-80GB-SXM`, `H100-96GB-SXM HBM2e 500W`, `V100-32GB-SXM2 (DGX-1)`."""
    name = text.split("(")[0].strip()
    found = type_of(name)
    if found is None:
        raise InputError(
            f"unknown GPU {text!r}",
            where=where,
            rule=f"one of {', '.join(_CLUSTERS)}, with its memory and form, such as A100-80GB-SXM",
            fix=nearest(name, _CLUSTERS),
        )
    watts = re.search(r"(\d{3,4})\s*W\b", name)
    return _sheet(found, float(watts[1]) if watts else 0.0, "hbm2e" in name.lower())


@functools.cache
def _sheet(kind: str, watts: float, old_memory: bool) -> Sheet:
    cluster = load(_CLUSTERS[kind])
    d = cluster.device
    return Sheet(
        type=kind,
        chip=SAME_CHIP.get(kind, kind),
        peaks=dict(d.peak),
        best=best_product(cluster),
        bandwidth=_HBM2E if old_memory and kind == "H100" else d.bandwidth,
        memory=d.memory,
        context=d.context,
        node=cluster.node.devices,
        link=cluster.node.link.bandwidth,
        network=cluster.network.link.bandwidth if cluster.network else cluster.node.link.bandwidth,
        power=watts / _USUAL_WATTS.get(kind, watts) if watts else 1.0,
    )


def best_of(kind: str) -> float:
    """Share of peak that the best published product on a device type reached."""
    return _sheet(kind, 0.0, False).best


def types() -> tuple[str, ...]:
    """All device types that have a data sheet."""
    return tuple(_CLUSTERS)


def link_of(text: str, sheet: Sheet) -> float:
    """One direction of a device's links inside a node, from `NVLink3+NVSwitch 600 GB/s bidir` or the data sheet."""
    found = re.search(r"([\d.]+)\s*GB/s\s*(bidir)?", text)
    if not found:
        return sheet.link
    return float(found[1]) * 1e9 / (2.0 if found[2] else 1.0)


def domain_of(text: str, per_node: int) -> int:
    """Devices that fast links join: those of a node, unless the links' name says more (`NVL72`)."""
    found = re.search(r"NVL(\d+)\b", text)
    return max(per_node, int(found[1])) if found else per_node


def network_of(text: str, sheet: Sheet, per_node: int, domain: int) -> float:
    """One direction of the ports of all devices that fast links join, in bytes per second.

    From `8x HDR IB 200 Gb/s per node` or `400 Gb/s per GPU`, or the usual of the device's type."""
    found = re.search(r"([\d.]+)\s*(G|T)b/s", text)
    ports = re.match(r"\s*(\d+)x\b", text)
    named = re.search(r"\b(FDR|EDR|HDR|NDR|XDR)\b", text)
    if found:
        rate = float(found[1]) * (1e9 if found[2] == "G" else 1e12) / 8.0
    elif named and ports:
        rate = _PORTS[named[1]] * 1e9 / 8.0
    else:
        return sheet.network * domain / sheet.node
    if re.search(r"omni-?path|\bOPA\b", text, re.IGNORECASE):
        rate *= _HOST_DRIVEN
    if "per gpu" in text.lower():
        return rate * domain
    return (rate * int(ports[1]) if ports else rate) * domain / per_node
