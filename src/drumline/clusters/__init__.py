"""Description of the machines: devices, links and measured tables."""

from .catalogue import catalogue, load
from .measured import CollectiveTable, PartialOccupancy, RateCurve, ShapeTimes
from .spec import Cluster, DeviceSpec, HostMemory, Link, Network, Node

__all__ = [
    "Cluster",
    "CollectiveTable",
    "DeviceSpec",
    "HostMemory",
    "Link",
    "Network",
    "Node",
    "PartialOccupancy",
    "RateCurve",
    "ShapeTimes",
    "catalogue",
    "load",
]
