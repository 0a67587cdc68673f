"""The closed form of a step over arrays: computation, messages that are waited for, bubbles, the update."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .compute import Pieces, pieces
from .constants import Constants
from .inputs import SCHEDULES, Array, Layouts, Machines, Models
from .stages import Stages, stages
from .traffic import Traffic, traffic

UPDATE_BYTES = 44.0
"""Bytes per parameter of an update: gradient, two moments and master read and written, norm, 16-bit copy."""
_BUBBLE = np.array([0.0, 1.0, 1.0, 1.0, 1.0 / 3.0, 0.0])
"""The share of the pipeline's fill and drain that each order leaves idle, by SCHEDULES."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step by part, one entry per candidate."""

    forward: Array
    backward: Array
    recompute: Array
    tp: Array
    cp: Array
    ep: Array
    pp: Array
    dp: Array
    bubble: Array
    optimizer: Array
    overhead: Array
    hidden: Array
    """Messages that travel beside computation: no part of the step."""

    @property
    def total(self) -> Array:
        """All of it."""
        return np.asarray(sum(getattr(self, name) for name in PARTS), dtype=np.float64)


PARTS = tuple(f.name for f in fields(StepTimes) if f.name != "hidden")
"""The parts that add up to a step."""


def step_times(models: Models, layouts: Layouts, machines: Machines, c: Constants) -> StepTimes:
    """Seconds of one step of every candidate, by part."""
    assert len(SCHEDULES) == len(_BUBBLE)
    held = stages(models, layouts)
    p = pieces(models, layouts, machines, c)
    t = traffic(models, layouts, machines, c, held)
    exposed = np.where(layouts.overlap_tp > 0, c.exposed_tp, 1.0)
    tp = exposed * t.tp_forward * (2.0 + layouts.again_products)
    cp, ep = c.exposed_cp * t.cp, t.ep * (1.0 + 0.5 * layouts.again_products)
    handed = np.where(layouts.copied > 0, c.hooks, 0.0)
    layer = p.forward + p.backward + p.again + handed + tp + cp + ep
    ends = p.logits_forward + p.logits_backward
    add = _accumulate(layouts, machines, c, held)
    first = held.first * layer + p.embedding
    inner = held.inner * layer
    last = held.last * layer + ends
    slowest = np.where(layouts.pp > 1, np.maximum(np.maximum(first, inner), last), first + ends)
    others = np.maximum(0.0, layouts.pp - 2.0) * inner + np.where(layouts.pp > 1, first + last, slowest) - slowest
    # what the slowest stage computes, part by part; the rest of its time it waits
    count = np.where((layouts.pp > 1) & (slowest == inner), held.inner, held.first)
    head = np.where((layouts.pp == 1) | (slowest == last), 1.0, 0.0)
    m = layouts.micro
    forward = m * (count * p.forward + head * p.logits_forward + np.where(layouts.pp == 1, p.embedding, 0.0))
    backward = m * (count * (p.backward + handed) + head * p.logits_backward + add)
    again = m * count * p.again
    pipe = m * t.pipe * np.where(layouts.overlap_tp * (layouts.virtual > 1) > 0, c.exposed_pp, 1.0)
    filled = others + np.maximum(0.0, layouts.pp - 1.0) * t.pipe
    bubble = _BUBBLE[layouts.order.astype(int)] * filled / layouts.virtual
    whole = m * (slowest + add)
    optimizer = _update(layouts, machines, c, held)
    sent, dp = _replicas(layouts, t, c, whole, p, held)
    slower = c.straggle * np.log2(np.maximum(1.0, layouts.ranks / machines.node))
    step = forward + backward + again + m * count * (tp + cp + ep) + pipe + bubble + optimizer + dp
    return StepTimes(
        forward=forward,
        backward=backward,
        recompute=again,
        tp=m * count * tp,
        cp=m * count * cp,
        ep=m * count * ep,
        pp=pipe,
        dp=dp,
        bubble=bubble,
        optimizer=optimizer,
        overhead=c.step + slower * step,
        hidden=sent - dp + m * (count * (tp / exposed - tp + t.cp - cp) + t.pipe) - pipe,
    )


def _accumulate(layouts: Layouts, machines: Machines, c: Constants, held: Stages) -> Array:
    """Seconds in which one micro-batch's gradients are added to those of the others, where no product does that."""
    times = np.where(layouts.copied > 0, 4.0, 2.0)  # read and written: by the sum, and by the copy
    moved = (2.0 + times * layouts.gradient) * held.weights_per_rank
    alone = (layouts.micro <= 1) | (layouts.zero >= 3) | (layouts.added > 0)
    return np.where(alone, 0.0, c.add * moved / (machines.bandwidth * c.stream))


def _update(layouts: Layouts, machines: Machines, c: Constants, held: Stages) -> Array:
    """Seconds of the optimizer on what a rank updates."""
    shared = layouts.shard * layouts.cp
    own = held.weights_per_rank / np.where(layouts.zero >= 1, shared, 1.0)
    return c.update * UPDATE_BYTES * own / (machines.bandwidth * c.stream)


def _replicas(layouts: Layouts, t: Traffic, c: Constants, whole: Array, p: Pieces, held: Stages) -> tuple[Array, Array]:
    """(what replicas send each other of parameters and gradients, what the step waits for of it).

    zero=3 gathers twice and scatters once a micro-batch; others send once a step, or gradients in every micro-batch,
    beside the backward or after it.
    """
    m = layouts.micro
    sharded, often = layouts.zero >= 3, (layouts.zero >= 3) | (layouts.often > 0)
    late = np.where(sharded | (layouts.ahead > 0), 0.0, t.spread)
    sent = np.where(sharded, m * (2.0 * t.gather + t.scatter), np.where(often, m, 1.0) * t.scatter + t.spread - late)
    # interleaved parts finish one after the other while the last round of micro-batches runs
    rounds = np.where(layouts.virtual > 1, np.minimum(m, layouts.pp), 1.0)
    room = np.where(often, whole, rounds * held.first * (p.backward + p.again))
    over = np.maximum(0.0, sent - room)
    beside = over + c.exposed_dp * (sent - over)
    return sent + late, np.where(layouts.overlap_dp > 0, beside, sent) + late
