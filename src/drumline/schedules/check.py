"""Prove collectives by symbolic execution: what every rank ends with, and by which additions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.errors import VerificationError
from .spec import Round, Schedule, Send


@dataclass(frozen=True, slots=True)
class ScheduleProof:
    """Proof that a schedule keeps its contract, and properties found on the way."""

    schedule: str
    rounds: int
    sends: int
    identical: bool
    """Whether ranks with the same sum computed it by the same additions, and so have the same bits."""
    in_rank_order: bool
    """Whether operands are in rank order, as operations that do not commute require."""

    def __str__(self) -> str:
        bits = "the same bits on all ranks" if self.identical else "bits may differ between ranks"
        return f"proved: {self.schedule} ({self.rounds} rounds, {self.sends} sends, {bits})"


class _Value(NamedTuple):
    """Symbolic content of a chunk on a rank."""

    ranks: int
    """Contributions as a bit set: bit r for rank r."""
    first: int
    last: int
    """Ranks of the leftmost and the rightmost operand."""
    sorted: bool
    """Whether the operands are in rank order."""
    tree: int
    """Number of its expression; equal numbers mean equal bits."""
    since: int
    """The round that wrote it, -1 for the start."""


@dataclass(slots=True)
class _Trees:
    """Numbered expressions. Addition commutes exactly, also on floats, so a+b and b+a are one."""

    numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, a: int, b: int) -> int:
        # leaves are numbered -1-rank, sums from 0
        return self.numbers.setdefault((a, b) if a < b else (b, a), len(self.numbers))


_State = dict[tuple[int, int], _Value]
Contents = dict[tuple[int, int], tuple[int, ...]]
"""(rank, chunk) -> the ranks whose contributions the chunk contains there."""


def prove(schedule: Schedule) -> ScheduleProof:
    """Prove that every rank ends with what the contract promises, each contribution exactly once.

    Raises VerificationError for a send of a chunk that the rank does not have, a contribution that is lost or added
    twice (where the contract forbids it), a chunk written twice in one round, and unknown ranks or chunks.
    """
    s, trees, state = schedule, _Trees(), _start(schedule)
    rounds = sends = 0
    for k, group in enumerate(s.rounds):
        _round(s, k, group, state, trees)
        rounds, sends = k + 1, sends + len(group)
    identical, in_order = _end(s, state)
    return ScheduleProof(f"{s.name} p={s.p}", rounds, sends, identical, in_order)


def contents(schedule: Schedule) -> Iterator[tuple[Round, Contents]]:
    """Before the first round and after each: its sends, and the ranks whose contributions each chunk contains."""
    trees, state = _Trees(), _start(schedule)
    for k, group in enumerate(((), *schedule.rounds), -1):
        _round(schedule, k, group, state, trees)
        yield group, {place: _bits(value.ranks) for place, value in state.items()}


def _start(s: Schedule) -> _State:
    """Contributions that every rank has before the first round."""
    start = [_Value(1 << rank, rank, rank, True, -1 - rank, -1) for rank in range(s.p)]
    return {
        (rank, chunk): start[rank]
        for rank in range(s.p)
        for chunk in range(s.chunks)
        if s.contract.before(s, rank, chunk)
    }


def _bits(ranks: int) -> tuple[int, ...]:
    return tuple(r for r in range(ranks.bit_length()) if ranks >> r & 1)


def _round(s: Schedule, k: int, group: tuple[Send, ...], state: _State, trees: _Trees) -> None:
    """Apply one round; every send reads the state before it."""
    writes: dict[tuple[int, int], _Value] = {}
    replaced: set[tuple[int, int]] = set()
    for send in group:
        _exists(s, k, send)
        value = state.get((send.src, send.chunk))
        if value is None:
            raise _wrong(
                s, f"rank {send.src} sends chunk {send.chunk}, which it does not have", k, send.src, send.chunk
            )
        place = (send.dst, send.chunk)
        if place in replaced or (place in writes and not send.reduce):
            raise _wrong(s, f"rank {send.dst} receives chunk {send.chunk} twice in the same round", k, *place)
        if not send.reduce:
            replaced.add(place)
            writes[place] = value._replace(since=k)
            continue
        local = writes.get(place) or state.get(place)
        if local is None:
            raise _wrong(s, f"rank {send.dst} adds to chunk {send.chunk}, which it does not have", k, *place)
        twice = local.ranks & value.ranks
        if twice and not s.contract.idempotent:
            what = f"rank {send.dst} adds rank {_lowest(twice)}'s contribution to chunk {send.chunk} twice"
            raise _wrong(s, what, k, *place)
        first, second = (value, local) if s.received_first(send) else (local, value)
        writes[place] = _add(first, second, k, trees)
    state.update(writes)


def _add(a: _Value, b: _Value, k: int, trees: _Trees) -> _Value:
    ordered = a.sorted and b.sorted and a.last < b.first
    return _Value(a.ranks | b.ranks, a.first, b.last, ordered, trees.add(a.tree, b.tree), k)


def _lowest(ranks: int) -> int:
    return (ranks & -ranks).bit_length() - 1


def _exists(s: Schedule, k: int, send: Send) -> None:
    for word, n, limit in (("rank", send.src, s.p), ("rank", send.dst, s.p), ("chunk", send.chunk, s.chunks)):
        if not 0 <= n < limit:
            raise _wrong(s, f"the send {send} names {word} {n} of {limit}", k, send.src, send.chunk)
    if send.src == send.dst:
        raise _wrong(s, f"rank {send.src} sends chunk {send.chunk} to itself", k, send.src, send.chunk)


def _end(s: Schedule, state: _State) -> tuple[bool, bool]:
    """Compare the end with the contract; return (bits are identical, operands are in rank order)."""
    trees: dict[tuple[int, int], int] = {}
    identical = in_order = True
    for rank in range(s.p):
        for chunk in range(s.chunks):
            expected = s.contract.after(s, rank, chunk)
            if expected is None:
                continue
            value = state.get((rank, chunk))
            if value is None:
                raise _wrong(s, f"rank {rank} ends without chunk {chunk}", -1, rank, chunk)
            due = sum(1 << r for r in expected)
            if lost := due & ~value.ranks:
                what = f"rank {rank} ends without rank {_lowest(lost)}'s contribution to chunk {chunk}"
                raise _wrong(s, what, value.since, rank, chunk)
            if surplus := value.ranks & ~due:
                what = f"rank {rank} ends with rank {_lowest(surplus)}'s contribution to chunk {chunk}"
                raise _wrong(s, what, value.since, rank, chunk)
            # in a scan ranks end with different sums: only equal sums are compared
            identical = identical and trees.setdefault((chunk, due), value.tree) == value.tree
            in_order = in_order and value.sorted
    return identical, in_order


def _wrong(s: Schedule, what: str, k: int, rank: int, chunk: int) -> VerificationError:
    when = f"round {k}" if k >= 0 else "before any round"
    return VerificationError(
        what, where=f"{s.name} p={s.p}: {when}, rank {rank}, chunk {chunk}", rule=f"{s.collective}: {s.contract.text}"
    )
