"""What the machines are: devices, links and what was measured of them."""

from .catalogue import catalogue, load
from .cloud import ShapeTimes
from .fewer import PartialOccupancy
from .measured import CollectiveTable, RateCurve
from .spec import Cluster, DeviceSpec, HostMemory, Link, Network, Node

__all__ = [
    "ShapeTimes",
    "Cluster",
    "RateCurve",
    "DeviceSpec",
    "PartialOccupancy",
    "HostMemory",
    "Link",
    "Network",
    "Node",
    "CollectiveTable",
    "catalogue",
    "load",
]
