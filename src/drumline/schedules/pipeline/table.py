"""The table of pipeline orders by the name that a plan gives them. A new one is a function and a line in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ...core.errors import InputError, nearest
from .h1 import zero_bubble_h1
from .interleaved import interleaved
from .order import Pipeline, at_least_one
from .plain import gpipe, naive, one_f_one_b
from .vshape import zero_bubble_v


@dataclass(frozen=True, slots=True)
class Order:
    """How an order is built, and over how many stages a rank."""

    build: Callable[[int, int, int], Pipeline]
    """(ranks, micro-batches, stages a rank) -> order."""
    virtual: tuple[int, ...] = (1,)
    """The numbers of stages a rank that it is made for; none means any."""


ORDERS: dict[str, Order] = {
    "naive": Order(lambda p, m, _: naive(p, m)),
    "gpipe": Order(lambda p, m, _: gpipe(p, m)),
    "1f1b": Order(lambda p, m, _: one_f_one_b(p, m)),
    "interleaved": Order(interleaved, virtual=()),
    "zero-bubble": Order(lambda p, m, v: zero_bubble_h1(p, m) if v == 1 else zero_bubble_v(p, m), virtual=(1, 2)),
}
"""The plan notation's `schedule` -> order."""


def check_order(name: str, ranks: int, micros: int, virtual: int = 1) -> None:
    """Refuse an order that does not exist, without building it."""
    if name not in ORDERS:
        raise InputError(
            f"unknown pipeline order {name!r}", rule=f"known: {', '.join(ORDERS)}", fix=nearest(name, ORDERS)
        )
    at_least_one(ranks=ranks, micros=micros, virtual=virtual)
    known = ORDERS[name].virtual
    if known and virtual not in known:
        raise InputError(
            f"{name} with {virtual} stages a rank",
            rule=f"{name} takes virtual={' or '.join(map(str, known))}",
            fix=f"schedule=interleaved takes virtual={virtual}",
        )


@lru_cache(maxsize=64)
def pipeline_order(name: str, ranks: int, micros: int, virtual: int = 1) -> Pipeline:
    """The order by the name that a plan gives it, over ranks * virtual stages."""
    check_order(name, ranks, micros, virtual)
    return ORDERS[name].build(ranks, micros, virtual)
