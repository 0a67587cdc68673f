"""Peak memory of the fullest rank: states, activations in flight, logits, buffers, framework."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ..plan_columns import SCHEDULES, Array
from .compute import HALF, tokens
from .constants import Constants
from .inputs import LayoutColumns, ModelColumns
from .stages import stage_sizes

SINGLE = 4.0
"""Bytes per value in 32 bits."""
BUCKET = 5e8
"""Values in each of the two flat gradient buffers."""
_GPIPE, _INTERLEAVED, _DOUBLE = (SCHEDULES.index(x) for x in ("gpipe", "interleaved", "zero-bubble-2p"))
ANALYTIC, ALLOCATED, RESERVED, DEVICE = range(4)
"""Meaning of a published memory: a formula, live tensors, allocator reservations, or the whole device."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of the fullest rank by part, one entry per candidate."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    logits: Array
    working: Array
    """Gradient of the largest weight while it is computed: in 16 bits, and in fp32."""
    communication: Array
    fragments: Array
    """Allocator reservations beyond live tensors."""
    context: Array
    """Framework and communicators, outside of the allocator."""

    @property
    def total(self) -> Array:
        """Sum of all parts."""
        return np.asarray(sum(getattr(self, f.name) for f in fields(self)), dtype=np.float64)


def step_memory(
    models: ModelColumns,
    layouts: LayoutColumns,
    c: Constants,
    *,
    kind: Array | float = ALLOCATED,
    context: Array | float = 0.0,
    first: Array | float = 0.0,
) -> StepMemory:
    """Bytes of the fullest stage, or of the first where `first` is 1.

    `kind` is the meaning of the published number, `context` the memory of the framework itself.
    """
    kind, context, first = (
        np.broadcast_to(np.asarray(x, dtype=np.float64), layouts.tp.shape) for x in (kind, context, first)
    )
    sizes = stage_sizes(models, layouts)
    single = layouts.pp == 1
    everything, left = kept_per_token(models, layouts)
    recomputed = np.where(left < everything, everything, 0.0)
    entry = HALF * models.hidden / np.where(layouts.sequence_parallel > 0, layouts.tp, 1.0)
    t = tokens(models, layouts)
    formula = kind == ANALYTIC

    def stage(layers: Array, weights: Array, routed: Array, flight: Array, logits: Array) -> list[Array]:
        border = np.where(single | formula, 0.0, entry)
        kept = t * (flight * (layers * left + border) + np.where(formula, 0.0, recomputed))
        return [*_states(layouts, weights, routed), kept, logits]

    tail = np.where(formula, 0.0, c.logit_bytes * t * models.predicted_fraction * models.vocabulary / layouts.tp)
    none = np.zeros_like(tail)
    last = np.where(layouts.schedule == _DOUBLE, in_flight(layouts, 0), 1.0)
    routed = sizes.routed_fraction
    choices = [
        stage(sizes.first, sizes.first_weights, routed[0], in_flight(layouts, 0), np.where(single, tail, none)),
        stage(sizes.inner, sizes.inner_weights, routed[1], in_flight(layouts, 1), none),
        stage(sizes.last, sizes.last_weights, routed[2], last, tail),
    ]
    totals = np.stack([sum(parts[1:], parts[0]) for parts in choices])
    totals[1, layouts.pp <= 2] = 0.0
    totals[2, single] = 0.0
    totals[1:, first > 0] = 0.0
    worst = totals.argmax(axis=0)
    parameters, gradients, optimizer, kept, logits = (
        np.choose(worst, [choice[i] for choice in choices]) for i in range(5)
    )
    working = np.where(formula, 0.0, _working(models, layouts))
    buffers = np.where(formula, 0.0, _buffers(models, layouts))
    reserved = kind >= RESERVED
    slack = np.where(layouts.elementwise_fusion == 1, c.allocator_slack_eager, c.allocator_slack)
    groups = sum((np.where(g > 1, 1.0, 0.0) for g in (layouts.tp, layouts.pp, layouts.dp * layouts.cp)), none)
    outside = np.where(kind == DEVICE, context + c.communicator_bytes * groups, 0.0)
    fragments = np.where(reserved, slack * (kept + logits + working + buffers), 0.0)
    return StepMemory(parameters, gradients, optimizer, kept, logits, working, buffers, fragments, outside)


def kept_per_token(models: ModelColumns, layouts: LayoutColumns) -> tuple[Array, Array]:
    """Bytes per token that one layer keeps for its backward: (without recomputation, with it)."""
    h, tp = models.hidden, layouts.tp
    whole = np.where(layouts.sequence_parallel > 0, tp, 1.0)
    old = layouts.fused_attention < 1  # with dropout and materialised scores
    eager = layouts.elementwise_fusion == 1
    keys = models.kv_heads * (models.head_width + models.value_width)
    queries = models.heads * (models.head_width + models.value_width)
    entry = HALF * h / whole
    # with one kernel per operator, norms keep fp32 copies, rotary embeddings and gates keep their results, and part of
    # what tensor parallelism gathered for the projections stays
    norms = np.where(eager, 12.0 * h / whole + h, np.where(old, 10.0, 8.0) * h / whole)
    rotated = np.where(eager & (models.gated > 0), HALF * (0.5 * queries + 0.5 * keys) / tp, 0.0)
    projections = HALF * (queries + keys) / tp + rotated + _ffn_per_token(models, layouts)
    scores = np.where(old, 5.0 * models.heads * models.sequence / tp, 4.0 * models.heads / tp)
    everything = norms + projections + scores
    full = layouts.recompute_matmuls >= 1
    attention = (layouts.recompute_attention > 0) & (layouts.recompute_matmuls == 0)
    elementwise = (layouts.recompute_elementwise > 0) & (layouts.recompute_matmuls == 0)
    left = np.where(
        full,
        entry,
        np.where(attention, norms + projections, np.where(elementwise, entry + projections + scores, everything)),
    )
    return everything, np.where((layouts.recompute_matmuls > 0) & ~full, 0.5 * everything, left)


def _ffn_per_token(models: ModelColumns, layouts: LayoutColumns) -> Array:
    """Bytes per token that the feed-forward part of one layer keeps, on average over all layers.

    A mixture keeps its rows sorted by expert, and what comes back from the experts, besides.
    """
    values = 2.0 + models.gated * np.where(layouts.elementwise_fusion == 1, 2.0, 1.0)
    width = models.ffn
    if models.has_mixtures:
        visited = models.active_experts + models.shared_experts
        inner = visited * models.expert_ffn + 2.0 * models.active_experts * models.hidden / values
        width = (1.0 - models.mixture_fraction) * width + models.mixture_fraction * inner
    return np.asarray(HALF * width * values / layouts.tp, dtype=np.float64)


def in_flight(layouts: LayoutColumns, place: int) -> Array:
    """Micro-batches whose activations stage `place` keeps at once."""
    pp, m = layouts.pp, layouts.micro
    plain = np.minimum(m, np.maximum(1.0, pp - place))
    interleaved = np.minimum(m, pp + (pp - 1.0 - 2.0 * place) / layouts.virtual)
    count = np.where(layouts.schedule == _INTERLEAVED, interleaved, plain)
    count = np.where(layouts.schedule == _GPIPE, m, count)
    return np.where(layouts.schedule == _DOUBLE, np.minimum(m, 2.0 * pp - 1.0), np.maximum(1.0, count))


def _states(layouts: LayoutColumns, weights: Array, routed: Array) -> list[Array]:
    """[parameters, gradients, optimizer] of a stage; `routed` of its weights are experts: fewer ranks share these."""
    every = layouts.shard * layouts.cp
    share = (1.0 - routed) / every + routed / np.maximum(1.0, every / layouts.ep)
    shared = 1.0 / share
    copy = np.where(layouts.master_weights > 0, HALF, np.where(layouts.gradient_bytes > HALF, SINGLE, HALF))
    parameters = copy * weights / np.where(layouts.zero >= 3, shared, 1.0)
    # where the matmul does not accumulate in fp32, there is a 16-bit gradient as well
    extra = np.where((layouts.gradient_bytes > HALF) & (layouts.fused_accumulation < 1) & (layouts.zero < 3), HALF, 0.0)
    gradients = (layouts.gradient_bytes + extra) * weights / np.where(layouts.zero >= 2, shared, 1.0)
    moments = np.where(layouts.master_weights > 0, 3.0 * SINGLE, 2.0 * copy)
    return [parameters, gradients, moments * weights / np.where(layouts.zero >= 1, shared, 1.0)]


def _working(models: ModelColumns, layouts: LayoutColumns) -> Array:
    """Gradient of the largest weight before it is accumulated."""
    table = np.where(layouts.fused_accumulation > 0, 0.0, models.embedding_weights)
    widest = np.where(models.dense_layers > 0, models.ffn, models.expert_ffn)
    largest = np.maximum((1.0 + models.gated) * models.hidden * widest, table) / layouts.tp
    return np.where((layouts.gradient_bytes > HALF) & (layouts.zero < 3), (HALF + SINGLE) * largest, 0.0)


def _buffers(models: ModelColumns, layouts: LayoutColumns) -> Array:
    """zero=3: units gathered at once, their gradients, and the embedding and head, which stay; otherwise buckets."""
    one = models.layer_weights / layouts.tp
    ends = (2.0 - models.tied) * models.embedding_weights / layouts.tp
    units = (2.0 * HALF + layouts.gradient_bytes) * one + HALF * ends
    return np.where(
        layouts.zero >= 3, units, np.where(layouts.flat_buffers > 0, 2.0 * BUCKET * layouts.gradient_bytes, 0.0)
    )
