"""Compute time of one layer and of the logits, for one micro-batch on one rank, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan_columns import Array
from .constants import Constants, Number
from .inputs import LayoutColumns, MachineColumns, ModelColumns

HALF = 2.0
"""Bytes per value in 16 bits."""
UNFUSED_SCORE_BYTES = (11.0, 19.0)
"""Bytes per attention score that unfused attention moves, forward and backward: matmuls, masked softmax, dropout."""
HIDDEN_VALUES = (12.0, 20.0)
"""Values per hidden unit and token that norms, residuals and dropouts move, forward and backward."""
FFN_VALUES = (2.0, 3.0)
"""The same per unit of the feed-forward network, before its activation function."""
HEAD_VALUES = (2.0, 2.0)
"""The same per unit of queries, keys and values: biases, rotary embeddings."""
LOSS_BYTES = (14.0, 14.0)
"""Bytes per logit that the loss moves: fp32 copies, maximum, sum, gradient."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of one layer (forward, backward, recomputation), the logits and the embedding, for one micro-batch."""

    forward: Array
    backward: Array
    recompute: Array
    logits_forward: Array
    logits_backward: Array
    embedding: Array


def tokens(models: ModelColumns, layouts: LayoutColumns) -> Array:
    """Tokens per micro-batch and rank, before tensor parallelism."""
    return layouts.micro_batch_size * models.sequence / layouts.cp


def matmul_seconds(
    m: Array, n: Array, k: Array, machines: MachineColumns, layouts: LayoutColumns, c: Constants
) -> Array:
    """Seconds of an (m x k) by (k x n) matmul: peak reduced by short sums and few tiles, or memory bandwidth."""
    ceiling = np.where(layouts.fp8 > 0, c.matmul_fp8, c.matmul) * machines.power_fraction**c.power_exponent
    wave = c.matmul_half_output * machines.peak / 1e14
    rate = machines.peak * ceiling * k / (k + c.matmul_half_depth * machines.peak / 3e14) * m * n / (m * n + wave)
    moved = HALF * (m * k + k * n + m * n) / (machines.bandwidth * c.memory_bandwidth)
    return _smooth_max(2.0 * m * n * k / rate, moved)


def linear_seconds(
    m: Array, k: Array, n: Array, machines: MachineColumns, layouts: LayoutColumns, c: Constants
) -> tuple[Array, Array]:
    """(forward, backward) of a linear layer: one matmul, then one each for the gradients of input and weight."""
    forward = matmul_seconds(m, n, k, machines, layouts, c)
    backward = matmul_seconds(m, k, n, machines, layouts, c) + matmul_seconds(k, n, m, machines, layouts, c)
    cast = np.where(layouts.fp8 > 0, c.fp8_cast_bytes / (machines.bandwidth * c.memory_bandwidth), 0.0)
    return forward + cast * (m * k + k * n), backward + cast * (m * n + m * k)


def attention_seconds(
    models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants
) -> tuple[Array, Array]:
    """(forward, backward) of attention without its projections: fused, or batched matmuls with materialised scores."""
    t = tokens(models, layouts)
    heads = models.heads / layouts.tp
    pairs = t * models.sequence * heads  # scores of this rank; with cp, its queries against all keys
    width = models.head_width / (models.head_width + c.attention_half_head)
    work = 4.0 * pairs * models.head_width
    causal = np.where(models.causal > 0, 0.5, 1.0)
    cap = machines.peak16 * machines.power_fraction**c.power_exponent * width
    fused = causal * work / (cap * c.attention_forward)
    fused_back = 2.5 * causal * work / (cap * c.attention_backward)
    off = np.where(models.head_width % 8 > 0, c.misaligned_head, 1.0)
    plain = (
        work
        * off
        * (models.head_width + c.unfused_half_head)
        / (machines.peak16 * c.unfused_attention * models.head_width)
    )
    rate = machines.bandwidth * c.memory_bandwidth
    moved = [c.score_bytes * pairs * b / rate for b in UNFUSED_SCORE_BYTES]
    one = layouts.fused_attention > 0
    return np.where(one, fused, plain + moved[0]), np.where(one, fused_back, 2.0 * plain + moved[1])


def elementwise_seconds(
    models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants
) -> tuple[Array, Array]:
    """(forward, backward) of elementwise kernels: norms, residuals, dropouts, activation functions."""
    t = tokens(models, layouts)
    whole = models.hidden / np.where(layouts.sequence_parallel > 0, layouts.tp, 1.0)
    inner = models.ffn * (1.0 + models.gated) * models.active_experts / layouts.tp
    heads = (models.heads + 2.0 * models.kv_heads) * models.head_width / layouts.tp
    eager = c.elementwise_eager * np.where(models.gated > 0, c.elementwise_rotary, 1.0)
    factor = np.choose(layouts.elementwise_fusion.astype(int), [c.elementwise, eager, c.elementwise_compiled])
    rate = machines.bandwidth * c.memory_bandwidth / factor
    forward, backward = (
        HALF * t * (a * whole + b * inner + e * heads) / rate
        for a, b, e in zip(HIDDEN_VALUES, FFN_VALUES, HEAD_VALUES, strict=True)
    )
    return forward, backward


def layer_seconds(models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants) -> LayerSeconds:
    """Seconds of every part of a layer, the logits and the embedding."""
    t, tp, h = tokens(models, layouts), layouts.tp, models.hidden
    heads = (models.heads + 2.0 * models.kv_heads) * models.head_width
    routed = t * models.active_experts / models.experts * layouts.ep  # tokens per expert, from all ranks of its group
    local = models.experts / layouts.ep
    up, up_back = linear_seconds(routed, h, (1.0 + models.gated) * models.ffn / tp, machines, layouts, c)
    down, down_back = linear_seconds(routed, models.ffn / tp, h, machines, layouts, c)
    qkv, qkv_back = linear_seconds(t, h, heads / tp, machines, layouts, c)
    out, out_back = linear_seconds(t, h / tp, h, machines, layouts, c)
    matmuls = qkv + out + local * (up + down)
    core, core_back = attention_seconds(models, layouts, machines, c)
    light, light_back = elementwise_seconds(models, layouts, machines, c)
    forward = launch_bound(matmuls + core + light, c.layer_launch)
    backward = launch_bound(
        qkv_back + out_back + local * (up_back + down_back) + core_back + light_back, 2.0 * c.layer_launch
    )
    share = (
        layouts.recompute_matmuls * matmuls + layouts.recompute_attention * core + layouts.recompute_elementwise * light
    )
    any_recompute = np.maximum(layouts.recompute_matmuls, layouts.recompute_elementwise)
    recompute = launch_bound(share, c.layer_launch * any_recompute)
    predicted = t * models.predicted_fraction
    v = models.vocabulary / tp
    logits, logits_back = linear_seconds(predicted, h, v, machines, layouts, c)
    rate = machines.bandwidth * c.memory_bandwidth
    return LayerSeconds(
        forward,
        backward,
        recompute,
        logits + LOSS_BYTES[0] * predicted * v / rate,
        logits_back + LOSS_BYTES[1] * predicted * v / rate,
        8.0 * HALF * t * h / rate,
    )


def launch_bound(seconds: Array, launch: Number) -> Array:
    """Kernels run while the host launches the next ones: the longer of the two, smoothly."""
    return _smooth_max(seconds, launch)


def _smooth_max(a: Array, b: Number) -> Array:
    """Maximum of two values, rounded off where they are close."""
    a2, b2 = a * a, b * b
    return np.asarray(
        np.sqrt(np.sqrt(a2 * a2 + b2 * b2)), dtype=np.float64
    )  # fourth powers; `**` is slower on many rows


def layer_flops(models: ModelColumns) -> Array:
    """Operations per token of one layer's forward, without a causal mask."""
    weights = models.attention_weights + models.active_experts * models.ffn_weights
    return 2.0 * weights + 4.0 * models.sequence * models.hidden


def step_flops(models: ModelColumns, samples: Array) -> Array:
    """Operations of a step, forward and backward, without recomputation."""
    head = 2.0 * models.embedding_weights * models.predicted_fraction
    return 3.0 * samples * models.sequence * (models.layers * layer_flops(models) + head)
