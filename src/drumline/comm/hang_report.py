"""Name the ranks that a hang waits for, from the status of every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .call_check import ranks_text
from .rank_status import StatusReading

STOPPED = ("T", "t")
"""States of a stopped process, as in /proc/PID/stat."""
ENDED = ("Z", "X", "ended")
"""States of a process that has ended."""
_NO_STATES: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HangReport:
    """Which ranks the others wait for, and what every rank does."""

    suspects: tuple[int, ...]
    """The ranks that keep the others waiting; empty if the statuses do not show them."""
    text: str
    """One sentence about the suspects, then one line for each rank."""

    def __str__(self) -> str:
        return self.text


def hang_report(
    readings: Mapping[int, StatusReading], *, states: Mapping[int, str] = _NO_STATES, silent_for: float
) -> HangReport:
    """Find the ranks that keep the others waiting for `silent_for` seconds.

    `readings` has the status of each rank that has one, `states` the state of its process, if known: a letter of
    /proc/PID/stat or `ended`. The first of these rules that finds ranks decides: a process has ended or is stopped; a
    rank has no status; others wait for it, directly or through others, while it waits for none; it has started fewer
    collectives than others; it is in another collective than most; it is outside of the collective that the others
    are in. The last three compare all ranks, and count only where no rank states whom it waits for. Where no rank is
    known to be in a collective, as over NCCL, the ranks that are behind in their steps or phases are named.
    """
    ranks = sorted({*readings, *states})
    reason, suspects = _suspects(ranks, readings, states)
    head = f"no progress for {silent_for:.0f} s"
    if suspects:
        verb = "is" if len(suspects) == 1 else "are"
        head += f": {ranks_text(suspects)} {reason.format(verb=verb)}"
    elif any(status.in_collective for status in readings.values()):
        head += ": all ranks are in the same operation, so none can be named"
    else:
        head += ": no rank is in a collective, or behind the others, as far as is known"
    lines = [f"rank {rank}{_state_text(states.get(rank, ''))}: {_line(readings.get(rank))}" for rank in ranks]
    return HangReport(tuple(suspects), "\n  ".join([head, *lines]))


def _suspects(
    ranks: list[int], readings: Mapping[int, StatusReading], states: Mapping[int, str]
) -> tuple[str, list[int]]:
    """Why ranks are suspects, and which."""
    rules: list[tuple[str, Iterable[int]]] = [
        ("{verb} gone: the process has ended", (r for r in ranks if states.get(r, "") in ENDED)),
        ("{verb} stopped (state T)", (r for r in ranks if states.get(r, "") in STOPPED)),
        ("{verb} silent: no status", (r for r in ranks if r not in readings)),
    ]
    if any(status.in_collective and status.peers for status in readings.values()):
        rules += _by_waits(readings)
    elif not any(status.in_collective for status in readings.values()):
        rules.append(("{verb} behind: others are in a later step or phase", ranks_behind(readings)))
    else:
        rules += _by_calls(ranks, readings)
    for reason, ranks_of_rule in rules:
        if suspects := list(ranks_of_rule):
            return reason, suspects
    return "", []


def _by_waits(readings: Mapping[int, StatusReading]) -> list[tuple[str, Iterable[int]]]:
    """Follow who waits for whom: groups have their own calls, so numbers are compared within a group only."""
    waits = {r: _missing_peers(r, status, readings) for r, status in readings.items() if status.in_collective}
    awaited = {peer for peers in waits.values() for peer in peers}
    missing = sorted(peer for peer in awaited if peer not in waits)
    calls = {status.collective for status in readings.values() if status.in_collective}
    return [
        ("{verb} missing: the others wait for it" if len(missing) == 1 else "{verb} missing: others wait", missing),
        ("{verb} in different calls, each waiting for another", sorted(awaited) if len(calls) > 1 else ()),
    ]


def _missing_peers(rank: int, status: StatusReading, readings: Mapping[int, StatusReading]) -> list[int]:
    """The peers that are not known to have made the call that a rank is in."""

    def arrived(peer: int) -> bool:
        other = readings[peer]
        return bool(status.group) and other.group == status.group and other.number >= status.number

    return [peer for peer in status.peers if peer != rank and peer in readings and not arrived(peer)]


def _by_calls(ranks: list[int], readings: Mapping[int, StatusReading]) -> list[tuple[str, Iterable[int]]]:
    known = {r: readings[r] for r in ranks if r in readings}
    most = max(status.calls for status in known.values())
    (usual, count), *_ = Counter(status.collective for status in known.values()).most_common()
    majority = 2 * count > len(known)
    return [
        (
            "{verb} missing: fewer collectives started than elsewhere",
            (r for r, status in known.items() if status.calls < most),
        ),
        (
            "{verb} in another collective than the others" if majority else "{verb} in different collectives",
            (r for r, status in known.items() if status.collective != usual or not majority),
        ),
        (
            "{verb} missing: outside of the collective that the others wait in",
            (r for r, status in known.items() if not status.in_collective),
        ),
    ]


def ranks_behind(readings: Mapping[int, StatusReading]) -> tuple[int, ...]:
    """The ranks that are in an earlier step than others, or else in an earlier phase of the same step.

    Phases are compared by their number, if all ranks had equally many in the step before.
    """
    working = {rank: status for rank, status in readings.items() if status.place != "ended"}
    if len({status.step for status in working.values()}) == 1:
        if len({status.phases_before for status in working.values()}) > 1:
            return ()
        at = {rank: status.phases for rank, status in working.items()}
    else:
        at = {rank: status.step for rank, status in working.items()}
    return tuple(rank for rank, place in sorted(at.items()) if place < max(at.values()))


def _state_text(state: str) -> str:
    if state in ENDED:
        return " (ended)"
    return " (stopped)" if state in STOPPED else ""


def _line(status: StatusReading | None) -> str:
    return "no status" if status is None else str(status)
