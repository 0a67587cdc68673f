"""Layouts of the cost model for plans, as the engine runs them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...plans import Plan
from ...schedules import ASYNCHRONOUS
from ..plan_columns import PlanColumns
from .inputs import LayoutColumns, recompute_fractions

_FRACTIONS = np.array([recompute_fractions(name) for name in ("none", "elementwise", "full")])
"""By the codes of plan_columns.RECOMPUTE."""
_DEFAULT = Plan()


def covered_part(plan: Plan) -> Plan:
    """The plan without keys that the fitted model does not price: offload, chunk, split by name, ..."""
    return replace(
        plan,
        offload="none",
        chunk=1,
        split=(),
        ep=1,
        compress="none",
        bucket=_DEFAULT.bucket,
        static=False,
        schedule="1f1b" if plan.schedule in ("naive", *ASYNCHRONOUS) else plan.schedule,
        backend="auto",
        allreduce="auto",
        sync="allreduce",
        # a single replica has nothing to shard: zero=3 only moves layers between host and device
        zero=plan.zero if plan.dp > 1 else 0,
        shard=plan.shard if plan.dp > 1 else 0,
    )


def engine_layouts(plans: PlanColumns, batch_size: int, sequence: float = 0.0) -> LayoutColumns:
    """Layouts as the engine runs them: fp32 parameters and gradients, 16-bit compute, one kernel per operator.

    Attention is that of a torch which has kernels for its GPU. Gradients are reduced in fp32: during the backward where
    modules are replicated or sharded, after it where the model is split, which runs as a captured graph. Norms are
    split along a `sequence` that tp divides. No overlap of tensor-parallel communication.
    """
    fractions = _FRACTIONS[plans.recompute.astype(int)]
    split = plans.tp * plans.cp * plans.pp > 1
    overlap_dp = np.where(plans.pp > 1, 0.0, np.where(split & (plans.zero == 0), 0.0, 1.0))
    return LayoutColumns.of(
        tp=plans.tp,
        pp=plans.pp,
        virtual=plans.virtual,
        dp=plans.dp,
        zero=plans.zero,
        shard=plans.shard,
        cp=plans.cp,
        ep=1,
        sequence_parallel=np.where((sequence > 0) & (sequence % plans.tp == 0), 1, 0),
        micro_batch_size=np.ceil(np.ceil(batch_size / plans.micro) / plans.dp),
        micro=plans.micro,
        recompute_matmuls=fractions[:, 0],
        recompute_attention=fractions[:, 1],
        recompute_elementwise=fractions[:, 2],
        schedule=plans.schedule,
        fused_attention=1,
        portable_attention=0,
        elementwise_fusion=1 + plans.compile,
        fp8=0,
        gradient_bytes=4,
        master_weights=0,
        fused_accumulation=0,
        flat_buffers=0,
        overlap_dp=overlap_dp,
        overlap_tp=0,
        overlap_ep=0,
        gradient_message_bytes=4,
        parameter_message_bytes=4,
        overlap_parameters=0,
        reduce_scatter=1,
        reduce_every_micro_batch=(plans.zero == 2) & (plans.pp == 1),
    )
