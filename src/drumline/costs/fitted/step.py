"""Step time over arrays: compute, exposed communication, pipeline bubble, optimizer update."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ..plan_columns import SCHEDULES, Array
from .compute import LayerSeconds, layer_seconds
from .constants import Constants
from .contention import FULL_BISECTION, ContentionColumns
from .host_waits import HostWaits, WaitConstants, host_waits
from .inputs import LayoutColumns, MachineColumns, ModelColumns
from .stages import StageSizes, stage_sizes
from .traffic import StepTraffic, step_traffic

UPDATE_BYTES = 44.0
"""Bytes per parameter of an update: gradient, two moments and master weight read and written, norm, 16-bit copy."""
_BUBBLE = np.array([0.0, 1.0, 1.0, 1.0, 1.0 / 3.0, 0.0])
"""Fraction of the pipeline's fill and drain that each of SCHEDULES leaves idle."""


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
    """Communication behind compute, not part of the step."""

    @property
    def total(self) -> Array:
        """Seconds of the step."""
        return np.asarray(sum(getattr(self, name) for name in PARTS), dtype=np.float64)


PARTS = tuple(f.name for f in fields(StepTimes) if f.name != "hidden")
"""Parts that add up to a step."""


def step_times(
    models: ModelColumns,
    layouts: LayoutColumns,
    machines: MachineColumns,
    c: Constants,
    contention: ContentionColumns = FULL_BISECTION,
    waits: WaitConstants | None = None,
    full: Array | float = 0.0,
) -> StepTimes:
    """Seconds per step of every candidate, by part.

    `waits` are those of hosts that wait for their messages, `full` the part of the memory in use there.
    """
    assert len(SCHEDULES) == len(_BUBBLE)
    sizes = stage_sizes(models, layouts)
    p = layer_seconds(models, layouts, machines, c)
    t = step_traffic(models, layouts, machines, c, sizes, contention)
    exposed = np.where(layouts.overlap_tp > 0, c.exposed_tp, 1.0)
    tp = exposed * t.tp_forward * (2.0 + layouts.recompute_matmuls)
    sent_ep = t.ep * (1.0 + 0.5 * layouts.recompute_matmuls)
    cp, ep = c.exposed_cp * t.cp, np.where(layouts.overlap_ep > 0, c.exposed_ep, 1.0) * sent_ep
    hooks = np.where(layouts.flat_buffers > 0, c.gradient_hooks, 0.0)
    layer = p.forward + p.backward + p.recompute + hooks + tp + cp + ep
    logits = p.logits_forward + p.logits_backward
    add = _accumulate(layouts, machines, c, sizes)
    first = sizes.first * layer + p.embedding
    inner = sizes.inner * layer
    last = sizes.last * layer + logits
    slowest = np.where(layouts.pp > 1, np.maximum(np.maximum(first, inner), last), first + logits)
    others = np.maximum(0.0, layouts.pp - 2.0) * inner + np.where(layouts.pp > 1, first + last, slowest) - slowest
    # compute of the slowest stage by part; the rest of its time it waits
    count = np.where((layouts.pp > 1) & (slowest == inner), sizes.inner, sizes.first)
    head = np.where((layouts.pp == 1) | (slowest == last), 1.0, 0.0)
    m = layouts.micro
    forward = m * (count * p.forward + head * p.logits_forward + np.where(layouts.pp == 1, p.embedding, 0.0))
    backward = m * (count * (p.backward + hooks) + head * p.logits_backward + add)
    recompute = m * count * p.recompute
    pipeline = m * t.pipeline * np.where(layouts.overlap_tp * (layouts.virtual > 1) > 0, c.exposed_pp, 1.0)
    filled = others + np.maximum(0.0, layouts.pp - 1.0) * t.pipeline
    bubble = _BUBBLE[layouts.schedule.astype(int)] * filled / layouts.virtual
    compute = m * (slowest + add)
    optimizer = _update(layouts, machines, c, sizes)
    sent, dp = _replicas(layouts, t, c, compute, p, sizes)
    slower = c.straggler * np.log2(np.maximum(1.0, layouts.ranks / machines.devices_per_node))
    none = np.zeros_like(slowest)
    wait = host_waits(layouts, machines, sizes, slowest, waits, full) if waits else HostWaits(none, none, none)
    step = forward + backward + recompute + m * count * (tp + cp + ep) + pipeline + bubble + optimizer + dp
    return StepTimes(
        forward=forward,
        backward=backward,
        recompute=recompute,
        tp=m * count * tp + wait.tp,
        cp=m * count * cp,
        ep=m * count * ep,
        pp=pipeline + wait.pp,
        dp=dp + wait.dp,
        bubble=bubble,
        optimizer=optimizer,
        overhead=c.step_overhead + slower * step,
        hidden=sent - dp + m * (count * (tp / exposed - tp + t.cp - cp + sent_ep - ep) + t.pipeline) - pipeline,
    )


def _accumulate(layouts: LayoutColumns, machines: MachineColumns, c: Constants, sizes: StageSizes) -> Array:
    """Seconds to accumulate the gradients of one micro-batch, where no matmul does it in place."""
    times = np.where(
        layouts.flat_buffers > 0, 4.0, 2.0
    )  # read and written: by the sum, and by the copy to flat buffers
    moved = (2.0 + times * layouts.gradient_bytes) * sizes.weights_per_rank
    free = (layouts.micro <= 1) | (layouts.zero >= 3) | (layouts.fused_accumulation > 0)
    return np.where(free, 0.0, c.accumulate_bytes * moved / (machines.bandwidth * c.memory_bandwidth))


def _update(layouts: LayoutColumns, machines: MachineColumns, c: Constants, sizes: StageSizes) -> Array:
    """Seconds of the optimizer on the parameters that a rank updates."""
    shared = layouts.shard * layouts.cp
    whole = sizes.weights_per_rank - sizes.routed_weights
    own = np.where(
        layouts.zero >= 1,
        whole / shared + sizes.routed_weights / np.maximum(1.0, shared / layouts.ep),
        sizes.weights_per_rank,
    )
    return c.update_bytes * UPDATE_BYTES * own / (machines.bandwidth * c.memory_bandwidth)


def _replicas(
    layouts: LayoutColumns, t: StepTraffic, c: Constants, compute: Array, p: LayerSeconds, sizes: StageSizes
) -> tuple[Array, Array]:
    """(communication of parameters and gradients between replicas, its exposed part).

    zero=3 gathers twice and reduce-scatters once per micro-batch. Otherwise gradients are reduced once per step, or in
    every micro-batch, during the backward or after it.
    """
    m = layouts.micro
    sharded, often = layouts.zero >= 3, (layouts.zero >= 3) | (layouts.reduce_every_micro_batch > 0)
    late = np.where(sharded | (layouts.overlap_parameters > 0), 0.0, t.spread)
    sent = np.where(sharded, m * (2.0 * t.gather + t.scatter), np.where(often, m, 1.0) * t.scatter + t.spread - late)
    # interleaved stages finish one after the other while the last round of micro-batches runs
    rounds = np.where(layouts.virtual > 1, np.minimum(m, layouts.pp), 1.0)
    room = np.where(often, compute, rounds * sizes.first * (p.backward + p.recompute))
    over = np.maximum(0.0, sent - room)
    overlapped = over + c.exposed_dp * (sent - over)
    return sent + late, np.where(layouts.overlap_dp > 0, overlapped, sent) + late
