"""The exchanges that textbooks start from: every rank sends to every other one itself, in turns.

They are counted next to the algorithms that run (`theory.scaling`) and are not among ALGORITHMS: a ring takes as long
as the best of them and sends to one neighbour only.
"""

from __future__ import annotations

from collections.abc import Iterator

from .contracts import ALL_GATHER, ALL_REDUCE
from .spec import Rounds, Schedule, Send


def exchange_by_pairs(p: int) -> Schedule:
    """p(p-1) rounds of one message: each rank sends its buffer to each other one, one message at a time.

    The buffers of all ranks together are the m bytes that are gathered; every rank then adds them up.
    """
    return Schedule("exchange_by_pairs", ALL_GATHER, p, p, Rounds(_by_pairs, (p,)))


def exchange_in_turns(p: int) -> Schedule:
    """The same messages in p-1 rounds: in round k, each rank sends to the rank k+1 further."""
    return Schedule("exchange_in_turns", ALL_GATHER, p, p, Rounds(_in_turns, (p,)))


def partitioned_exchange(p: int) -> Schedule:
    """2(p-1) rounds of p sends of m/p bytes: in turns, every share to its owner, and every sum to all."""
    return Schedule("partitioned_exchange", ALL_REDUCE, p, p, Rounds(_partitioned, (p,)))


def _by_pairs(p: int) -> Iterator[list[Send]]:
    for sends in _in_turns(p):
        for send in sends:
            yield [send]


def _in_turns(p: int) -> Iterator[list[Send]]:
    for k in range(1, p):
        yield [Send(r, (r + k) % p, r, False) for r in range(p)]


def _partitioned(p: int) -> Iterator[list[Send]]:
    for k in range(1, p):
        yield [Send(r, (r + k) % p, (r + k) % p, True) for r in range(p)]
    yield from _in_turns(p)
