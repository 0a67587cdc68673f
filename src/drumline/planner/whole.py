"""The whole space of a transformer on a cluster, as columns for the closed form: every plan that the engine runs, but
for what saves memory and only ever costs time (offloading, chunks).

Small generators that read like their constraints, as in space.py and splitting.py, with fewer of them: a plan costs a
few microseconds here, so that stages, replicas and micro-batches need not be powers of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from ..clusters import Cluster
from ..costs.fitted import FittedSteps
from ..costs.fitted.inputs import SCHEDULES, Array
from ..costs.fitted.plans import RECOMPUTE, Rows
from ..costs.tensor import tokens_of
from ..models.profile import Profile
from ..plans import Plan
from .shortlist import Space
from .space import replicas, shardings
from .splitting import LONG, can_be_cut, parts, powers

BLOCK = 16_384
"""Rows that are priced together: few enough for the caches, and for somebody who does not want to wait."""
Row = tuple[int, ...]
"""dp, shard, zero, tp, cp, pp, virtual, order, micro, recompute: the columns of `Rows` but the last."""
_NONE, _SELECTIVE, _FULL = range(len(RECOMPUTE))
_GPIPE, _1F1B, _TURNS, _SPLIT = (SCHEDULES.index(x) for x in ("gpipe", "1f1b", "interleaved", "zero-bubble"))


def scored_space(profile: Profile, cluster: Cluster, base: Plan, steps: FittedSteps) -> Space:
    """All plans with their time, and their memory quickly counted."""
    rows = every_plan(profile, cluster, base, steps)
    limit = max(0.0, cluster.device.memory - cluster.device.context)
    seconds: list[Array] = []
    sizes: list[Array] = []
    try:
        for some in np.array_split(np.arange(len(rows.dp)), -(-len(rows.dp) // BLOCK)):
            part = rows.take(some)
            priced = steps.times(part).total, steps.quick_bytes(part)
            seconds.append(priced[0])
            sizes.append(priced[1])
    except KeyboardInterrupt:
        if not seconds:
            raise
    count = sum(map(len, seconds))
    done = rows.take(np.arange(count))
    return Space(done, np.concatenate(seconds), np.concatenate(sizes), limit, interrupted=count < len(rows.dp))


def every_plan(profile: Profile, cluster: Cluster, base: Plan, steps: FittedSteps) -> Rows:
    """All of them, side by side."""
    found = [*_replicated(profile, cluster), *_split(profile, cluster, base, steps)]
    columns = dict(zip([f.name for f in fields(Rows)][:-1], zip(*found, strict=True), strict=True))
    return Rows.of(**columns, compile=0)


def _replicated(profile: Profile, cluster: Cluster) -> Iterator[Row]:
    """Whole models, sharded or not."""
    for dp in replicas(profile, cluster.devices):
        for zero, shard in shardings(dp, cluster):
            for micro in counts(profile.batch_size // dp):
                for recompute in (_NONE, _SELECTIVE, _FULL):
                    yield dp, shard or dp, zero, 1, 1, 1, 1, 0, micro, recompute


def _split(profile: Profile, cluster: Cluster, base: Plan, steps: FittedSteps) -> Iterator[Row]:
    """Models whose ranks share layers, tokens or both, in stages or not; those that share a layer share a node."""
    devices, node = cluster.devices, min(cluster.devices, cluster.node.devices)
    for tp in parts(node):
        for cp in powers(min(node // tp, tokens_of(profile) // LONG)):
            inner = tp * cp
            if (devices > node and node % inner) or not can_be_cut(replace(base, tp=tp, cp=cp), steps):
                continue
            for pp in range(1, min(devices // inner, int(steps.model.layers[0])) + 1):
                if inner * pp > 1:
                    for dp in _fills(devices // (inner * pp), profile.batch_size):
                        yield from _runs(profile, (tp, cp, pp), dp, int(steps.model.layers[0]))


def _fills(most: int, batch: int) -> set[int]:
    """Replicas that use the devices: as many as there is room for, or the next fewer that divide the batch evenly."""
    most = min(most, batch)
    return {most, next(n for n in range(most, 0, -1) if batch % n == 0)}


def _runs(profile: Profile, axes: Row, dp: int, layers: int) -> Iterator[Row]:
    """What replicas share, in which order stages run, in how many micro-batches, and what is computed again."""
    tp, cp, pp = axes
    most = profile.batch_size // dp
    for zero in (0,) if dp == 1 else (0, 1) if pp > 1 else (0, 1, 2):
        for micro in counts(most) if pp == 1 else sorted({*counts(most), *(pp * k for k in counts(most // pp))}):
            for order, virtual in _orders(pp, micro, layers):
                for recompute in (_NONE,) if order == _SPLIT else (_NONE, _FULL):
                    yield dp, dp, zero, tp, cp, pp, virtual, order, micro, recompute


def _orders(pp: int, micro: int, layers: int) -> Iterator[tuple[int, int]]:
    """(order, parts of a rank). Parts take turns in rounds of as many micro-batches as there are ranks."""
    if pp == 1:
        yield 0, 1
        return
    yield from ((_1F1B, 1), (_GPIPE, 1), (_SPLIT, 1))
    if micro % pp == 0:
        yield from ((_TURNS, v) for v in range(2, layers // pp + 1) if layers % (pp * v) == 0)


def counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: powers of two, and three times them."""
    return sorted(k << i for k in (1, 3) for i in range(most.bit_length()) if k << i <= most)
