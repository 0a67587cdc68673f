"""Compose schedules: split into overlapping segments, with renamed ranks, embedded, or several in parallel."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..core.errors import InputError
from .contracts import pair, share
from .spec import Range, Round, Rounds, Schedule, Send, even_ranges

_Spread = Callable[[int], Iterable[int]]


@dataclass(frozen=True, slots=True)
class SegmentedSplit:
    """Split of a segmented schedule: every chunk of the original split in equal parts."""

    split: Callable[[int, int], tuple[Range, ...]]
    parts: int

    def __call__(self, elements: int, chunks: int) -> tuple[Range, ...]:
        """Part s of chunk c is number c * parts + s."""
        return tuple(
            (start + a, start + b)
            for start, stop in self.split(elements, chunks // self.parts)
            for a, b in even_ranges(stop - start, self.parts)
        )


def segmented(schedule: Schedule, n: int) -> Schedule:
    """The schedule with each chunk split in n parts, part s running s rounds behind part 0.

    Parts are independent, so the result is the same. It takes n-1 rounds more; where ranks were idle in most rounds (a
    chain, a tree), each round carries 1/n of the bytes.
    """
    if n < 1:
        raise InputError(f"{schedule.name} in {n} segments", rule="at least one segment")
    if n == 1:
        return schedule
    return dataclasses.replace(
        schedule,
        name=f"{schedule.name}/{n}",
        chunks=schedule.chunks * n,
        split=SegmentedSplit(schedule.split, n),
        rounds=Rounds(_segmented, (schedule.rounds, n)),
    )


def reordered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """The schedule with renamed ranks: order[i] does what rank i did, with its own chunks.

    This orders rings by measured links. Scans are refused: their ranks are in a fixed line.
    """
    order, names = tuple(order), schedule.contract.chunk_names
    if sorted(order) != list(range(schedule.p)):
        raise InputError(
            f"{schedule.name} in the order {', '.join(map(str, order))}",
            rule=f"each of the ranks 0 to {schedule.p - 1} once",
        )
    if names == "line" or (names == "shares" and schedule.chunks % schedule.p):
        raise InputError(f"{schedule.name} in another order", rule=f"{schedule.contract.text}: ranks keep their places")
    if order == tuple(range(schedule.p)):
        return schedule
    chunks = tuple(_renamed_chunk(schedule, chunk, order) for chunk in range(schedule.chunks))
    root = order[schedule.root] if schedule.contract.rooted else schedule.root
    return dataclasses.replace(
        schedule,
        name=f"{schedule.name} in another order",
        root=root,
        rounds=Rounds(_reordered, (schedule.rounds, order, chunks)),
    )


def embedded(rounds: Iterable[Sequence[Send]], ranks: Sequence[int], chunks: _Spread) -> Iterator[list[Send]]:
    """Rounds of a smaller schedule inside a larger one: rank i is ranks[i], chunk c is all of chunks(c)."""
    for sends in rounds:
        yield [Send(ranks[s.src], ranks[s.dst], chunk, s.reduce) for s in sends for chunk in chunks(s.chunk)]


def in_parallel(parts: Iterable[Iterable[Sequence[Send]]]) -> Iterator[list[Send]]:
    """Run several schedules at the same time: round k is round k of each part that has one."""
    for rounds in itertools.zip_longest(*parts, fillvalue=()):
        yield [send for sends in rounds for send in sends]


def _segmented(rounds: Iterable[Round], n: int) -> Iterator[list[Send]]:
    latest: deque[Round] = deque(maxlen=n)  # the round of part 0 comes first
    for sends in itertools.chain(rounds, [()] * (n - 1)):
        latest.appendleft(sends)
        if not any(latest):
            return  # a single rank has no rounds
        yield [Send(s.src, s.dst, s.chunk * n + part, s.reduce) for part, own in enumerate(latest) for s in own]


def _reordered(rounds: Iterable[Round], order: Sequence[int], chunks: Sequence[int]) -> Iterator[list[Send]]:
    for sends in rounds:
        yield [Send(order[s.src], order[s.dst], chunks[s.chunk], s.reduce) for s in sends]


def _renamed_chunk(schedule: Schedule, chunk: int, order: Sequence[int]) -> int:
    """The chunk with the same meaning for the renamed ranks."""
    names, p = schedule.contract.chunk_names, schedule.p
    if names == "free":
        return chunk
    if names == "shares":
        per = schedule.chunks // p
        return order[share(schedule, chunk)] * per + chunk % per
    src, dst = pair(schedule, chunk)
    per = schedule.chunks // (p * p)
    return (order[src] * p + order[dst]) * per + chunk % per
