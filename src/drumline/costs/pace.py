"""A cluster whose hosts are faster or slower now than when they were measured: what they start takes as much longer."""

from __future__ import annotations

from dataclasses import replace

from ..clusters import Cluster
from ..models import Profile
from ..plans import Plan
from .step import estimate

LOOK = "look"
"""The key of `Device.start` that is no price: the seconds of the step by which the pace is told."""


def at_pace(cluster: Cluster, pace: float) -> Cluster:
    """The hosts of its GPUs take `pace` times as long as measured."""
    device = cluster.device
    start = {key: seconds if key == LOOK else pace * seconds for key, seconds in device.host_overhead.items()}
    return replace(cluster, device=replace(device, host_overhead=start, launch=pace * device.launch))


def speed_at(pace: float, profile: Profile, plan: Plan, cluster: Cluster) -> float:
    """The speed of a step at that pace, over the one at the measured pace; 1 for a step that its GPU bounds."""
    usual, now = (estimate(profile, plan, c).step_seconds for c in (cluster, at_pace(cluster, pace)))
    return usual / now
