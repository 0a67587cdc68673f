"""Peak memory of the fullest rank over arrays: states, activations in flight, logits, buffers, the framework's own."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .compute import HALF, tokens
from .constants import Constants
from .inputs import SCHEDULES, Array, Layouts, Models
from .stages import stages

SINGLE = 4.0
BUCKET = 5e8
"""Numbers in each of the two flat buffers that gradients are copied to."""
_GPIPE, _INTERLEAVED, _DOUBLE = (SCHEDULES.index(x) for x in ("gpipe", "interleaved", "zero-bubble-2p"))
TENSORS, ALLOCATED, RESERVED, DEVICE = range(4)
"""What is counted: tensors by formula, tensors alive, what the allocator has taken, or all of the device."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on the fullest rank by part, one entry per candidate."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    logits: Array
    working: Array
    """The gradient of the largest weight while it is made: in 16 bits, and widened."""
    communication: Array
    fragments: Array
    """What the allocator holds beyond what is alive."""
    context: Array
    """The framework and its communicators, outside of the allocator."""

    @property
    def total(self) -> Array:
        """All of it."""
        return np.asarray(sum(getattr(self, f.name) for f in fields(self)), dtype=np.float64)


def step_memory(
    models: Models,
    layouts: Layouts,
    c: Constants,
    *,
    counted: Array | float = ALLOCATED,
    context: Array | float = 0.0,
    first: Array | float = 0.0,
) -> StepMemory:
    """Bytes of the fullest stage, or of the first where `first` is 1, as far as they are `counted`.

    `context` is what the framework takes by itself."""
    counted, context, first = (
        np.broadcast_to(np.asarray(x, dtype=np.float64), layouts.tp.shape) for x in (counted, context, first)
    )
    held = stages(models, layouts)
    alone = layouts.pp == 1
    whole, left = kept_per_token(models, layouts)
    again = np.where(left < whole, whole, 0.0)
    entry = HALF * models.hidden / np.where(layouts.sequence_split > 0, layouts.tp, 1.0)
    t = tokens(models, layouts)
    formula = counted == TENSORS

    def stage(layers: Array, weights: Array, flight: Array, logits: Array) -> list[Array]:
        border = np.where(alone | formula, 0.0, entry)
        kept = t * (flight * (layers * left + border) + np.where(formula, 0.0, again))
        return [*_states(layouts, weights), kept, logits]

    tail = np.where(formula, 0.0, c.logit * t * models.predicted * models.vocabulary / layouts.tp)
    none = np.zeros_like(tail)
    last = np.where(layouts.order == _DOUBLE, in_flight(layouts, 0), 1.0)
    choices = [
        stage(held.first, held.first_weights, in_flight(layouts, 0), np.where(alone, tail, none)),
        stage(held.inner, held.inner_weights, in_flight(layouts, 1), none),
        stage(held.last, held.last_weights, last, tail),
    ]
    totals = np.stack([sum(parts[1:], parts[0]) for parts in choices])
    totals[1, layouts.pp <= 2] = 0.0
    totals[2, alone] = 0.0
    totals[1:, first > 0] = 0.0
    worst = totals.argmax(axis=0)
    parameters, gradients, optimizer, kept, logits = (
        np.choose(worst, [choice[i] for choice in choices]) for i in range(5)
    )
    working = np.where(formula, 0.0, _working(models, layouts))
    buffers = np.where(formula, 0.0, _buffers(models, layouts))
    taken = counted >= RESERVED
    spare = np.where(layouts.fusion == 1, c.spare_eager, c.spare)
    groups = sum((np.where(g > 1, 1.0, 0.0) for g in (layouts.tp, layouts.pp, layouts.dp * layouts.cp)), none)
    outside = np.where(counted == DEVICE, context + c.communicator * groups, 0.0)
    fragments = np.where(taken, spare * (kept + logits + working + buffers), 0.0)
    return StepMemory(parameters, gradients, optimizer, kept, logits, working, buffers, fragments, outside)


def kept_per_token(models: Models, layouts: Layouts) -> tuple[Array, Array]:
    """Bytes per token that one layer's forward leaves for its backward: (all of it, what a recomputation leaves)."""
    h, tp = models.hidden, layouts.tp
    whole = np.where(layouts.sequence_split > 0, tp, 1.0)
    old = layouts.fused < 1  # with dropout, and scores that are written
    eager = layouts.fusion == 1
    keys = 2.0 * models.kv_heads * models.head
    entry = HALF * h / whole
    # operator by operator, norms keep copies in fp32, rotations and gates their results, and of what tensor
    # parallelism has gathered for the maps a part stays
    norms = np.where(eager, 12.0 * h / whole + h, np.where(old, 10.0, 8.0) * h / whole)
    rotated = np.where(eager & (models.gated > 0), HALF * (h + 0.5 * keys) / tp, 0.0)
    inner = HALF * models.active * models.inner * (2.0 + models.gated * np.where(eager, 2.0, 1.0)) / tp
    maps = HALF * (2.0 * h + keys) / tp + rotated + inner
    scores = np.where(old, 5.0 * models.heads * models.sequence / tp, 4.0 * models.heads / tp)
    everything = norms + maps + scores
    full = layouts.again_products >= 1
    attention = (layouts.again_attention > 0) & (layouts.again_products == 0)
    passes = (layouts.again_passes > 0) & (layouts.again_products == 0)
    left = np.where(full, entry, np.where(attention, norms + maps, np.where(passes, entry + maps + scores, everything)))
    return everything, np.where((layouts.again_products > 0) & ~full, 0.5 * everything, left)


def in_flight(layouts: Layouts, place: int) -> Array:
    """Micro-batches whose activations stage `place` holds at once."""
    pp, m = layouts.pp, layouts.micro
    plain = np.minimum(m, np.maximum(1.0, pp - place))
    turns = np.minimum(m, pp + (pp - 1.0 - 2.0 * place) / layouts.virtual)
    held = np.where(layouts.order == _INTERLEAVED, turns, plain)
    held = np.where(layouts.order == _GPIPE, m, held)
    return np.where(layouts.order == _DOUBLE, np.minimum(m, 2.0 * pp - 1.0), np.maximum(1.0, held))


def _states(layouts: Layouts, weights: Array) -> list[Array]:
    """[parameters, gradients, optimizer] of a stage."""
    shared = layouts.shard * layouts.cp
    copy = np.where(layouts.master > 0, HALF, np.where(layouts.gradient > HALF, SINGLE, HALF))
    parameters = copy * weights / np.where(layouts.zero >= 3, shared, 1.0)
    # where no product adds to the sum in fp32, a gradient in 16 bits stands beside it
    beside = np.where((layouts.gradient > HALF) & (layouts.added < 1) & (layouts.zero < 3), HALF, 0.0)
    gradients = (layouts.gradient + beside) * weights / np.where(layouts.zero >= 2, shared, 1.0)
    moments = np.where(layouts.master > 0, 3.0 * SINGLE, 2.0 * copy)
    return [parameters, gradients, moments * weights / np.where(layouts.zero >= 1, shared, 1.0)]


def _working(models: Models, layouts: Layouts) -> Array:
    """The largest weight's gradient on its way into the sum."""
    table = np.where(layouts.added > 0, 0.0, models.table_weights)
    largest = np.maximum((1.0 + models.gated) * models.hidden * models.inner, table) / layouts.tp
    return np.where((layouts.gradient > HALF) & (layouts.zero < 3), (HALF + SINGLE) * largest, 0.0)


def _buffers(models: Models, layouts: Layouts) -> Array:
    """zero=3: the units that are gathered at once, their gradients, and the ends, which stay; else, buckets."""
    one = models.layer_weights / layouts.tp
    ends = (2.0 - models.tied) * models.table_weights / layouts.tp
    units = (2.0 * HALF + layouts.gradient) * one + HALF * ends
    return np.where(layouts.zero >= 3, units, np.where(layouts.copied > 0, 2.0 * BUCKET * layouts.gradient, 0.0))
