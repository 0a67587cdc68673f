"""Replays replicas that update on their own and average with others: `local:k`, by hosts and over all, and `gossip`.

A replica waits where it averages: for all replicas of its group, or for its neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ..clusters import StepTimeDistribution
from ..costs.worker_times import WorkerTimes
from ..plans import Plan
from .server_replay import draw_compute
from .worker_replay import ReplayLog

Group = tuple[int, ...]


def replay_peers(
    plan: Plan, times: WorkerTimes, spread: StepTimeDistribution, per_host: int, *, steps: int
) -> ReplayLog:
    """Steps of all replicas, one after the other; an update is complete when the last replica has made it."""
    log, clock = ReplayLog(plan.dp), [0.0] * plan.dp
    draws = [spread.draws(w, plan.dp) for w in range(plan.dp)]
    chance = random.Random(f"{spread.seed}/partners")
    for step in range(steps):
        for w, factors in enumerate(draws):
            factor = next(factors)
            end = draw_compute(log, w, clock[w], times.compute, factor, f"step {step}")
            clock[w] = end + factor * times.compute.update
            log.add(w, "compute", f"optimizer step {step}", end, clock[w])
        ready = list(clock)
        for groups, seconds in _averages(plan, times, step, per_host, chance):
            for w, met in groups:
                start = max(ready[other] for other in met)
                clock[w] = start + seconds
                log.add(w, "communication", f"average step {step}", start, clock[w], times.averaging.bytes)
        log.updates.append(max(clock))
    return log


def _averages(
    plan: Plan, times: WorkerTimes, step: int, per_host: int, chance: random.Random
) -> Iterator[tuple[list[tuple[int, Group]], float]]:
    """(each replica with those that it meets, seconds) of the average after a step; nothing where there is none."""
    everyone, count = tuple(range(plan.dp)), step + 1
    if plan.dp == 1:
        return
    if plan.sync_mode == "gossip":
        yield neighbours(plan, chance), times.averaging.inside
    elif plan.across and count % plan.across == 0:
        yield [(w, everyone) for w in everyone], times.averaging.across
    elif count % plan.sync_steps == 0:
        hosts = [everyone[i : i + per_host] for i in range(0, plan.dp, per_host)] if plan.across else [everyone]
        yield [(w, host) for host in hosts for w in host], times.averaging.inside


def neighbours(plan: Plan, chance: random.Random) -> list[tuple[int, Group]]:
    """Each replica with those that it averages with: both neighbours on the ring, or one random partner."""
    p = plan.dp
    if plan.sync != "gossip:random":
        return [(w, ((w - 1) % p, w, (w + 1) % p)) for w in range(p)]
    order = list(range(p))
    chance.shuffle(order)
    pairs: Sequence[Group] = [(a, b) for a, b in zip(order[::2], order[1::2], strict=False)]
    return [(w, pair) for pair in pairs for w in pair]
