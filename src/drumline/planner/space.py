"""The candidates, as small generators that read like their constraints. Only what the engine runs is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..clusters import Cluster
from ..costs import Steps
from ..models.profile import Profile
from ..plans.combinations import HELD, refusal
from ..plans.plan import Plan
from .splitting import splits

Fits = Callable[[Plan], bool]
"""Whether a plan fits device and host."""

MOST_CHUNKS = 64
"""The largest layers are cut into 2, 4, ... so many parts."""


def candidates(
    profile: Profile, cluster: Cluster, base: Plan, fits: Fits | None = None, *, sparing: bool = False
) -> Iterator[Plan]:
    """Every plan for up to all devices; choices not searched over are those of `base`.

    What only ever costs time (offloading, chunks) is offered where it makes a plan fit that does not fit without it,
    and nowhere else. The fastest plan that fits is not lost by that. Where memory is what is sought (`sparing`), it is
    offered with every plan. Plans that split the model (splitting.py) use as many devices as they can.
    """
    fits = fits or Steps(profile, cluster, base.precision).fits
    for dp in replicas(profile, cluster.devices):
        for zero, shard in shardings(dp, cluster):
            for micro in micro_batches(profile, dp):
                for recompute in recomputations(profile):
                    plan = replace(base, dp=dp, zero=zero, shard=shard, micro=micro, recompute=recompute)
                    if not refusal(plan):
                        yield plan
                        if sparing:
                            yield from spared(plan, cluster)
                        elif not fits(plan):
                            yield from smaller(plan, cluster, fits)
    yield from splits(profile, cluster, base, fits, sparing=sparing)


def replicas(profile: Profile, devices: int) -> Iterator[int]:
    """Up to 16 devices every number, above only those that divide the devices; never more than samples.

    Most of them first: a search that is stopped early has then seen the plans that use the machine.
    """
    for dp in range(devices, 0, -1):
        if dp <= profile.batch_size and (devices <= 16 or devices % dp == 0):
            yield dp


def shardings(dp: int, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(zero, shard): one copy over all replicas, or over each node or power of two of neighbours. shard=0 means all."""
    yield 0, 0
    if dp == 1:
        return  # nothing to shard over
    for zero in (1, 2, 3):
        yield zero, 0
        for shard in range(2, dp):
            if dp % shard == 0 and (shard & (shard - 1) == 0 or shard == cluster.node.devices):
                yield zero, shard


def micro_batches(profile: Profile, dp: int) -> Iterator[int]:
    """Powers of two, as long as every rank has a sample in every micro-batch."""
    micro = 1
    while micro * dp <= profile.batch_size:
        yield micro
        micro *= 2


def recomputations(profile: Profile) -> Iterator[str]:
    """Recomputation only where there are blocks to recompute."""
    for word in HELD["recompute"]:
        if word == "none" or any(x.composite for x in profile.layers):
            yield str(word)


def smaller(plan: Plan, cluster: Cluster, fits: Fits) -> Iterator[Plan]:
    """A plan that does not fit, made to fit: its largest layers in parts, its states in host memory, or both."""
    yield from chunks(plan, fits)
    for moved in offloads(plan, cluster):
        if refusal(moved):
            continue
        if fits(moved):
            yield moved
        else:
            yield from chunks(moved, fits)


def spared(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """A plan with everything that saves memory, needed or not."""
    for moved in (plan, *offloads(plan, cluster)):
        for chunk in (1, MOST_CHUNKS):
            found = replace(moved, chunk=chunk)
            if found != plan and (chunk == 1 or moved.zero == 3) and not refusal(found):
                yield found


def offloads(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """From a GPU whose host is known: optimizer state, or, where parameters are sharded, everything.

    One rank has nothing to shard, but with zero=3 it has one layer at a time on the device.
    """
    if cluster.device.kind == "cuda" and cluster.device.host is not None:
        yield replace(plan, offload="optimizer")
        if plan.zero == 3 or plan.dp == 1:
            yield replace(plan, zero=3, offload="all")


def chunks(plan: Plan, fits: Fits) -> Iterator[Plan]:
    """The fewest parts of the largest layers that fit, where layers are gathered and whole ones do not."""
    finest = replace(plan, chunk=MOST_CHUNKS)
    if plan.zero < 3 or refusal(finest) or not fits(finest):
        return  # what does not fit in the smallest parts fits in no larger ones
    n = 2
    while not fits(replace(plan, chunk=n)):
        n *= 2
    yield replace(plan, chunk=n)
