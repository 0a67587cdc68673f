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
HOPPER_PEAK = 7e14
"""Operations per second in 16 bits from which a device has the instructions of Hopper; older ones have at most half."""
ROUTED_VALUES = 6.0
"""Values per hidden unit and visited expert that a mixture moves to sort its tokens and to sum what comes back."""
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
    m: Array, n: Array, k: Array, machines: MachineColumns, layouts: LayoutColumns, c: Constants, count: Number = 1.0
) -> Array:
    """Seconds of `count` (m x k) by (k x n) matmuls in one kernel: peak reduced by short sums and few tiles, or memory
    bandwidth.
    """
    ceiling = np.where(layouts.fp8 > 0, c.matmul_fp8, c.matmul) * machines.power_fraction**c.power_exponent
    wave = c.matmul_half_output * machines.peak / 1e14
    rate = (
        machines.peak * ceiling * k / (k + c.matmul_half_depth * machines.peak / 3e14) * m * n / (m * n + wave / count)
    )
    moved = HALF * (m * k + k * n + m * n) / (machines.bandwidth * c.memory_bandwidth)
    return count * _smooth_max(2.0 * m * n * k / rate, moved)


def linear_seconds(
    m: Array, k: Array, n: Array, machines: MachineColumns, layouts: LayoutColumns, c: Constants, count: Number = 1.0
) -> tuple[Array, Array]:
    """(forward, backward) of a linear layer, or of `count` of them in one kernel: one matmul, then one each for the
    gradients of input and weight.
    """
    forward = matmul_seconds(m, n, k, machines, layouts, c, count)
    backward = matmul_seconds(m, k, n, machines, layouts, c, count)
    backward = backward + matmul_seconds(k, n, m, machines, layouts, c, count)
    cast = np.where(layouts.fp8 > 0, count * c.fp8_cast_bytes / (machines.bandwidth * c.memory_bandwidth), 0.0)
    return forward + cast * (m * k + k * n), backward + cast * (m * n + m * k)


def attention_seconds(
    models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants
) -> tuple[Array, Array]:
    """(forward, backward) of attention without its projections: fused, or batched matmuls with materialised scores."""
    t = tokens(models, layouts)
    heads = models.heads / layouts.tp
    pairs = t * models.sequence * heads  # scores of this rank; with cp, its queries against all keys
    width = models.head_width / (models.head_width + c.attention_half_head)
    work = 2.0 * pairs * (models.head_width + models.value_width)
    causal = np.where(models.causal > 0, 0.5, 1.0)
    older = (layouts.portable_attention > 0) & (machines.peak16 >= HOPPER_PEAK)
    width = width * np.where(older, c.portable_attention, 1.0)
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
    inner = models.ffn
    if models.has_mixtures:
        visited = models.active_experts + models.shared_experts
        mixture = models.mixture_fraction
        inner = (1.0 - mixture) * inner + mixture * visited * models.expert_ffn
    inner = inner * (1.0 + models.gated) / layouts.tp
    heads = models.projected_heads / layouts.tp
    eager = c.elementwise_eager * np.where(models.gated > 0, c.elementwise_rotary, 1.0)
    factor = np.choose(layouts.elementwise_fusion.astype(int), [c.elementwise, eager, c.elementwise_compiled])
    rate = machines.bandwidth * c.memory_bandwidth / factor
    forward, backward = (
        HALF * t * (a * whole + b * inner + e * heads) / rate
        for a, b, e in zip(HIDDEN_VALUES, FFN_VALUES, HEAD_VALUES, strict=True)
    )
    return forward, backward


def projection_seconds(
    models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants
) -> tuple[Array, Array]:
    """(forward, backward) of the projections around attention; latent ones go through a narrow width."""
    t, tp, h = tokens(models, layouts), layouts.tp, models.hidden

    def linears(*shapes: tuple[Array, Array]) -> tuple[Array, Array]:
        seconds = [linear_seconds(t, k, n, machines, layouts, c) for k, n in shapes]
        return sum(f for f, _ in seconds), sum(b for _, b in seconds)  # type: ignore[return-value]  # arrays

    out = (models.heads * models.value_width / tp, h)
    direct = linears((h, models.projected_heads / tp), out)
    if not np.any(models.kv_latent > 0):
        return direct
    q, kv = np.maximum(models.query_latent, 1.0), np.maximum(models.kv_latent, 1.0)
    rotated = models.head_width - models.value_width
    latent = linears(
        (h, q + kv + rotated),
        (q, models.heads * models.head_width / tp),
        (kv, models.heads * 2.0 * models.value_width / tp),
        out,
    )
    is_latent = models.kv_latent > 0
    return np.where(is_latent, latent[0], direct[0]), np.where(is_latent, latent[1], direct[1])


@dataclass(frozen=True, slots=True)
class ExpertSeconds:
    """Seconds of the experts of one mixture layer on the rank with the most tokens."""

    forward: Array
    backward: Array
    routing: Array
    """Sorting tokens by expert and back, forward; the backward moves half as much again."""


def expert_seconds(
    models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants
) -> ExpertSeconds:
    """Routed experts as grouped matmuls, the shared ones as one wider matmul, and the router."""
    t, tp, h, f = tokens(models, layouts), layouts.tp, models.hidden, models.expert_ffn
    local = np.maximum(1.0, models.experts / layouts.ep)
    routed = c.expert_imbalance * t * models.active_experts / local  # rows per expert, on the busiest rank of a group
    up, up_back = linear_seconds(routed, h, (1.0 + models.gated) * f / tp, machines, layouts, c, local)
    down, down_back = linear_seconds(routed, f / tp, h, machines, layouts, c, local)
    wide = np.maximum(1.0, models.shared_experts * f) / tp
    both, both_back = linear_seconds(t, h, (1.0 + models.gated) * wide, machines, layouts, c)
    last, last_back = linear_seconds(t, wide, h, machines, layouts, c)
    extra = np.where(models.shared_experts > 0, both + last, 0.0)
    extra_back = np.where(models.shared_experts > 0, both_back + last_back, 0.0)
    router, router_back = linear_seconds(t, h, models.experts, machines, layouts, c)
    rows = t * models.active_experts * h / np.where(layouts.sequence_parallel > 0, tp, 1.0)
    moved = c.routing_bytes * HALF * ROUTED_VALUES * rows / (machines.bandwidth * c.memory_bandwidth)
    return ExpertSeconds(up + down + extra + router, up_back + down_back + extra_back + router_back, moved)


def layer_seconds(models: ModelColumns, layouts: LayoutColumns, machines: MachineColumns, c: Constants) -> LayerSeconds:
    """Seconds of every part of a layer, the logits and the embedding."""
    t, tp, h = tokens(models, layouts), layouts.tp, models.hidden
    up, up_back = linear_seconds(t, h, (1.0 + models.gated) * models.ffn / tp, machines, layouts, c)
    down, down_back = linear_seconds(t, models.ffn / tp, h, machines, layouts, c)
    ffn, ffn_back, launch = up + down, up_back + down_back, c.layer_launch
    light, light_back = elementwise_seconds(models, layouts, machines, c)
    if models.has_mixtures:
        own = expert_seconds(models, layouts, machines, c)
        mixture = models.mixture_fraction
        ffn = (1.0 - mixture) * ffn + mixture * own.forward
        ffn_back = (1.0 - mixture) * ffn_back + mixture * own.backward
        light, light_back = light + mixture * own.routing, light_back + mixture * 1.5 * own.routing
        launch = launch + mixture * c.mixture_launch
    projections, projections_back = projection_seconds(models, layouts, machines, c)
    matmuls = projections + ffn
    core, core_back = attention_seconds(models, layouts, machines, c)
    forward = launch_bound(matmuls + core + light, launch)
    backward = launch_bound(projections_back + ffn_back + core_back + light_back, 2.0 * launch)
    share = (
        layouts.recompute_matmuls * matmuls + layouts.recompute_attention * core + layouts.recompute_elementwise * light
    )
    any_recompute = np.maximum(layouts.recompute_matmuls, layouts.recompute_elementwise)
    recompute = launch_bound(share, launch * any_recompute)
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
    scores = models.heads * (models.head_width + models.value_width)
    return 2.0 * models.active_weights + 2.0 * models.sequence * scores


def step_flops(models: ModelColumns, samples: Array) -> Array:
    """Operations of a step, forward and backward, without recomputation."""
    head = 2.0 * models.embedding_weights * models.predicted_fraction
    return 3.0 * samples * models.sequence * (models.layers * layer_flops(models) + head)
