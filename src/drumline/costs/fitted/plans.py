"""Plans as the arrays that the closed form reads: every key as the engine carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...plans import Plan
from .inputs import SCHEDULES, Array, Columns, Layouts, recomputed

RECOMPUTE = ("none", "selective", "full")
"""Recomputation by its code. Selective computes passes again and keeps products: the engine's choice on a GPU."""
_SHARES = np.array([recomputed(name) for name in ("none", "passes", "full")])
_DEFAULT = Plan()


@dataclass(frozen=True, slots=True)
class Rows(Columns):
    """Plans side by side: the keys that the closed form reads, as numbers."""

    dp: Array
    shard: Array
    """Over how many replicas one sharded copy lies: `Plan.shards`, or all replicas where nothing is sharded."""
    zero: Array
    tp: Array
    cp: Array
    pp: Array
    virtual: Array
    order: Array
    """Index into SCHEDULES."""
    micro: Array
    recompute: Array
    """Index into RECOMPUTE."""
    compile: Array

    @property
    def ranks(self) -> Array:
        """All ranks."""
        return self.dp * self.tp * self.cp * self.pp


def rows_of(plans: Sequence[Plan]) -> Rows:
    """Plans that the closed form knows, column by column."""
    return Rows.of(
        dp=[p.dp for p in plans],
        shard=[p.shards if p.zero else p.dp for p in plans],
        zero=[p.zero for p in plans],
        tp=[p.tp for p in plans],
        cp=[p.cp for p in plans],
        pp=[p.pp for p in plans],
        virtual=[p.virtual for p in plans],
        order=[SCHEDULES.index(p.schedule) if p.pp > 1 else 0 for p in plans],
        micro=[p.micro for p in plans],
        recompute=[RECOMPUTE.index(p.recompute) for p in plans],
        compile=[p.compile for p in plans],
    )


def plan_of(rows: Rows, i: int, base: Plan) -> Plan:
    """One of the rows as a plan; what they do not hold is that of `base`."""
    dp, shard, zero, pp = (int(column[i]) for column in (rows.dp, rows.shard, rows.zero, rows.pp))
    return replace(
        base,
        dp=dp,
        shard=shard if zero and shard < dp else 0,
        zero=zero,
        tp=int(rows.tp[i]),
        cp=int(rows.cp[i]),
        pp=pp,
        virtual=int(rows.virtual[i]),
        schedule=SCHEDULES[int(rows.order[i])] if pp > 1 else base.schedule,
        micro=int(rows.micro[i]),
        recompute=RECOMPUTE[int(rows.recompute[i])],
        compile=bool(rows.compile[i]),
    )


def known(plan: Plan) -> Plan:
    """The plan without what the closed form has no price for: host memory, parts of layers, stages by name, ..."""
    return replace(
        plan,
        offload="none",
        chunk=1,
        split=(),
        ep=1,
        compress="none",
        bucket=_DEFAULT.bucket,
        static=False,
        schedule="1f1b" if plan.schedule == "naive" else plan.schedule,
        backend="auto",
        allreduce="auto",
        sync="allreduce",
        # one rank has nothing to shard: with zero=3 it only moves layers between host and device
        zero=plan.zero if plan.dp > 1 else 0,
        shard=plan.shard if plan.dp > 1 else 0,
    )


def layouts_of(rows: Rows, batch: int) -> Layouts:
    """As the engine runs them: parameters and gradients in fp32, computed with in 16 bits, operator by operator.

    Gradients travel in fp32, beside the backward where modules are replicated or sharded; a captured graph, which split
    models are, sends them after it. Norms are not split along the sequence, no message hides behind a product.
    """
    shares = _SHARES[rows.recompute.astype(int)]
    split = rows.tp * rows.cp * rows.pp > 1
    beside = np.where(rows.pp > 1, 0.0, np.where(split & (rows.zero == 0), 0.0, 1.0))
    return Layouts.of(
        tp=rows.tp,
        pp=rows.pp,
        virtual=rows.virtual,
        dp=rows.dp,
        zero=rows.zero,
        shard=rows.shard,
        cp=rows.cp,
        ep=1,
        sequence_split=0,
        slice=np.ceil(np.ceil(batch / rows.micro) / rows.dp),
        micro=rows.micro,
        again_products=shares[:, 0],
        again_attention=shares[:, 1],
        again_passes=shares[:, 2],
        order=rows.order,
        fused=1,
        fusion=1 + rows.compile,
        low=0,
        gradient=4,
        master=0,
        added=0,
        copied=0,
        overlap_dp=beside,
        overlap_tp=0,
        wire=4,
        spread=4,
        ahead=0,
        scattered=1,
        often=(rows.zero == 2) & (rows.pp == 1),
    )
