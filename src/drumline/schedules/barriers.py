"""Barriers: messages without data, after which every rank has heard from every other."""

from __future__ import annotations

from collections.abc import Iterator

from .contracts import BARRIER, no_ranges
from .spec import Rounds, Schedule, Send


def central_barrier(p: int) -> Schedule:
    """2 rounds of p-1 messages through rank 0: all report to it, then it releases all."""
    return Schedule("central_barrier", BARRIER, p, 1, Rounds(_central, (p,)), split=no_ranges)


def dissemination_barrier(p: int) -> Schedule:
    """ceil(log2 p) rounds of p messages: each rank notifies the rank 1, 2, 4, ... positions further.

    Where p is not a power of two, some ranks are notified twice, which is harmless.
    """
    return Schedule("dissemination_barrier", BARRIER, p, 1, Rounds(_dissemination, (p,)), split=no_ranges)


def _central(p: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(r, 0, 0, True) for r in range(1, p)]
        yield [Send(0, r, 0, False) for r in range(1, p)]


def _dissemination(p: int) -> Iterator[list[Send]]:
    distance = 1
    while distance < p:
        yield [Send(r, (r + distance) % p, 0, True) for r in range(p)]
        distance *= 2
