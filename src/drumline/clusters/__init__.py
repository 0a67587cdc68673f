"""What the machines are: devices, links and what was measured of them."""

from .catalogue import catalogue, load
from .cloud import Cloud
from .curves import Curve, Table
from .fewer import Fewer
from .spec import Cluster, Device, Host, Link, Network, Node

__all__ = [
    "Cloud",
    "Cluster",
    "Curve",
    "Device",
    "Fewer",
    "Host",
    "Link",
    "Network",
    "Node",
    "Table",
    "catalogue",
    "load",
]
