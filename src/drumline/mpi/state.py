"""The state of a communicator: its ranks, its contexts, and how its collectives run, blocking and nonblocking."""

from __future__ import annotations

import hashlib
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..comm import call_check
from ..comm.call_check import CallSite
from ..comm.communicator import Communicator
from ..comm.messaging import deadlock_detector
from ..comm.messaging.matching import MessageMatcher
from ..comm.messaging.transport import MatcherTransport
from . import constants as C
from .buffers import MessageBuffer
from .exception import MPIError
from .topology import ProcessTopology

MESSAGES, BLOCKING, BLOCKING_FLAT, NONBLOCKING, NONBLOCKING_FLAT, WINDOW = range(6)
"""The contexts of each communicator, added to its number, a multiple of 8."""
_POLL = 0.05
"""Seconds between two checks for a deadlock while waiting for the worker thread."""


def context_number(*names: object) -> int:
    """The number of a new communicator: the same on all its ranks without a message, because all know its parent and
    how many children the parent has had."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~7


class CollectiveChannel:
    """A channel for collectives: schedules through a Communicator, and plain messages for sizes that vary by rank."""

    def __init__(self, state: CommState, number: int) -> None:
        self.matcher, self.members, self.rank, self.size = state.matcher, state.members, state.rank, state.size
        # Programs may swap roles between ranks: only different calls are an error here, not crossed ones.
        self.comm = Communicator(MatcherTransport(self.matcher, state.context + number, self.members), crossings=False)
        self._flat = state.context + number + 1

    def exchange(self, tag: int, sends: Mapping[int, memoryview], receives: Mapping[int, MessageBuffer]) -> None:
        """Exchange the messages of one collective, by rank; this rank's own is copied."""
        m = self.matcher
        others = [(src, region, region.receive_memory()) for src, region in receives.items() if src != self.rank]
        incoming = [m.receive(self.members[src], self._flat, tag, receive_memory) for src, _, receive_memory in others]
        outgoing = [m.send(self.members[dst], self._flat, tag, data) for dst, data in sends.items() if dst != self.rank]
        if self.rank in receives:
            _check_size(self.rank, len(sends[self.rank]), receives[self.rank].nbytes)
            receives[self.rank].fill(sends[self.rank])
        m.wait(*incoming, *outgoing)
        for (src, region, receive_memory), receive in zip(others, incoming, strict=True):
            _check_size(src, receive.nbytes, region.nbytes)
            region.unpack_received(receive_memory, receive.nbytes)

    def exchange_bytes(self, tag: int, sends: Mapping[int, bytes], sources: Sequence[int]) -> dict[int, memoryview]:
        """Exchange bytes of any length; returns the received ones by rank."""
        m = self.matcher
        incoming = {s: m.receive(self.members[s], self._flat, tag, None) for s in sources if s != self.rank}
        outgoing = [
            m.send(self.members[dst], self._flat, tag, memoryview(data))
            for dst, data in sends.items()
            if dst != self.rank
        ]
        m.wait(*incoming.values(), *outgoing)
        received = {src: receive.into for src, receive in incoming.items() if receive.into is not None}
        if self.rank in sources:
            received[self.rank] = memoryview(sends[self.rank])
        return received

    def exchange_edges(
        self, sends: Sequence[tuple[int, int, memoryview]], receives: Sequence[tuple[int, int, MessageBuffer]]
    ) -> None:
        """Exchange messages as (rank, tag, data): several for one rank and tag are received in the order sent."""
        m = self.matcher
        memories = [region.receive_memory() for _, _, region in receives]
        incoming = [
            m.receive(self.members[src], self._flat, tag, memory)
            for (src, tag, _), memory in zip(receives, memories, strict=True)
        ]
        outgoing = [m.send(self.members[dst], self._flat, tag, data) for dst, tag, data in sends]
        m.wait(*incoming, *outgoing)
        for (src, _, region), memory, receive in zip(receives, memories, incoming, strict=True):
            _check_size(src, receive.nbytes, region.nbytes)
            region.unpack_received(memory, receive.nbytes)

    def exchange_edge_bytes(
        self, sends: Sequence[tuple[int, int, memoryview]], sources: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Exchange bytes of any length as (rank, tag, data); returns those of each (rank, tag), in their order."""
        m = self.matcher
        incoming = [m.receive(self.members[src], self._flat, tag, None) for src, tag in sources]
        outgoing = [m.send(self.members[dst], self._flat, tag, data) for dst, tag, data in sends]
        m.wait(*incoming, *outgoing)
        return [receive.into for receive in incoming if receive.into is not None]


def _check_size(src: int, received: int, expected: int) -> None:
    if received != expected:
        raise MPIError(
            C.ERR_TRUNCATE,
            f"rank {src} sends {received} bytes where {expected} are expected",
            rule="in a collective, sent and received data have the same size",
        )


class CollectiveTask:
    """A nonblocking collective."""

    peers: Sequence[int] = ()  # the worker thread reports the ranks it waits for

    def __init__(self, run: Callable[[CollectiveChannel], None], site: str, line: CallSite) -> None:
        self.run, self.site, self.line = run, site, line
        self.completed = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self.completed.is_set()

    def about(self) -> str:
        """A description for error messages."""
        return f"for {self.site.partition(' at ')[0]}"

    def wait(self, matcher: MessageMatcher) -> None:
        """Sleep until it has ended: the worker thread makes the progress."""
        if self.done:
            return
        wait = matcher.detector.begin([self])
        try:
            while not self.completed.wait(_POLL):
                if wait.deadlock is not None:
                    raise wait.deadlock
        finally:
            matcher.detector.end(wait)

    def result(self) -> None:
        """Raise its error, if any."""
        if self.error is not None:
            raise self.error


class CollectiveWorker:
    """The thread that runs a communicator's nonblocking collectives, in the order of the calls."""

    def __init__(self, state: CommState) -> None:
        self._channel = CollectiveChannel(state, NONBLOCKING)
        self._tasks: queue.SimpleQueue[CollectiveTask | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"collectives of {state.name}", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[CollectiveChannel], None]) -> CollectiveTask:
        """Queue a collective."""
        task = CollectiveTask(run, deadlock_detector.call_site(sys._getframe(1)), call_check.call_site())
        if self._thread.ident is not None:
            self._channel.matcher.detector.users.add(self._thread.ident)
        self._tasks.put(task)
        return task

    def stop(self) -> None:
        """End the thread when its queue is empty."""
        self._tasks.put(None)

    def _serve(self) -> None:
        detector, me = self._channel.matcher.detector, threading.get_ident()
        while (task := self._tasks.get()) is not None:
            detector.sites[me] = task.site
            call_check.attribute_calls_to(task.line)
            try:
                task.run(self._channel)
            except BaseException as e:
                task.error = e
            detector.rest()
            task.completed.set()


class CommState:
    """The state of a communicator. COMM_WORLD learns its ranks at the first use."""

    matcher: MessageMatcher
    members: tuple[int, ...]
    rank: int
    size: int
    index: dict[int, int]

    def __init__(
        self, context: int, name: str, where: Callable[[], tuple[MessageMatcher, Sequence[int]]] | None = None
    ) -> None:
        self.context, self.name, self._where = context, name, where
        self.info: dict[str, str] = {}
        self.attributes: dict[int, Any] = {}
        self.errhandler: Any = None
        self.buffer: Any = None
        self.topology: ProcessTopology | None = None
        self.locks: dict[Any, threading.Lock] = {}
        self._children: dict[object, int] = {}
        self._blocking: CollectiveChannel | None = None
        self._worker: CollectiveWorker | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in ("matcher", "members", "rank", "size", "index") or self.__dict__.get("_where") is None:
            raise AttributeError(name)
        assert self._where is not None
        matcher, members = self._where()
        self.join(matcher, members)
        return self.__dict__[name]

    def join(self, matcher: MessageMatcher, members: Sequence[int]) -> None:
        """Set its ranks, as world ranks."""
        self.matcher, self.members, self.size = matcher, tuple(members), len(members)
        self.index = {world: rank for rank, world in enumerate(members)}
        self.rank = self.index[matcher.rank]

    def child(self, name: str, members: Sequence[int], *kind: object) -> CommState:
        """A new communicator of some of the ranks. All of them make their children of each kind in the same order."""
        nth = self._children[kind] = self._children.get(kind, 0) + 1
        made = CommState(context_number(self.context, *kind, nth), name)
        made.join(self.matcher, members)
        return made

    def pair_context(self, role: str, *ends: object) -> int:
        """The context of the next pair of operations between two ends: each end counts its own `role`."""
        nth = self._children[role, *ends] = self._children.get((role, *ends), 0) + 1
        return context_number(self.context, "pair", *ends, nth)

    def lock(self, name: str) -> threading.Lock:
        """A lock for one object collective at a time: each consists of several messages."""
        return self.locks.setdefault(name, threading.Lock())

    @property
    def blocking(self) -> CollectiveChannel:
        """The channel of blocking collectives."""
        if self._blocking is None:
            self._blocking = CollectiveChannel(self, BLOCKING)
        return self._blocking

    @property
    def worker(self) -> CollectiveWorker:
        """The worker of nonblocking collectives."""
        if self._worker is None:
            self._worker = CollectiveWorker(self)
        return self._worker

    def free(self) -> None:
        """Stop its worker."""
        if self._worker is not None:
            self._worker.stop()
