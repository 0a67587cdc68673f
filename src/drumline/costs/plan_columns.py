"""Plans as columns of numbers, for cost models that score many plans at once with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..plans import Plan

Array = npt.NDArray[np.float64]
T = TypeVar("T", bound="Columns")

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2p")
"""Pipeline schedules by code. The last one keeps twice the activations of `zero-bubble` and has no bubble."""
RECOMPUTE = ("none", "selective", "full")
"""Recomputation by code. On a GPU, `selective` recomputes elementwise kernels and keeps the results of matmuls."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of equal length; a single number stands for a constant column."""

    @classmethod
    def of(cls: type[T], **columns: object) -> T:
        """Build from anything that numpy turns into arrays of one length, or numbers."""
        arrays = {k: np.atleast_1d(np.asarray(v, dtype=np.float64)) for k, v in cls.complete(columns).items()}
        n = max(len(a) for a in arrays.values())
        return cls(**{k: np.broadcast_to(a, (n,)) for k, a in arrays.items()})

    @classmethod
    def complete(cls, columns: dict[str, object]) -> dict[str, object]:
        """The columns with those that follow from others; a subclass may have some."""
        return columns

    def take(self: T, rows: npt.NDArray[np.intp]) -> T:
        """Select rows."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True)
class PlanColumns(Columns):
    """Plans, one per row, by the keys that vectorised cost models read."""

    dp: Array
    shard: Array
    """Replicas that share one sharded copy; all replicas where nothing is sharded."""
    zero: Array
    tp: Array
    cp: Array
    pp: Array
    virtual: Array
    schedule: Array
    """Index into SCHEDULES; 0 without a pipeline."""
    micro: Array
    recompute: Array
    """Index into RECOMPUTE."""
    compile: Array

    @property
    def ranks(self) -> Array:
        """Ranks of each plan."""
        return self.dp * self.tp * self.cp * self.pp

    @classmethod
    def from_plans(cls, plans: Sequence[Plan]) -> PlanColumns:
        """One row per plan."""
        return cls.of(
            dp=[p.dp for p in plans],
            shard=[p.shards if p.zero else p.dp for p in plans],
            zero=[p.zero for p in plans],
            tp=[p.tp for p in plans],
            cp=[p.cp for p in plans],
            pp=[p.pp for p in plans],
            virtual=[p.virtual for p in plans],
            schedule=[SCHEDULES.index(p.schedule) if p.pp > 1 else 0 for p in plans],
            micro=[p.micro for p in plans],
            recompute=[RECOMPUTE.index(p.recompute) for p in plans],
            compile=[p.compile for p in plans],
        )

    def plan(self, i: int, base: Plan) -> Plan:
        """Row `i` as a plan; keys without a column are those of `base`."""
        dp, shard, zero, pp = (int(column[i]) for column in (self.dp, self.shard, self.zero, self.pp))
        return replace(
            base,
            dp=dp,
            shard=shard if zero and shard < dp else 0,
            zero=zero,
            tp=int(self.tp[i]),
            cp=int(self.cp[i]),
            pp=pp,
            virtual=int(self.virtual[i]),
            schedule=SCHEDULES[int(self.schedule[i])] if pp > 1 else base.schedule,
            micro=int(self.micro[i]),
            recompute=RECOMPUTE[int(self.recompute[i])],
            compile=bool(self.compile[i]),
        )


@dataclass(frozen=True, slots=True)
class PlanScores:
    """Step time and approximate peak memory, one entry per plan."""

    seconds: Array
    bytes: Array
