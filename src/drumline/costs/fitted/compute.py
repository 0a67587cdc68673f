"""Seconds of computation of one layer and of the logits, for one micro-batch on one rank, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .constants import Constants, Number
from .inputs import Array, Layouts, Machines, Models

HALF = 2.0
"""Bytes of a number in 16 bits."""
FUSED_SCORES = (11.0, 19.0)
"""Bytes per score that unfused attention moves forward and backward: products, masked softmax, dropout, each once."""
HIDDEN_PASSES = (12.0, 20.0)
"""Numbers per hidden unit and token that norms, residual sums and dropouts move, forward and backward."""
INNER_PASSES = (2.0, 3.0)
"""The same per unit of the feed-forward part, before its non-linearity."""
HEAD_PASSES = (2.0, 2.0)
"""The same per unit of queries, keys and values: biases, rotations."""
LOSS_BYTES = (14.0, 14.0)
"""Bytes per logit: fp32 copies, maximum, sum, gradient."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Seconds of one layer (forward, backward, what is computed again) and of the ends, for one micro-batch."""

    forward: Array
    backward: Array
    again: Array
    logits_forward: Array
    logits_backward: Array
    embedding: Array


def tokens(models: Models, layouts: Layouts) -> Array:
    """Tokens of one micro-batch on one rank, before tensor parallelism."""
    return layouts.slice * models.sequence / layouts.cp


def product(m: Array, n: Array, k: Array, machines: Machines, layouts: Layouts, c: Constants) -> Array:
    """Seconds of an (m x k) by (k x n) product: peak, less what short sums and few tiles lose, or the memory's rate."""
    ceiling = np.where(layouts.low > 0, c.products8, c.products) * machines.power**c.power
    wave = c.wave * machines.peak / 1e14
    rate = machines.peak * ceiling * k / (k + c.depth * machines.peak / 3e14) * m * n / (m * n + wave)
    moved = HALF * (m * k + k * n + m * n) / (machines.bandwidth * c.stream)
    return _either(2.0 * m * n * k / rate, moved)


def linear(m: Array, k: Array, n: Array, machines: Machines, layouts: Layouts, c: Constants) -> tuple[Array, Array]:
    """(forward, backward) of a linear map: one product, then one for the input's and one for the weight's gradient."""
    forward = product(m, n, k, machines, layouts, c)
    backward = product(m, k, n, machines, layouts, c) + product(k, n, m, machines, layouts, c)
    cast = np.where(layouts.low > 0, c.casts / (machines.bandwidth * c.stream), 0.0)
    return forward + cast * (m * k + k * n), backward + cast * (m * n + m * k)


def attention(models: Models, layouts: Layouts, machines: Machines, c: Constants) -> tuple[Array, Array]:
    """(forward, backward) of the attention between its maps: fused, or as batched products with written scores."""
    t = tokens(models, layouts)
    heads = models.heads / layouts.tp
    pairs = t * models.sequence * heads  # scores of this rank: with cp, its queries against all keys
    width = models.head / (models.head + c.head)
    work = 4.0 * pairs * models.head
    seen = np.where(models.causal > 0, 0.5, 1.0)
    cap = machines.peak16 * machines.power**c.power * width
    fused = seen * work / (cap * c.attention)
    fused_back = 2.5 * seen * work / (cap * c.attention_back)
    off = np.where(models.head % 8 > 0, c.misaligned, 1.0)
    plain = work * off * (models.head + c.head_scores) / (machines.peak16 * c.scores * models.head)
    rate = machines.bandwidth * c.stream
    moved = [c.score_passes * pairs * b / rate for b in FUSED_SCORES]
    one = layouts.fused > 0
    return np.where(one, fused, plain + moved[0]), np.where(one, fused_back, 2.0 * plain + moved[1])


def passes(models: Models, layouts: Layouts, machines: Machines, c: Constants) -> tuple[Array, Array]:
    """(forward, backward) of everything that only moves memory: norms, sums, dropouts, non-linearities."""
    t = tokens(models, layouts)
    whole = models.hidden / np.where(layouts.sequence_split > 0, layouts.tp, 1.0)
    inner = models.inner * (1.0 + models.gated) * models.active / layouts.tp
    heads = (models.heads + 2.0 * models.kv_heads) * models.head / layouts.tp
    eager = c.passes_eager * np.where(models.gated > 0, c.passes_rotary, 1.0)
    factor = np.choose(layouts.fusion.astype(int), [c.passes, eager, c.passes_compiled])
    rate = machines.bandwidth * c.stream / factor
    forward, backward = (
        HALF * t * (a * whole + b * inner + e * heads) / rate
        for a, b, e in zip(HIDDEN_PASSES, INNER_PASSES, HEAD_PASSES, strict=True)
    )
    return forward, backward


def pieces(models: Models, layouts: Layouts, machines: Machines, c: Constants) -> Pieces:
    """All of a layer and of the ends."""
    t, tp, h = tokens(models, layouts), layouts.tp, models.hidden
    heads = (models.heads + 2.0 * models.kv_heads) * models.head
    routed = t * models.active / models.experts * layouts.ep  # tokens of each expert, all ranks of its group together
    local = models.experts / layouts.ep
    up, up_back = linear(routed, h, (1.0 + models.gated) * models.inner / tp, machines, layouts, c)
    down, down_back = linear(routed, models.inner / tp, h, machines, layouts, c)
    qkv, qkv_back = linear(t, h, heads / tp, machines, layouts, c)
    out, out_back = linear(t, h / tp, h, machines, layouts, c)
    products = qkv + out + local * (up + down)
    core, core_back = attention(models, layouts, machines, c)
    light, light_back = passes(models, layouts, machines, c)
    forward = started(products + core + light, c.layer)
    backward = started(qkv_back + out_back + local * (up_back + down_back) + core_back + light_back, 2.0 * c.layer)
    share = layouts.again_products * products + layouts.again_attention * core + layouts.again_passes * light
    any_again = np.maximum(layouts.again_products, layouts.again_passes)
    again = started(share, c.layer * any_again)
    seen = t * models.predicted
    v = models.vocabulary / tp
    logits, logits_back = linear(seen, h, v, machines, layouts, c)
    rate = machines.bandwidth * c.stream
    return Pieces(
        forward,
        backward,
        again,
        logits + LOSS_BYTES[0] * seen * v / rate,
        logits_back + LOSS_BYTES[1] * seen * v / rate,
        8.0 * HALF * t * h / rate,
    )


def started(seconds: Array, launch: Number) -> Array:
    """Kernels run while the host starts the next ones: the longer of both counts, smoothly."""
    return _either(seconds, launch)


def _either(a: Array, b: Number) -> Array:
    """The larger of two, rounded off where they are alike."""
    a2, b2 = a * a, b * b
    return np.asarray(np.sqrt(np.sqrt(a2 * a2 + b2 * b2)), dtype=np.float64)  # fourth powers, without `**`: many rows


def layer_flops(models: Models) -> Array:
    """Operations of one layer's forward on one token, all pairs counted."""
    maps = models.attention_weights + models.active * models.inner_weights
    return 2.0 * maps + 4.0 * models.sequence * models.hidden


def step_flops(models: Models, samples: Array) -> Array:
    """Operations of forward and backward of a step, nothing computed twice."""
    head = 2.0 * models.table_weights * models.predicted
    return 3.0 * samples * models.sequence * (models.layers * layer_flops(models) + head)
