"""Deadlock detection: ranks that wait long exchange what they wait for, and a deadlock is reported on all of them.

After half a second of waiting, a rank queries the ranks it waits for, and those that they wait for. Only a waiting rank
replies; one that computes is never accused. If every queried rank waits or has ended, all messages sent have arrived,
and a second round of queries gives the same result, nothing can ever happen: every rank of the cycle raises, with each
rank's operation and line.
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
from .messages import Waitable

PATIENCE = 0.5
"""Seconds of waiting before a rank sends queries."""
_REPEAT = 0.2
"""Seconds between two rounds of queries."""
_POLL = 0.02
"""Seconds between two checks of the replies."""
_PACKAGE = str(Path(__file__).parents[2]) + os.sep

SendControl = Callable[[int, str, bytes], None]
"""Queues a control message: (rank, "query" | "state" | "deadlock", body)."""


class ThreadWait:
    """One thread's wait."""

    __slots__ = ("deadlock", "items", "thread")

    def __init__(self, items: Iterable[Waitable]) -> None:
        self.items = list(items)
        self.thread = threading.get_ident()
        self.deadlock: GaveUp | None = None


@dataclass(frozen=True, slots=True)
class _RankState:
    """A rank's reply to a query."""

    moves: int
    stuck: bool
    """Whether all of its threads that send or receive are waiting."""
    peers: tuple[int, ...]
    lines: tuple[str, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


class DeadlockDetector:
    """One rank's record of its own waits and those of other ranks."""

    def __init__(self, rank: int, size: int, send: SendControl, withdraw: Callable[[object], object]) -> None:
        self.rank, self.size, self._send, self._withdraw = rank, size, send, withdraw
        self.sent, self.received = [0] * size, [0] * size
        self.moves = 0
        """Counts everything that may end a wait."""
        self.left: set[int] = set()
        """Ranks that have ended."""
        self.users: set[int] = set()
        """Threads that have sent or received."""
        self.sites: dict[int, str] = {}
        """By thread: the call it works for, if its own stack does not show it."""
        self._waits: dict[int, ThreadWait] = {}
        self._states: dict[int, _RankState] = {}
        self._queried: set[int] = set()
        self._previous: dict[int, _RankState] | None = None
        self._next = 0.0

    def begin(self, items: Iterable[Waitable]) -> ThreadWait:
        """Record that this thread starts to wait."""
        wait = ThreadWait(items)
        self._waits[wait.thread] = wait
        self.moves += 1
        return wait

    def end(self, wait: ThreadWait) -> None:
        """Record that a wait succeeded or failed."""
        del self._waits[wait.thread]
        self.moves += 1

    def of_this_thread(self) -> ThreadWait | None:
        """The current wait of this thread."""
        return self._waits.get(threading.get_ident())

    def rest(self) -> None:
        """Record that this thread is idle until it gets work: it counts as no user meanwhile."""
        self.users.discard(threading.get_ident())

    # -- queries ------------------------------------------------------------------------------------------------------

    def check(self, waited: float, now: float) -> None:
        """Called repeatedly by a waiting thread: sends queries, and decides when all replies are in."""
        if waited < PATIENCE or now < self._next:
            return
        me = self._state()
        cycle = {self.rank: me}
        todo = list(me.peers)
        complete = me.stuck
        while todo and complete:
            rank = todo.pop()
            if rank in cycle or rank in self.left:
                continue
            state = self._states.get(rank)
            if state is None:
                complete = False
                self._query(rank, todo)
            else:
                complete = state.stuck
                cycle[rank] = state
                todo += state.peers
        if complete:
            self._decide(cycle, now)
        elif any(not state.stuck for state in cycle.values()):
            self._start_over(now)
        else:
            self._next = now + _POLL

    def _query(self, rank: int, others: list[int]) -> None:
        """Query ranks that were not queried yet; a query to a computing rank stays open."""
        for peer in {rank, *others}:
            if peer not in self._states and peer not in self._queried and peer not in self.left and peer != self.rank:
                self._queried.add(peer)
                self._send(peer, "query", b"")

    def _decide(self, cycle: dict[int, _RankState], now: float) -> None:
        in_flight = any(a.sent[j] != b.received[i] for i, a in cycle.items() for j, b in cycle.items())
        if in_flight or self._previous is None or self._previous != cycle:
            self._previous = None if in_flight else cycle
            self._states.clear()
            self._next = now + _REPEAT
            return
        body = json.dumps(
            {
                "moves": {rank: state.moves for rank, state in cycle.items()},
                "lines": {rank: state.lines for rank, state in cycle.items()},
                "left": sorted(set().union(*(s.peers for s in cycle.values())) & self.left),
            }
        ).encode()
        for rank in cycle:
            if rank != self.rank:
                self._send(rank, "deadlock", body)
        self._fail_waits(body)

    def _start_over(self, now: float) -> None:
        self._states.clear()
        self._previous = None
        self._next = now + PATIENCE

    # -- replies ------------------------------------------------------------------------------------------------------

    def handle(self, src: int, kind: str, body: bytes) -> None:
        """Process a control message. Runs while a thread of this rank makes progress."""
        if kind == "query":
            state = self._state()
            fields = {name: getattr(state, name) for name in _RankState.__slots__}
            self._send(src, "state", json.dumps(fields).encode())
        elif kind == "state":
            self._queried.discard(src)
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(body).items()}
            self._states[src] = _RankState(**fields)
        else:
            self._fail_waits(body)

    def _fail_waits(self, body: bytes) -> None:
        """Fail this rank's waits if nothing has moved since, and cancel their receives."""
        report = json.loads(body)
        if report["moves"].get(str(self.rank)) == self.moves:
            for wait in self._waits.values():
                wait.deadlock = _deadlock_error(report["lines"], report["left"])
                for item in wait.items:  # later messages are for later receives
                    self._withdraw(item)

    def _state(self) -> _RankState:
        waits = [w for w in self._waits.values() if w.deadlock is None]
        frames = sys._current_frames()
        peers = {peer for w in waits for item in w.items if not item.done for peer in item.peers}
        return _RankState(
            moves=self.moves,
            stuck=bool(waits) and not self._busy(),
            peers=tuple(sorted(peers)),
            lines=tuple(self._line(w, frames) for w in waits),
            sent=tuple(self.sent),
            received=tuple(self.received),
        )

    def _busy(self) -> bool:
        """Whether a thread may still send: one that has sent before or, if the main thread has, any other thread."""
        alive = {t.ident: t for t in threading.enumerate()}
        self.users &= alive.keys()
        main = threading.main_thread().ident
        others = {i for i, t in alive.items() if not t.daemon} if main in self.users else set()
        return bool((self.users | others) - self._waits.keys())

    def _line(self, wait: ThreadWait, frames: Mapping[int, FrameType]) -> str:
        """A thread's operation, and the line of the user's program that called it."""
        open_items = [item for item in wait.items if not item.done]
        about = open_items[0].about() if open_items else ""
        more = f" and {len(open_items) - 1} more" if len(open_items) > 1 else ""
        site = self.sites.get(wait.thread) or call_site(frames.get(wait.thread))
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


def _deadlock_error(lines: dict[str, Any], left: list[int]) -> GaveUp:
    table = [f"  rank {rank}: {line}" for rank in sorted(lines, key=int) for line in lines[rank]]
    table += [f"  rank {rank}: has ended" for rank in left]
    ranks = ", ".join(sorted(lines, key=int))
    who = f"ranks {ranks} wait" if len(lines) > 1 else f"rank {ranks} waits"
    return GaveUp(
        "\n".join([f"deadlock: {who} for messages that cannot arrive", *table]),
        rule="every message has a sender and a receiver, and collectives are called by all ranks in one order",
        fix="let one side send first, or use Sendrecv or Isend/Irecv",
    )
