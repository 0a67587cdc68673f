"""Seconds of communication on the links that carry it: inside a node, or through the ports of a node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan_columns import Array
from .compute import HALF, tokens
from .constants import Constants, Number
from .contention import FULL_BISECTION, ContentionColumns, shared_by
from .inputs import LayoutColumns, MachineColumns, ModelColumns
from .stages import StageSizes


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Seconds of communication: per layer and micro-batch, per micro-batch, or per step."""

    tp_forward: Array
    """Per layer and micro-batch; the backward and a full recomputation send as much again."""
    cp: Array
    """Per layer and micro-batch, forward and backward."""
    ep: Array
    """The same, for tokens sent to the experts of other ranks and back."""
    pipeline: Array
    """Per micro-batch and stage: activations in, gradients back."""
    gather: Array
    """zero=3: one all-gather of a rank's parameters."""
    scatter: Array
    """One reduction of a rank's gradients: reduce-scatter or all-reduce."""
    spread: Array
    """All-gather of updated parameters, once per step (zero=1 and 2)."""


def half_ring(
    size: Array,
    ranks: Array,
    inside: Array,
    rings: Array,
    machines: MachineColumns,
    c: Constants,
    *,
    calls: Number = 1.0,
    contention: Array | float = 1.0,
) -> Array:
    """Seconds of an all-gather or reduce-scatter of `size` bytes over `ranks`, `inside` of them per node.

    `rings` groups leave each node at once and share its ports; other links between nodes may take `contention` times as
    long as these. `calls` divides it into equal messages.
    """
    size = size / calls
    nodes = np.maximum(1.0, ranks / inside)
    moved = size * (inside - 1.0) / inside
    link = machines.link * c.link_bandwidth * moved / (moved + c.link_half_bytes + 1e-9)
    crossing = size * (nodes - 1.0) / nodes * rings
    port = machines.network * c.network_bandwidth * crossing / (crossing + c.link_half_bytes / 3.0 + 1e-9)
    within = np.where(inside > 1, moved / np.maximum(link, 1.0), 0.0)
    between = np.where(nodes > 1, contention * crossing / np.maximum(port, 1.0), 0.0)
    start = np.where(ranks > 1, c.collective_startup, 0.0) + np.where(nodes > 1, c.ring_hop * ranks, 0.0)
    slow = np.log2(np.maximum(1.0, inside)) * machines.link_startup + np.log2(nodes) * machines.network_startup
    start = np.maximum(start, slow)  # at least the latency of a tree
    # rings through several nodes use links and ports at once
    return np.asarray(calls * (np.maximum(within, between) + start), dtype=np.float64)


def step_traffic(
    models: ModelColumns,
    layouts: LayoutColumns,
    machines: MachineColumns,
    c: Constants,
    stages: StageSizes,
    contention: ContentionColumns = FULL_BISECTION,
) -> StepTraffic:
    """Communication of every layout."""
    t = tokens(models, layouts)
    activations = HALF * t * models.hidden
    tp, cp, ep = layouts.tp, layouts.cp, layouts.ep
    near = np.minimum(tp, machines.devices_per_node)
    groups = np.maximum(1.0, machines.devices_per_node / tp)
    tp_half = half_ring(activations, tp, near, np.ones_like(tp), machines, c, contention=contention.tp)
    keys = HALF * t * models.kv_heads * (models.head_width + models.value_width) / tp * cp
    cp_near = np.clip(groups, 1.0, cp)
    cp_rings = np.minimum(machines.devices_per_node, tp)
    cp_half = half_ring(keys, cp, cp_near, cp_rings, machines, c, contention=contention.cp)
    pipeline = _between_stages(activations, layouts, machines, c, contention.stages)
    replicas = layouts.dp * cp
    inside = np.clip(groups, 1.0, replicas)
    rings = np.maximum(1.0, np.minimum(machines.devices_per_node, layouts.ranks) / inside)
    weights = stages.weights_per_rank
    ring = shared_by(layouts)
    ring_in = np.minimum(inside, ring)

    # experts are the same on every ep-th replica: their gradients are summed over those alone
    alone = np.where(replicas > ep, (1.0 - ep / replicas) / np.maximum(1.0 - 1.0 / replicas, 1e-9), 0.0)
    weights = weights - (1.0 - alone) * stages.routed_weights
    units = np.where(layouts.zero >= 3, models.layers, 1.0)

    def over(size: Array) -> Array:
        return half_ring(size, ring, ring_in, rings, machines, c, calls=units, contention=contention.shards)

    across = half_ring(
        layouts.gradient_message_bytes * weights / np.maximum(1.0, ring),
        replicas / ring,
        np.ones_like(ring),
        np.minimum(machines.devices_per_node, layouts.ranks),
        machines,
        c,
        contention=contention.replicas,
    )
    whole = over(layouts.gradient_message_bytes * weights)
    kept = (layouts.zero >= 1) & (layouts.reduce_scatter > 0)
    scatter = np.where(kept, whole + 2.0 * np.where(replicas > ring, across, 0.0), 2.0 * whole)
    return StepTraffic(
        tp_forward=np.where(tp > 1, 4.0 * tp_half, 0.0),
        cp=np.where(cp > 1, 3.0 * cp_half, 0.0),
        ep=_to_experts(models, layouts, machines, c) if models.has_mixtures else np.zeros_like(tp),
        pipeline=np.where(layouts.pp > 1, pipeline, 0.0),
        gather=np.where((layouts.zero >= 3) & (ring > 1), over(HALF * weights), 0.0),
        scatter=np.where(replicas > 1, scatter, 0.0),
        spread=np.where(
            (replicas > 1) & (layouts.zero >= 1) & (layouts.zero < 3),
            over(layouts.parameter_message_bytes * weights),
            0.0,
        ),
    )


def _to_experts(models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants) -> Array:
    """Tokens to the ranks of their experts and back, forward and backward, per layer on average over all layers.

    A token goes to each of those ranks once, and to each of their nodes once. The ranks of a group are consecutive
    replicas.
    """
    ep, inner = layouts.ep, layouts.tp * layouts.cp
    sent = c.expert_imbalance * HALF * tokens(models, layouts) * models.hidden
    sent = sent / np.where(layouts.sequence_parallel > 0, layouts.tp, 1.0)
    near = np.clip(machines.devices_per_node / inner, 1.0, ep)
    devices = np.minimum(machines.devices_per_node, layouts.ranks)
    copies = np.minimum(models.active_experts, ep)
    far = np.minimum(np.minimum(copies, models.routed_nodes), ep / near)
    within = sent * copies * (near - 1.0) / near / (machines.link * c.link_bandwidth * c.expert_bandwidth)
    between = sent * far * (ep - near) / ep * devices / (machines.network * c.network_bandwidth * c.expert_bandwidth)
    start = c.collective_startup * np.log2(np.maximum(2.0, ep)) + np.where(ep > near, machines.network_startup, 0.0)
    one = np.maximum(within, between) + start
    return np.where(ep > 1, models.mixture_fraction * 4.0 * one, 0.0)


def _between_stages(
    activations: Array, layouts: LayoutColumns, machines: MachineColumns, c: Constants, contention: Array
) -> Array:
    """Activations and gradients of one micro-batch between neighbours, for every virtual stage of a rank."""
    size = activations / layouts.tp  # tensor-parallel ranks have the same activations: each sends its part
    port = machines.network / np.minimum(machines.devices_per_node, layouts.ranks) / contention
    far = (
        layouts.ranks > machines.devices_per_node
    )  # some neighbours are on different nodes, and all stages wait for them
    rate = c.stage_bandwidth * np.where(far, np.minimum(port, machines.link), machines.link)
    start = np.maximum(c.collective_startup, np.where(far, machines.network_startup, machines.link_startup))
    return np.asarray(2.0 * layouts.virtual * (size / rate + start), dtype=np.float64)
