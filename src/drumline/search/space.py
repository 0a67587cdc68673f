"""The candidates, as small generators that read like their constraints. Only what the engine runs is offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..model.profile import Profile
from ..plan.combinations import HELD, refusal
from ..plan.plan import Plan


def candidates(profile: Profile, devices: int, base: Plan) -> Iterator[Plan]:
    """Every plan for up to `devices` ranks; choices not searched over are those of `base`."""
    for dp in replicas(profile, devices):
        for zero in HELD["zero"]:
            if zero and dp == 1:
                continue  # nothing to shard over
            for micro in micro_batches(profile, dp):
                for recompute in recomputations(profile):
                    plan = replace(base, dp=dp, zero=int(str(zero)), micro=micro, recompute=recompute)
                    if not refusal(plan):
                        yield plan


def replicas(profile: Profile, devices: int) -> Iterator[int]:
    """Up to 16 devices every number, above only those that divide the devices; never more than samples."""
    for dp in range(1, devices + 1):
        if dp <= profile.batch_size and (devices <= 16 or devices % dp == 0):
            yield dp


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
