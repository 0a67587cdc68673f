"""Orders the messages of a round by edge coloring: turns in which no rank sends or receives two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Pair = tuple[int, int]


def turns(pairs: Iterable[Pair]) -> dict[Pair, int]:
    """The turn of each (src, dst) of a round: as few turns as the busiest rank has messages in one direction.

    That is a coloring of the edges between senders and receivers. It always exists, so a round of equal messages takes
    as long as its busiest port and no longer, in whatever order they are given. Otherwise earlier ones go first.
    """
    pairs = list(pairs)
    fewest = max(Counter(src for src, _ in pairs).values(), default=0)
    fewest = max(fewest, *Counter(dst for _, dst in pairs).values(), 0)
    if fewest <= 1:
        return dict.fromkeys(pairs, 0)
    out: dict[int, dict[int, int]] = {}
    into: dict[int, dict[int, int]] = {}
    for src, dst in pairs:
        sends, receives = out.setdefault(src, {}), into.setdefault(dst, {})
        turn = _free(sends, receives)
        if turn >= fewest:
            # In the sender's free turn the receiver is busy: it swaps that turn with its own free one, and so do the
            # others along the path.
            turn = _free(sends)
            _swap(out, into, dst, turn, _free(receives))
        sends[turn], receives[turn] = dst, src
    return {(src, dst): turn for src, sends in out.items() for turn, dst in sends.items()}


def _free(*taken: dict[int, int]) -> int:
    turn = 0
    while any(turn in one for one in taken):
        turn += 1
    return turn


def _swap(out: dict[int, dict[int, int]], into: dict[int, dict[int, int]], dst: int, one: int, other: int) -> None:
    """Exchange turns `one` and `other` along the path that starts at receiver `dst` with turn `one`.

    The path cannot reach the sender that asked: it would arrive by turn `one`, which that sender has free.
    """
    path: list[tuple[int, int, int]] = []
    receiver, turn = dst, one
    while turn in into[receiver]:
        sender = into[receiver][turn]
        path.append((sender, receiver, turn))
        turn = one + other - turn
        if turn not in out[sender]:
            break
        receiver = out[sender][turn]
        path.append((sender, receiver, turn))
        turn = one + other - turn
    for sender, receiver, turn in path:
        del out[sender][turn], into[receiver][turn]
    for sender, receiver, turn in path:
        out[sender][one + other - turn], into[receiver][one + other - turn] = receiver, sender
