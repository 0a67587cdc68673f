"""The scaling curve: the best plan for every number of devices, and its efficiency."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..core.errors import ClusterError, DoesNotFit
from ..models.profile import Profile
from .reserve import Reserve
from .search import search
from .space import powers


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The best plan for a number of devices."""

    devices: int
    plan: str
    """Empty where nothing fits."""
    batch_size: int
    step_seconds: float
    samples_per_second: float
    efficiency: float
    """Samples per second and device, relative to the fewest devices on which the model fits."""
    lacks: str = ""
    """The broken rule, where nothing fits."""


def device_counts(cluster: Cluster) -> list[int]:
    """Doublings up to all devices, in whole nodes beyond the first, and all devices."""
    node, most = cluster.node.devices, cluster.devices
    nodes = [node * k for k in powers(most // node)] if most > node else []
    return sorted({*powers(min(node, most)), *nodes, most})


def scaling_curve(
    profile: Profile,
    fleet: Cluster,
    *,
    devices: list[int] | None = None,
    precision: str | None = None,
    grow: bool = False,
    reserve: Reserve = None,
) -> list[ScalingPoint]:
    """The curve at a fixed batch size (strong scaling), or with a batch that grows with the devices (`grow`, weak)."""
    points: list[ScalingPoint] = []
    base: ScalingPoint | None = None
    numbers = devices or device_counts(fleet)
    for n in numbers:
        batch = max(1, profile.batch_size * n // numbers[-1]) if grow else profile.batch_size
        sized = replace(profile, batch_size=batch)
        try:
            machines = fleet.with_devices(n)
            answer, _ = search(sized, machines, precision=precision, fleet=fleet, brief=True, reserve=reserve)
        except DoesNotFit as e:
            points.append(ScalingPoint(n, "", batch, 0.0, 0.0, 0.0, e.rule))
            continue
        except ClusterError:
            continue  # not a whole number of nodes
        best = answer.candidates[0]
        rate = batch / best.step_seconds
        point = ScalingPoint(n, str(best.plan), batch, best.step_seconds, rate, 1.0)
        base = base or point
        each = base.samples_per_second / base.devices
        points.append(replace(point, efficiency=rate / n / each))
    return points
