"""Prefix sums over ranks: scan with the rank's own contribution, exscan without it.

An exscan first shifts every contribution one rank up and then scans over ranks 1 to p-1.
"""

from __future__ import annotations

from collections.abc import Iterator

from .contracts import EXSCAN, SCAN
from .spec import Rounds, Schedule, Send


def linear_scan(p: int) -> Schedule:
    """p-1 rounds of one message of m bytes: the sum goes up the ranks, each keeps what it forwards."""
    return Schedule("linear_scan", SCAN, p, 1, Rounds(_linear, (p, 0)), order="rank")


def doubling_scan(p: int) -> Schedule:
    """ceil(log2 p) rounds of m bytes: add what comes from 1, 2, 4, ... ranks below, so the reach doubles each round."""
    return Schedule("doubling_scan", SCAN, p, 1, Rounds(_doubling, (p, 0)), order="rank")


def linear_exscan(p: int) -> Schedule:
    """p-1 rounds of m bytes: one to shift, p-2 to scan."""
    return Schedule("linear_exscan", EXSCAN, p, 1, Rounds(_exscan_linear, (p,)), order="rank")


def doubling_exscan(p: int) -> Schedule:
    """1 + ceil(log2(p-1)) rounds of m bytes: one to shift, the others to scan."""
    return Schedule("doubling_exscan", EXSCAN, p, 1, Rounds(_exscan_doubling, (p,)), order="rank")


def _linear(p: int, first: int) -> Iterator[list[Send]]:
    for r in range(first, p - 1):
        yield [Send(r, r + 1, 0, True)]


def _doubling(p: int, first: int) -> Iterator[list[Send]]:
    distance = 1
    while first + distance < p:
        yield [Send(r, r + distance, 0, True) for r in range(first, p - distance)]
        distance *= 2


def _shift(p: int) -> Iterator[list[Send]]:
    if p > 1:
        yield [Send(r, r + 1, 0, False) for r in range(p - 1)]


def _exscan_linear(p: int) -> Iterator[list[Send]]:
    yield from _shift(p)
    yield from _linear(p, 1)


def _exscan_doubling(p: int) -> Iterator[list[Send]]:
    yield from _shift(p)
    yield from _doubling(p, 1)
