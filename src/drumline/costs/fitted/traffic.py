"""Seconds of messages on the link level where they travel: inside a node, or through a node's ports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .compute import HALF, tokens
from .constants import Constants, Number
from .inputs import Array, Layouts, Machines, Models
from .stages import Stages


@dataclass(frozen=True, slots=True)
class Traffic:
    """Seconds of messages: per layer and micro-batch, per micro-batch, or per step."""

    tp_forward: Array
    """Of one layer and micro-batch; the backward sends as much, and so does a full recomputation."""
    cp: Array
    """Of one layer and micro-batch, forward and backward."""
    ep: Array
    """The same, for tokens that go to other ranks' experts and back."""
    pipe: Array
    """Of one micro-batch at one stage: activations in, gradients back."""
    gather: Array
    """zero=3: parameters of a rank's share of the model, once."""
    scatter: Array
    """Gradients of a rank's part of the model, once: summed where they are kept, or everywhere."""
    spread: Array
    """Updated parameters to all ranks, once a step (zero=1 and 2)."""


def half_ring(
    size: Array, ranks: Array, inside: Array, rings: Array, machines: Machines, c: Constants, *, calls: Number = 1.0
) -> Array:
    """An all-gather or reduce-scatter of `size` bytes over `ranks`, of which `inside` share a node, in several calls.

    `rings` such groups leave each node at once and share its ports."""
    size = size / calls
    nodes = np.maximum(1.0, ranks / inside)
    moved = size * (inside - 1.0) / inside
    link = machines.link * c.link * moved / (moved + c.link_half + 1e-9)
    crossing = size * (nodes - 1.0) / nodes * rings
    port = machines.network * c.network * crossing / (crossing + c.link_half / 3.0 + 1e-9)
    within = np.where(inside > 1, moved / np.maximum(link, 1.0), 0.0)
    between = np.where(nodes > 1, crossing / np.maximum(port, 1.0), 0.0)
    start = np.where(ranks > 1, c.message, 0.0) + np.where(nodes > 1, c.hop * ranks, 0.0)
    slow = np.log2(np.maximum(1.0, inside)) * machines.start + np.log2(nodes) * machines.start_network
    start = np.maximum(start, slow)  # a tree at least, where single messages start slowly
    # rings through several nodes use links and ports at once
    return np.asarray(calls * (np.maximum(within, between) + start), dtype=np.float64)


def traffic(models: Models, layouts: Layouts, machines: Machines, c: Constants, stages: Stages) -> Traffic:
    """All messages of a layout."""
    t = tokens(models, layouts)
    wide = HALF * t * models.hidden
    tp, cp, ep = layouts.tp, layouts.cp, layouts.ep
    near = np.minimum(tp, machines.node)
    beside = np.maximum(1.0, machines.node / tp)
    tp_half = half_ring(wide, tp, near, np.ones_like(tp), machines, c)
    keys = HALF * t * 2.0 * models.kv_heads * models.head / tp * cp
    cp_near = np.clip(beside, 1.0, cp)
    cp_half = half_ring(keys, cp, cp_near, np.minimum(machines.node, tp), machines, c)
    sent = HALF * t * models.active * models.hidden * ep / tp
    ep_near = np.clip(np.maximum(1.0, beside), 1.0, ep)
    ep_half = half_ring(sent, ep, ep_near, np.minimum(machines.node, tp), machines, c)
    pipe = _between_stages(wide, layouts, machines, c)
    replicas = layouts.dp * cp
    inside = np.clip(beside, 1.0, replicas)
    rings = np.maximum(1.0, np.minimum(machines.node, layouts.ranks) / inside)
    held = stages.weights_per_rank
    ring = np.where(layouts.zero >= 1, np.minimum(layouts.shard * cp, replicas), replicas)
    ring_in = np.minimum(inside, ring)

    units = np.where(layouts.zero >= 3, models.layers, 1.0)

    def over(size: Array) -> Array:
        return half_ring(size, ring, ring_in, rings, machines, c, calls=units)

    across = half_ring(
        layouts.wire * held / np.maximum(1.0, ring),
        replicas / ring,
        np.ones_like(ring),
        np.minimum(machines.node, layouts.ranks),
        machines,
        c,
    )
    whole = over(layouts.wire * held)
    kept = (layouts.zero >= 1) & (layouts.scattered > 0)
    scatter = np.where(kept, whole + 2.0 * np.where(replicas > ring, across, 0.0), 2.0 * whole)
    return Traffic(
        tp_forward=np.where(tp > 1, 4.0 * tp_half, 0.0),
        cp=np.where(cp > 1, 3.0 * cp_half, 0.0),
        ep=np.where(ep > 1, 4.0 * ep_half, 0.0),
        pipe=np.where(layouts.pp > 1, pipe, 0.0),
        gather=np.where((layouts.zero >= 3) & (ring > 1), over(HALF * held), 0.0),
        scatter=np.where(replicas > 1, scatter, 0.0),
        spread=np.where((replicas > 1) & (layouts.zero >= 1) & (layouts.zero < 3), over(layouts.spread * held), 0.0),
    )


def _between_stages(wide: Array, layouts: Layouts, machines: Machines, c: Constants) -> Array:
    """One micro-batch's activations and gradients between neighbours, for every part of a rank."""
    size = wide / layouts.tp  # tensor-parallel ranks hold the same: each sends its part
    port = machines.network / np.minimum(machines.node, layouts.ranks)
    far = layouts.ranks > machines.node  # some neighbours stand in two nodes, and all stages wait for those
    rate = c.pipe * np.where(far, np.minimum(port, machines.link), machines.link)
    start = np.maximum(c.message, np.where(far, machines.start_network, machines.start))
    return np.asarray(2.0 * layouts.virtual * (size / rate + start), dtype=np.float64)
