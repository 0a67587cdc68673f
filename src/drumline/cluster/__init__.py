"""What the machines are: devices, links and what was measured of them."""

from .catalogue import catalogue, load
from .spec import Cluster, Curve, Device, Host, Link, Network, Node, Table

__all__ = ["Cluster", "Curve", "Device", "Host", "Link", "Network", "Node", "Table", "catalogue", "load"]
