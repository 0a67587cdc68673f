"""What the engine and a trace tell better than the software behind published runs: how long a host takes to start a
block's operators, the time between two steps, and the bytes that a user's own operators move.
"""

from __future__ import annotations

from dataclasses import replace

from ...clusters import Cluster
from ...models.profile import Layer, Profile
from ..step import between_steps
from ..work import start_of
from .compute import HALF, HEAD_PASSES, HIDDEN_PASSES, INNER_PASSES
from .constants import Constants
from .inputs import Models

STARTED, CASTS = 10, 10
"""Operators of a GPT's block in 16 bits, forward, as traced: four products, attention, norms, sums; and every cast."""


def as_run(constants: Constants, profile: Profile, model: Models, cluster: Cluster) -> Constants:
    """The constants of a device's profile for this engine and this model."""
    device = cluster.device
    each = device.host_overhead.get("forward", device.launch)
    block_seconds = STARTED * each + CASTS * device.host_overhead.get("cast", each)
    found = replace(constants, step=between_steps(cluster), layer=block_seconds)
    if not profile.precision:  # a formula, or a trace in fp32, which has no casts
        return found
    block = next(x for x in profile.layers if any(op.kind == "attention" for op in x.ops))
    started = sum(op.count * start_of(op, device) for op in block.ops if op.phase == "forward")
    return replace(found, layer=started, passes_eager=passes(block, model), passes_rotary=1.0)


def passes(block: Layer, model: Models) -> float:
    """What all but products and attention move in a traced block, forward and backward, over what must move."""
    moved = sum(op.bytes.per_sample * op.count for op in block.ops if not op.kind.startswith(("matmul", "attention")))
    heads = (model.heads + 2.0 * model.kv_heads) * model.head
    inner = (1.0 + model.gated) * model.inner
    must = sum(
        HALF * model.sequence * (a * model.hidden + b * inner + e * heads)
        for a, b, e in zip(HIDDEN_PASSES, INNER_PASSES, HEAD_PASSES, strict=True)
    )
    return float(moved / must[0])  # type: ignore[index]  # a sum of arrays
