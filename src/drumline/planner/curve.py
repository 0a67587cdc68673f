"""The scaling curve: the best plan for every number of devices, and what each device then still does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..core.errors import ClusterError, DoesNotFit
from ..models.profile import Profile
from .search import search


@dataclass(frozen=True, slots=True)
class Point:
    """The best plan for so many devices."""

    devices: int
    plan: str
    """Empty where nothing fits."""
    batch_size: int
    step_seconds: float
    samples_per_second: float
    efficiency: float
    """Samples a second and device, over those of the fewest devices that hold the model."""
    lacks: str = ""
    """What is missing where nothing fits."""


def counts(cluster: Cluster) -> list[int]:
    """Doublings up to all devices, whole nodes beyond the first; and all of them."""
    node, most = cluster.node.devices, cluster.devices
    inside = list(_doublings(min(node, most)))
    across = [node * k for k in _doublings(most // node)] if most > node else []
    return sorted({*inside, *across, most})


def _doublings(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def scaling(
    profile: Profile,
    fleet: Cluster,
    *,
    devices: list[int] | None = None,
    precision: str | None = None,
    grow: bool = False,
) -> list[Point]:
    """The curve at a fixed batch (strong scaling), or with a batch that grows with the devices (`grow`, weak)."""
    points: list[Point] = []
    base: Point | None = None
    numbers = devices or counts(fleet)
    for n in numbers:
        batch = max(1, profile.batch_size * n // numbers[-1]) if grow else profile.batch_size
        sized = replace(profile, batch_size=batch)
        try:
            machines = fleet.with_devices(n)
            answer, _ = search(sized, machines, precision=precision, fleet=fleet, brief=True)
        except DoesNotFit as e:
            points.append(Point(n, "", batch, 0.0, 0.0, 0.0, e.rule))
            continue
        except ClusterError:
            continue  # no such number of whole nodes
        best = answer.candidates[0]
        rate = batch / best.step_seconds
        point = Point(n, best.plan, batch, best.step_seconds, rate, 1.0)
        base = base or point
        each = base.samples_per_second / base.devices
        points.append(replace(point, efficiency=rate / n / each))
    return points
