"""What a communicator is made of: its ranks, its contexts, and the two ways in which its collectives run."""

from __future__ import annotations

import hashlib
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..comm import calls
from ..comm.calls import Site
from ..comm.communicator import Communicator
from ..comm.mail import watch
from ..comm.mail.matching import Matching
from ..comm.mail.transport import MailTransport
from . import constants as C
from .buffers import Spot
from .exception import MPIError

MESSAGES, NOW, NOW_FLAT, LATER, LATER_FLAT, WINDOW = range(6)
"""Each communicator has these contexts: its number is a multiple of 8."""
_POLL = 0.05
"""Seconds after which a thread that waits for another looks whether a deadlock was found."""


def derive(*names: object) -> int:
    """The number of a new communicator: the same on all its ranks, found without a message, because all of them know
    its ancestor and how many that one has had."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~7


class Channel:
    """One way for collectives: schedules through the communicator, and plain messages for what varies by rank."""

    def __init__(self, state: CommState, number: int) -> None:
        self.matching, self.members, self.rank, self.size = state.matching, state.members, state.rank, state.size
        # Programs may swap roles between ranks; only differing calls are an error here, not crossing lines.
        self.comm = Communicator(MailTransport(self.matching, state.context + number, self.members), crossings=False)
        self._flat = state.context + number + 1

    def exchange(self, tag: int, sends: Mapping[int, memoryview], receives: Mapping[int, Spot]) -> None:
        """Messages of one collective, by rank; those to oneself are copied."""
        m = self.matching
        others = [(src, spot, spot.landing()) for src, spot in receives.items() if src != self.rank]
        coming = [m.receive(self.members[src], self._flat, tag, landing) for src, _, landing in others]
        going = [m.send(self.members[dst], self._flat, tag, data) for dst, data in sends.items() if dst != self.rank]
        if self.rank in receives:
            _fits(self.rank, len(sends[self.rank]), receives[self.rank].nbytes)
            receives[self.rank].fill(sends[self.rank])
        m.wait(*coming, *going)
        for (src, spot, landing), receive in zip(others, coming, strict=True):
            _fits(src, receive.nbytes, spot.nbytes)
            spot.land(landing, receive.nbytes)

    def trade(self, tag: int, sends: Mapping[int, bytes], sources: Sequence[int]) -> dict[int, memoryview]:
        """The same with bytes of any length: what came, by rank."""
        m = self.matching
        coming = {s: m.receive(self.members[s], self._flat, tag, None) for s in sources if s != self.rank}
        going = [
            m.send(self.members[dst], self._flat, tag, memoryview(data))
            for dst, data in sends.items()
            if dst != self.rank
        ]
        m.wait(*coming.values(), *going)
        found = {src: receive.into for src, receive in coming.items() if receive.into is not None}
        if self.rank in sources:
            found[self.rank] = memoryview(sends[self.rank])
        return found


def _fits(src: int, came: int, room: int) -> None:
    if came != room:
        raise MPIError(
            C.ERR_TRUNCATE,
            f"rank {src} sends {came} bytes where {room} are expected",
            rule="in a collective, what is sent and what is received are of one size",
        )


class Job:
    """A collective that runs beside the program."""

    peers: Sequence[int] = ()  # the thread that runs it says for whom it waits

    def __init__(self, run: Callable[[Channel], None], site: str, line: Site) -> None:
        self.run, self.site, self.line = run, site, line
        self.over = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.over.is_set()

    def about(self) -> str:
        """What it is."""
        return f"for {self.site.partition(' at ')[0]}"

    def wait(self, matching: Matching) -> None:
        """Sleep until it has ended: the thread that runs it makes the progress."""
        if self.done:
            return
        waiting = matching.watch.begin([self])
        try:
            while not self.over.wait(_POLL):
                if waiting.verdict is not None:
                    raise waiting.verdict
        finally:
            matching.watch.end(waiting)

    def result(self) -> None:
        """Raise what it raised."""
        if self.error is not None:
            raise self.error


class Worker:
    """The thread that runs a communicator's non-blocking collectives, in the order in which they were called."""

    def __init__(self, state: CommState) -> None:
        self._channel = Channel(state, LATER)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"collectives of {state.name}", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[Channel], None]) -> Job:
        """Queue a collective."""
        job = Job(run, watch.call_site(sys._getframe(1)), calls.call_site())
        if self._thread.ident is not None:
            self._channel.matching.watch.users.add(self._thread.ident)
        self._jobs.put(job)
        return job

    def stop(self) -> None:
        """End when all is done."""
        self._jobs.put(None)

    def _live(self) -> None:
        office, me = self._channel.matching.watch, threading.get_ident()
        while (job := self._jobs.get()) is not None:
            office.sites[me] = job.site
            calls.asked_at(job.line)
            try:
                job.run(self._channel)
            except BaseException as e:
                job.error = e
            office.rest()
            job.over.set()


class CommState:
    """A communicator. That of the world learns its ranks at the first use."""

    matching: Matching
    members: tuple[int, ...]
    rank: int
    size: int
    index: dict[int, int]

    def __init__(
        self, context: int, name: str, where: Callable[[], tuple[Matching, Sequence[int]]] | None = None
    ) -> None:
        self.context, self.name, self._where = context, name, where
        self.info: dict[str, str] = {}
        self.attributes: dict[int, Any] = {}
        self.errhandler: Any = None
        self.buffer: Any = None
        self.locks: dict[Any, threading.Lock] = {}
        self._children: dict[object, int] = {}
        self._now: Channel | None = None
        self._worker: Worker | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in ("matching", "members", "rank", "size", "index") or self.__dict__.get("_where") is None:
            raise AttributeError(name)
        assert self._where is not None
        matching, members = self._where()
        self.join(matching, members)
        return self.__dict__[name]

    def join(self, matching: Matching, members: Sequence[int]) -> None:
        """Its ranks, by their numbers in the world."""
        self.matching, self.members, self.size = matching, tuple(members), len(members)
        self.index = {world: rank for rank, world in enumerate(members)}
        self.rank = self.index[matching.rank]

    def child(self, name: str, members: Sequence[int], *kind: object) -> CommState:
        """A new communicator over some of the ranks. Its ranks make it in one order, of each kind."""
        nth = self._children[kind] = self._children.get(kind, 0) + 1
        made = CommState(derive(self.context, *kind, nth), name)
        made.join(self.matching, members)
        return made

    def lock(self, name: str) -> threading.Lock:
        """One collective of objects at a time: each is made of several messages."""
        return self.locks.setdefault(name, threading.Lock())

    @property
    def now(self) -> Channel:
        """For collectives that are waited for."""
        if self._now is None:
            self._now = Channel(self, NOW)
        return self._now

    @property
    def worker(self) -> Worker:
        """For collectives that are not."""
        if self._worker is None:
            self._worker = Worker(self)
        return self._worker

    def free(self) -> None:
        """End what it has running."""
        if self._worker is not None:
            self._worker.stop()
