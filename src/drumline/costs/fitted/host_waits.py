"""Waits of a host that stands still for its messages: what bounds many nodes with little work each.

Software that posts messages from the thread that also launches kernels cannot run ahead of the device. Every message
between pipeline stages then stops the host, tensor parallelism costs host time per layer, gradients are sent one layer
at a time, and one slow node delays all others. The engine posts its messages in the background, so its plans have none
of these waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field

from ..plan_columns import Array
from .inputs import LayoutColumns, MachineColumns
from .stages import StageSizes

MANY_NODES = 64.0
"""Nodes at which every message waits for a slow one: the largest published sweep. More nodes are priced like these."""
NEARLY_FULL = 0.9
"""Fraction of the device's memory, with what the allocator and the framework hold, beyond which every message stalls:
buffers for it are freed and allocated again, and each of these calls waits for the device."""
GIGABYTE = 1e9
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class WaitConstants:
    """Constants of the waits; the defaults are orders of magnitude, from which they are fitted."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    stage_stall: Positive = 0.1
    """Seconds for which a message between stages stops the host on MANY_NODES nodes."""
    stall_growth: Positive = 4.0
    """On n nodes, (n / MANY_NODES) to this exponent of the messages stall: any slow node stops all others."""
    tp_wait: Positive = 1e-3
    """Seconds of the host per layer, micro-batch and tensor-parallel rank, where it cannot run ahead."""
    tp_hop: Positive = 1e-4
    """Seconds per layer, micro-batch and rank of tensor-parallel rings through several nodes."""
    shard_hop: Positive = 3e-5
    """Seconds per layer and replica of a sharded optimizer, whose rings carry one layer at a time."""
    all_reduce_stall: Positive = 0.1
    """Seconds per gigabyte of gradients that replicas all-reduce on MANY_NODES nodes, where their rings stall."""
    shared_network: Positive = 1e-4
    """Seconds per gigabyte and node that the same gradients take longer: larger networks have less for each node."""


@dataclass(frozen=True, slots=True)
class HostWaits:
    """Seconds of a step for which the host waits, by the axis of the messages."""

    tp: Array
    pp: Array
    dp: Array


def host_waits(
    layouts: LayoutColumns,
    machines: MachineColumns,
    sizes: StageSizes,
    slot: Array,
    w: WaitConstants,
    full: Array | float = 0.0,
) -> HostWaits:
    """Waits of every layout; `slot` is the compute of the slowest stage for one micro-batch.

    `full` is the part of the device's memory that is in use at the peak.
    """
    nodes = np.maximum(1.0, layouts.ranks / machines.devices_per_node)
    stalled = np.minimum(1.0, nodes / MANY_NODES) ** w.stall_growth
    held = layouts.host_waits
    layers = np.maximum(sizes.first, sizes.inner)
    # pipelines never run ahead, because each micro-batch begins with a message
    behind = np.where(layouts.tp > 1, np.where(layouts.pp > 1, 1.0, stalled), 0.0)
    far = np.where(layouts.tp > machines.devices_per_node, w.tp_hop, 0.0)
    host = layers * layouts.tp * (far + w.tp_wait * behind)
    longer = (slot**4 + host**4) ** 0.25 - slot  # host and device work at the same time
    gradients = layouts.gradient_message_bytes * sizes.weights_per_rank / GIGABYTE
    reduced = gradients * (w.shared_network * nodes + w.all_reduce_stall * stalled)
    pieces = w.shard_hop * layers * layouts.dp
    return HostWaits(
        tp=held * (layouts.micro + layouts.pp - 1.0) * longer,
        pp=held * w.stage_stall * np.where(full > NEARLY_FULL, 1.0, stalled) * stage_messages(layouts),
        dp=held * np.where(layouts.zero >= 1, pieces, np.where((layouts.dp > 1) & (nodes > 1), reduced, 0.0)),
    )


def stage_messages(layouts: LayoutColumns) -> Array:
    """Messages on the longest way of a step: an inner stage receives and sends, forward and backward."""
    m, pp = layouts.micro * layouts.virtual, layouts.pp
    inner = 4.0 * m + 2.0 * (pp - 2.0)
    return np.where(pp > 2, inner, np.where(pp > 1, 2.0 * m, 0.0))
