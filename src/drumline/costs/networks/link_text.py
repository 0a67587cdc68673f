"""Parse how people describe links: `NVLink3+NVSwitch 600 GB/s bidir`, `8x 200 Gb/s HDR IB per node`."""

from __future__ import annotations

import re
from dataclasses import dataclass

NVLINK = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9}
"""Bytes per second of one device in one direction, by NVLink generation: data sheets."""
PCIE = {3: 16e9, 4: 32e9, 5: 64e9, 6: 128e9}
"""The same for 16 PCIe lanes."""
SWITCHED_FROM = 3
"""First NVLink generation whose eight-device nodes have switches."""
IN_SWITCH_REDUCTION_FROM = 4
"""First NVLink generation whose switches reduce in the network: data sheets."""
EFA_V1_BANDWIDTH = 50e9
"""Most bytes per second of a node on the first generation of EFA; faster nodes have the second: data sheets."""

_UNSTATED = re.compile(r"\s*(?:not stated.*|unknown|n/?a|-|\?)?\s*\Z", re.IGNORECASE)
_RATE = re.compile(r"([\d.]+)\s*GB/s\s*(one[- ]way|uni\w*|per direction)?", re.IGNORECASE)
_PORTS = re.compile(r"(?:(\d+)\s*x\s*)?([\d.]+)\s*(?:Gb/s|Gbps|Gbit/s|GbE|G\b)")
_NETWORKS = (
    ("tcp", r"\bTCP\b"),
    ("efa", r"\bEFA(?:\b|v\d)"),
    ("slingshot", r"slingshot"),
    ("infiniband", r"\bIB\b|infiniband|\b[FEHNX]DR\b|omni-?path"),
    ("ethernet", r"roce|ethernet|GbE"),
)


@dataclass(frozen=True, slots=True)
class NodeLink:
    """Link between one device and the others of its node."""

    bandwidth: float
    link_type: str
    in_switch_reduction: bool = False


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """Links between one node and the others."""

    bandwidth: float
    link_type: str
    ports: int = 0
    """0 where the text does not say."""


def is_stated(text: str) -> bool:
    """Whether the text states a link at all."""
    return not _UNSTATED.match(text.partition("(")[0] if "not stated" not in text.lower() else "")


def parse_node_link(text: str, devices: int) -> NodeLink:
    """Link inside a node of `devices`. Vendors print both directions added up, unless the text says one way."""
    match = _RATE.search(text)
    rate = float(match[1]) * 1e9 / (1 if match[2] else 2) if match else None
    if version := re.search(r"nvlink\s*(\d)?", text, re.IGNORECASE):
        generation = int(version[1] or 0)
        if rate is None and generation not in NVLINK:
            raise ValueError(f"{text!r} gives neither a rate nor a known NVLink generation")
        # up to four devices are connected directly; before there were switches, eight were as well
        switch = "nvswitch" in text.lower() or (generation >= SWITCHED_FROM and devices > 4)
        link_type = "nvswitch" if switch else "nvlink"
        return NodeLink(rate or NVLINK[generation], link_type, switch and generation >= IN_SWITCH_REDUCTION_FROM)
    if version := re.search(r"pcie\s*(?:gen)?\s*(\d)", text, re.IGNORECASE):
        return NodeLink(rate or PCIE.get(int(version[1]), PCIE[3]), "pcie")
    if rate is not None and re.search(r"xgmi|infinity fabric", text, re.IGNORECASE):
        return NodeLink(rate, "xgmi")
    raise ValueError(f"{text!r} is not a known link inside a node: NVLink, PCIe, or xGMI with its rate")


def parse_network_link(text: str) -> NetworkLink:
    """Links between nodes: ports, their rate, and the type of network."""
    link_type = next((name for name, pattern in _NETWORKS if re.search(pattern, text, re.IGNORECASE)), None)
    match = _PORTS.search(text)
    if link_type is None or match is None:
        raise ValueError(f"{text!r} is not a known network, such as 8x 200 Gb/s InfiniBand, EFA, RoCE, TCP")
    ports = int(match[1] or 0)
    bandwidth = max(1, ports) * float(match[2]) * 1e9 / 8
    if link_type == "efa" and (bandwidth > EFA_V1_BANDWIDTH or re.search(r"efa\s*v2", text, re.IGNORECASE)):
        link_type = "efav2"
    return NetworkLink(bandwidth, link_type, ports)
