"""Description of the machines: devices, links and measured tables."""

from .catalogue import catalogue, load
from .links import Link, LogPTimes
from .measured import CollectiveTable, KernelCurve, PartialOccupancy, ShapeTimes
from .spec import Cluster, DeviceSpec, HostMemory, Network, Node
from .step_times import SlowRank, StepTimeDistribution

__all__ = [
    "Cluster",
    "CollectiveTable",
    "DeviceSpec",
    "HostMemory",
    "KernelCurve",
    "Link",
    "LogPTimes",
    "Network",
    "Node",
    "PartialOccupancy",
    "ShapeTimes",
    "SlowRank",
    "StepTimeDistribution",
    "catalogue",
    "load",
]
