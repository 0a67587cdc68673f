"""Every layout of a transformer on a number of ranks, as arrays: a product of choices, and the rules within it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .constants import Constants
from .inputs import SCHEDULES, Array, Layouts, Machines, Models, recomputed
from .memory import DEVICE, step_memory
from .step import StepTimes, step_times

_RECOMPUTE = ("none", "selective", "full")
_ORDERS = tuple(range(1, len(SCHEDULES)))
_TURNS = SCHEDULES.index("interleaved")


@dataclass(frozen=True, slots=True)
class Priced:
    """Layouts with their price, the fastest that fits first."""

    layouts: Layouts
    times: StepTimes
    bytes: Array
    order: npt.NDArray[np.intp]
    """Those that fit, by time."""


def every_layout(model: Models, ranks: int, batch: int, *, node: int, most_cp: int = 8) -> Layouts:
    """All layouts of one model (one row) for `batch` samples a step, tensor parallelism inside a node."""
    layers, heads, keys = int(model.layers[0]), int(model.heads[0]), int(model.kv_heads[0])
    tp = [t for t in _divisors(ranks) if t <= node and heads % t == 0 and (keys % t == 0 or t % keys == 0)]
    pp = [p for p in _divisors(ranks) if p <= layers]
    cp = [c for c in _divisors(ranks) if c <= most_cp]
    even = [(t, p, c) for t in tp for p in pp for c in cp if ranks % (t * p * c) == 0 and _dealt(layers, p)]
    mesh = np.array(even, dtype=np.float64)
    axes = np.meshgrid(
        range(len(mesh)), [1 << i for i in range(9)], _divisors(layers), range(4), range(len(_RECOMPUTE)), (0, 1),
        _ORDERS, indexing="ij",
    )  # fmt: skip
    place, b, v, zero, again, split, order = (x.ravel() for x in axes)
    t, p, c = mesh[place].T
    d = ranks / (t * p * c)
    alone = p == 1
    keep = batch % (d * b) == 0
    keep &= (d > 1) | (zero == 0)
    keep &= (zero < 2) | alone  # a pipeline adds up whole gradients, and keeps its parameters
    keep &= (split == 0) | (t > 1)
    keep &= np.where(order == _TURNS, (v > 1) & ~alone & (layers % (p * v) == 0), v == 1)
    keep &= (order == _ORDERS[0]) | ~alone
    t, p, c, d, b, v, zero, again, split, order = (x[keep] for x in (t, p, c, d, b, v, zero, again, split, order))
    shares = np.array([recomputed(name) for name in _RECOMPUTE])[again]
    return Layouts.of(
        tp=t, pp=p, virtual=v, dp=d, zero=zero, shard=d, cp=c, ep=1, sequence_split=split, slice=b,
        micro=batch / (d * b), again_products=shares[:, 0], again_attention=shares[:, 1], again_passes=shares[:, 2],
        order=np.where(p == 1, 0, order), fused=1, fusion=0, low=0, gradient=4, master=1, added=1, copied=0,
        overlap_dp=1, overlap_tp=0,
    )  # fmt: skip


def price(model: Models, layouts: Layouts, machine: Machines, c: Constants, *, context: float) -> Priced:
    """All layouts of one model on one kind of machine; those that fit, by time."""
    rows = np.zeros(len(layouts.tp), dtype=np.intp)
    models, machines = model.take(rows), machine.take(rows)
    times = step_times(models, layouts, machines, c)
    held = step_memory(models, layouts, c, counted=float(DEVICE), context=context).total
    fits = np.flatnonzero(held <= machines.memory)
    return Priced(layouts, times, held, fits[np.argsort(times.total[fits], kind="stable")])


def _dealt(layers: int, stages: int) -> bool:
    """Whether layers divide evenly, or with one less at both ends."""
    return layers % stages == 0 or (layers + 2) % stages == 0


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
