"""Description of the machines: devices, links and measured tables."""

from .catalogue import catalogue, load
from .measured import CollectiveTable, KernelCurve, PartialOccupancy, ShapeTimes
from .spec import Cluster, DeviceSpec, HostMemory, Link, Network, Node

__all__ = [
    "Cluster",
    "CollectiveTable",
    "DeviceSpec",
    "HostMemory",
    "KernelCurve",
    "Link",
    "Network",
    "Node",
    "PartialOccupancy",
    "ShapeTimes",
    "catalogue",
    "load",
]
