"""The table of pipeline schedules by the name in a plan. To add one, write a function and a line in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ...core.errors import InputError, nearest
from .asynchronous import pipedream, pipedream_2bw
from .basic import gpipe, interleaved, naive, one_f_one_b
from .order import Pipeline, at_least_one
from .zero_bubble import zero_bubble_h1, zero_bubble_v


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """How a schedule is built, and over how many stages per rank."""

    build: Callable[[int, int, int], Pipeline]
    """(ranks, micro-batches, stages per rank) -> schedule."""
    virtual: tuple[int, ...] = (1,)
    """Supported numbers of stages per rank; empty means any."""


ORDERS: dict[str, PipelineOrder] = {
    "naive": PipelineOrder(lambda p, m, _: naive(p, m)),
    "gpipe": PipelineOrder(lambda p, m, _: gpipe(p, m)),
    "1f1b": PipelineOrder(lambda p, m, _: one_f_one_b(p, m)),
    "interleaved": PipelineOrder(interleaved, virtual=()),
    "zero-bubble": PipelineOrder(
        lambda p, m, v: zero_bubble_h1(p, m) if v == 1 else zero_bubble_v(p, m), virtual=(1, 2)
    ),
    "pipedream": PipelineOrder(lambda p, m, _: pipedream(p, m)),
    "pipedream-2bw": PipelineOrder(lambda p, m, _: pipedream_2bw(p, m)),
}
"""`schedule` of a plan -> schedule. The last two are some batches, of m micro-batches in all."""


def check_order(name: str, ranks: int, micros: int, virtual: int = 1) -> None:
    """Refuse a schedule that does not exist, without building it."""
    if name not in ORDERS:
        raise InputError(
            f"unknown pipeline schedule {name!r}", rule=f"known: {', '.join(ORDERS)}", fix=nearest(name, ORDERS)
        )
    at_least_one(ranks=ranks, micros=micros, virtual=virtual)
    known = ORDERS[name].virtual
    if known and virtual not in known:
        raise InputError(
            f"{name} with {virtual} stages per rank",
            rule=f"{name} takes virtual={' or '.join(map(str, known))}",
            fix=f"schedule=interleaved takes virtual={virtual}",
        )


@lru_cache(maxsize=64)
def pipeline_order(name: str, ranks: int, micros: int, virtual: int = 1) -> Pipeline:
    """The schedule by its name in a plan, over ranks * virtual stages."""
    check_order(name, ranks, micros, virtual)
    return ORDERS[name].build(ranks, micros, virtual)
