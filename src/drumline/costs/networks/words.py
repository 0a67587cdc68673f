"""What people write about links (`NVLink3+NVSwitch 600 GB/s bidir`, `8x 200 Gb/s HDR IB per node`), as numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

NVLINK = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9}
"""Bytes per second of one device in one direction, by generation: data sheets."""
PCIE = {3: 16e9, 4: 32e9, 5: 64e9, 6: 128e9}
"""The same of 16 lanes."""
SWITCHED_FROM = 3
"""The generation of NVLink from which on eight devices are joined by switches."""
REDUCES_FROM = 4
"""The generation of NVLink from which on its switches add up what passes: data sheets."""

_UNSTATED = re.compile(r"\s*(?:not stated.*|unknown|n/?a|-|\?)?\s*\Z", re.IGNORECASE)
_RATE = re.compile(r"([\d.]+)\s*GB/s\s*(one[- ]way|uni\w*|per direction)?", re.IGNORECASE)
_PORTS = re.compile(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*(?:Gb/s|Gbps|Gbit/s|GbE|G\b)")
_NETWORKS = (
    ("tcp", r"\bTCP\b"),
    ("efa", r"\bEFA\b"),
    ("slingshot", r"slingshot"),
    ("infiniband", r"\bIB\b|infiniband|\b[FEHNX]DR\b|omni-?path"),
    ("ethernet", r"roce|ethernet|GbE"),
)


@dataclass(frozen=True, slots=True)
class Inside:
    """The link of a device to the others of its node."""

    bandwidth: float
    wire: str
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Across:
    """The links of a node to other nodes."""

    bandwidth: float
    wire: str
    ports: int = 0
    """0 where that is not said."""


def stated(text: str) -> bool:
    """Whether a link is stated at all."""
    return not _UNSTATED.match(text.partition("(")[0] if "not stated" not in text.lower() else "")


def inside_link(text: str, devices: int) -> Inside:
    """A link inside a node of so many devices. What makers print counts both directions, unless it says one."""
    found = _RATE.search(text)
    rate = float(found[1]) * 1e9 / (1 if found[2] else 2) if found else None
    if version := re.search(r"nvlink\s*(\d)?", text, re.IGNORECASE):
        generation = int(version[1] or 0)
        if rate is None and generation not in NVLINK:
            raise ValueError(f"{text!r} gives neither a rate nor a known generation of NVLink")
        # up to four devices are joined directly; eight were, too, before there were switches
        switch = "nvswitch" in text.lower() or (generation >= SWITCHED_FROM and devices > 4)
        wire = "nvswitch" if switch else "nvlink"
        return Inside(rate or NVLINK[generation], wire, switch and generation >= REDUCES_FROM)
    if version := re.search(r"pcie\s*(?:gen)?\s*(\d)", text, re.IGNORECASE):
        return Inside(rate or PCIE.get(int(version[1]), PCIE[3]), "pcie")
    if rate is not None and re.search(r"xgmi|infinity fabric", text, re.IGNORECASE):
        return Inside(rate, "xgmi")
    raise ValueError(f"{text!r} is no link of a node that is known: NVLink, PCIe or xGMI with its rate")


def across_link(text: str) -> Across:
    """The links between nodes: ports and their rate, and what they are."""
    wire = next((name for name, pattern in _NETWORKS if re.search(pattern, text, re.IGNORECASE)), None)
    found = _PORTS.search(text)
    if wire is None or found is None:
        raise ValueError(f"{text!r} is no network that is known: such as 8x 200 Gb/s InfiniBand, EFA, RoCE, TCP")
    ports = int(found[1] or 0)
    return Across(max(1, ports) * float(found[2]) * 1e9 / 8, wire, ports)
