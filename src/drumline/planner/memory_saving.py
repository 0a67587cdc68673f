"""Options that save memory and only cost time: offload to host memory, and chunks of the largest layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..clusters import Cluster
from ..plans import Plan
from ..plans.combinations import refusal

Fits = Callable[[Plan], bool]
"""Whether a plan fits the device and its host."""

MAX_CHUNKS = 64
"""The largest layers are divided into 2, 4, ... up to this many chunks."""


def fewest_savings(plan: Plan, cluster: Cluster, fits: Fits) -> Iterator[Plan]:
    """Variants of a plan that does not fit which do: with chunks, with offload, or with both."""
    yield from chunks(plan, fits)
    for offloaded in offloads(plan, cluster):
        if refusal(offloaded):
            continue
        if fits(offloaded):
            yield offloaded
        else:
            yield from chunks(offloaded, fits)


def most_savings(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Variants of a plan with everything that saves memory, needed or not."""
    for offloaded in (plan, *offloads(plan, cluster)):
        for chunk in (1, MAX_CHUNKS):
            variant = replace(offloaded, chunk=chunk)
            if variant != plan and (chunk == 1 or offloaded.zero == 3) and not refusal(variant):
                yield variant


def offloads(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Offload from a GPU whose host is described: optimizer state or, where parameters are sharded, everything.

    A single replica has nothing to shard, but with zero=3 it keeps one layer at a time on the device.
    """
    if cluster.device.kind == "cuda" and cluster.device.host is not None:
        yield replace(plan, offload="optimizer")
        if plan.zero == 3 or plan.dp == 1:
            yield replace(plan, zero=3, offload="all")


def chunks(plan: Plan, fits: Fits) -> Iterator[Plan]:
    """The plan with the fewest chunks that fit, where layers are gathered (zero=3) and whole ones do not fit."""
    finest = replace(plan, chunk=MAX_CHUNKS)
    if plan.zero < 3 or refusal(finest) or not fits(finest):
        return  # what does not fit in the smallest chunks fits in no larger ones
    n = 2
    while not fits(replace(plan, chunk=n)):
        n *= 2
    yield replace(plan, chunk=n)
