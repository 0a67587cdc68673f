"""Who waits for whom: ranks that wait long tell each other what they wait for, and a deadlock is named on all of them.

A rank that has waited for half a second asks the ranks it waits for, and those that these wait for. Only a rank that
waits answers; one that computes is never accused. If everyone asked waits, or has ended, and all that was sent has
arrived, and a second round of questions finds the same, nothing can ever happen: every rank of the circle raises, with
each rank's operation and line.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ...core.errors import GaveUp
from .message import Item

PATIENCE = 0.5
"""Seconds of waiting before a rank asks."""
_AGAIN = 0.2
"""Seconds between two rounds of questions."""
_PAUSE = 0.02
"""Seconds between two looks at the answers."""
_PACKAGE = str(Path(__file__).parents[2]) + os.sep

Say = Callable[[int, str, bytes], None]
"""Sends (rank, "ask" | "tell" | "verdict", body) when it may."""


class Waiting:
    """One thread's wait."""

    __slots__ = ("items", "thread", "verdict")

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = list(items)
        self.thread = threading.get_ident()
        self.verdict: GaveUp | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """What a rank says of itself."""

    moves: int
    stuck: bool
    """Whether every thread of it that sends or receives waits."""
    peers: tuple[int, ...]
    lines: tuple[str, ...]
    sent: tuple[int, ...]
    got: tuple[int, ...]


class Watch:
    """What one rank knows of its own waits and those of others."""

    def __init__(self, rank: int, size: int, say: Say, withdraw: Callable[[object], object]) -> None:
        self.rank, self.size, self._say, self._withdraw = rank, size, say, withdraw
        self.sent, self.got = [0] * size, [0] * size
        self.moves = 0
        self.left: set[int] = set()
        self.users: set[int] = set()
        """Threads that have sent or received."""
        self.sites: dict[int, str] = {}
        """By thread: the call on whose behalf it works, where its own stack does not tell."""
        self._waits: dict[int, Waiting] = {}
        self._told: dict[int, _State] = {}
        self._asked: set[int] = set()
        self._before: dict[int, _State] | None = None
        self._next = 0.0

    def begin(self, items: Iterable[Item]) -> Waiting:
        """A thread begins to wait."""
        waiting = Waiting(items)
        self._waits[waiting.thread] = waiting
        self.moves += 1
        return waiting

    def end(self, waiting: Waiting) -> None:
        """It has what it waited for, or gave up."""
        del self._waits[waiting.thread]
        self.moves += 1

    def of_this_thread(self) -> Waiting | None:
        """The wait that this thread is in."""
        return self._waits.get(threading.get_ident())

    def rest(self) -> None:
        """This thread has nothing to do until it is given something: nobody need wait for it."""
        self.users.discard(threading.get_ident())

    # -- asking -----------------------------------------------------------------------------------------------------

    def look(self, waited: float, now: float) -> None:
        """Called again and again by a thread that waits; asks, and judges when all answers are in."""
        if waited < PATIENCE or now < self._next:
            return
        me = self._state()
        circle = {self.rank: me}
        todo = list(me.peers)
        complete = me.stuck
        while todo and complete:
            rank = todo.pop()
            if rank in circle or rank in self.left:
                continue
            state = self._told.get(rank)
            if state is None:
                complete = False
                self._ask(rank, todo)
            else:
                complete = state.stuck
                circle[rank] = state
                todo += state.peers
        if complete:
            self._judge(circle, now)
        elif any(not state.stuck for state in circle.values()):
            self._start_over(now)
        else:
            self._next = now + _PAUSE

    def _ask(self, rank: int, others: list[int]) -> None:
        """Ask whoever has not been asked; a question to a rank that computes stays open."""
        for one in {rank, *others}:
            if one not in self._told and one not in self._asked and one not in self.left and one != self.rank:
                self._asked.add(one)
                self._say(one, "ask", b"")

    def _judge(self, circle: dict[int, _State], now: float) -> None:
        under_way = any(a.sent[j] != b.got[i] for i, a in circle.items() for j, b in circle.items())
        if under_way or self._before is None or self._before != circle:
            self._before = None if under_way else circle
            self._told.clear()
            self._next = now + _AGAIN
            return
        body = json.dumps(
            {
                "moves": {rank: state.moves for rank, state in circle.items()},
                "lines": {rank: state.lines for rank, state in circle.items()},
                "left": sorted(set().union(*(s.peers for s in circle.values())) & self.left),
            }
        ).encode()
        for rank in circle:
            if rank != self.rank:
                self._say(rank, "verdict", body)
        self._sentence(body)

    def _start_over(self, now: float) -> None:
        self._told.clear()
        self._before = None
        self._next = now + PATIENCE

    # -- answering --------------------------------------------------------------------------------------------------

    def hear(self, src: int, kind: str, body: bytes) -> None:
        """What another rank asks, tells, or has found. Runs while a thread of this rank makes progress."""
        if kind == "ask":
            state = self._state()
            fields = {name: getattr(state, name) for name in _State.__slots__}
            self._say(src, "tell", json.dumps(fields).encode())
        elif kind == "tell":
            self._asked.discard(src)
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(body).items()}
            self._told[src] = _State(**fields)
        else:
            self._sentence(body)

    def _sentence(self, body: bytes) -> None:
        """Tell the threads that wait, if nothing has moved since; their receives are taken back."""
        found = json.loads(body)
        if found["moves"].get(str(self.rank)) == self.moves:
            for waiting in self._waits.values():
                waiting.verdict = _deadlock(found["lines"], found["left"])
                for item in waiting.items:  # what comes later is for those who ask later
                    self._withdraw(item)

    def _state(self) -> _State:
        waits = [w for w in self._waits.values() if w.verdict is None]
        frames = sys._current_frames()
        peers = {peer for w in waits for item in w.items if not item.done for peer in item.peers}
        return _State(
            moves=self.moves,
            stuck=bool(waits) and not self._busy(),
            peers=tuple(sorted(peers)),
            lines=tuple(self._line(w, frames) for w in waits),
            sent=tuple(self.sent),
            got=tuple(self.got),
        )

    def _busy(self) -> bool:
        """Whether a thread may still send: one that has before, or, beside a main thread that has, any at all."""
        alive = {t.ident: t for t in threading.enumerate()}
        self.users &= alive.keys()
        main = threading.main_thread().ident
        others = {i for i, t in alive.items() if not t.daemon} if main in self.users else set()
        return bool((self.users | others) - self._waits.keys())

    def _line(self, waiting: Waiting, frames: Mapping[int, FrameType]) -> str:
        """What a thread does, and where the user's program asked for it."""
        open_items = [item for item in waiting.items if not item.done]
        about = open_items[0].about() if open_items else ""
        more = f" and {len(open_items) - 1} more" if len(open_items) > 1 else ""
        site = self.sites.get(waiting.thread) or call_site(frames.get(waiting.thread))
        operation, _, where = site.partition(" at ")
        return f"{operation} {about}{more}, at {where}"


def call_site(frame: FrameType | None) -> str:
    """`Recv at ring.py:12`: the function of this package that was called, and the line that called it."""
    name = "a wait"
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return f"{name} at {os.path.basename(code.co_filename)}:{frame.f_lineno}"
        name = code.co_name
        frame = frame.f_back
    return f"{name} at an unknown line"


def _deadlock(lines: dict[str, Any], left: list[int]) -> GaveUp:
    table = [f"  rank {rank}: {line}" for rank in sorted(lines, key=int) for line in lines[rank]]
    table += [f"  rank {rank}: has ended" for rank in left]
    ranks = ", ".join(sorted(lines, key=int))
    who = f"ranks {ranks} wait" if len(lines) > 1 else f"rank {ranks} waits"
    what = f"deadlock: {who} for what cannot come"
    return GaveUp(
        "\n".join([what, *table]),
        rule="every message has a sender and a receiver, and collectives are called by all ranks in one order",
        fix="let one side send first, or use Sendrecv or Isend/Irecv",
    )
