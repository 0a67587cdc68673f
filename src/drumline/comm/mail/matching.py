"""Messages by context, source and tag over any post office: wildcards, probes, one-sided ones, and waiting.

Threads may wait at the same time: whoever has its turn makes progress for all. A wait that lasts is looked into by
`watch`, which names deadlocks.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ...core.errors import DrumlineError, GaveUp
from .message import Arrival, Item, Receive, Sending
from .porter import Porter, Turn
from .post import Outgoing, Post
from .queues import Queues
from .watch import Watch

EAGER = 4 << 10
"""Bodies up to this size are copied when they are sent: the sender never waits for its memory."""

HEAD = struct.Struct("<BBxxiQQ")
"""Kind of frame, kind of elements, tag, context, serial number."""
_PLAIN, _SYNC, _ACK, _ACTIVE, _LEFT, _ASK, _TELL, _VERDICT = range(8)
_QUIET = 0.05
"""Seconds of one stretch of waiting while one thread uses this rank's office."""
_HEALTH = 0.1
"""Seconds of waiting after which a rank asks whether the others are alive."""
_CROWDED = 0.0003
"""The same once there are several: each must get its turn."""

Handler = Callable[[int, int, int, memoryview], None]
"""Runs an active message on arrival: (source, tag, serial, body)."""


class Matching:
    """The messages of one rank, over its post office."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.rank, self.size = post.rank, post.size
        self._turn, self._queues = Turn(), Queues()
        self._arriving: dict[int, Arrival | Receive | None] = {}
        self._unacked: dict[int, Sending] = {}
        self._replies: list[tuple[int, bytes, bytes | memoryview]] = []
        self._handlers: dict[int, Handler] = {}
        self._serial = 0
        self._porter = Porter(f"porter of rank {self.rank}", self._turn, self._progress)
        self.closed = False
        self.watch = Watch(self.rank, self.size, self._control, self._queues.withdraw)
        post.desk = self

    # -- what ranks do ----------------------------------------------------------------------------------------------

    def send(
        self,
        dst: int,
        context: int,
        tag: int,
        body: memoryview,
        *,
        sync: bool = False,
        copy: bool = False,
        elements: int = 0,
    ) -> Sending:
        """Start a message. With `copy` its memory is free at once; with `sync` it is done when a receive has met it."""
        if copy:
            body = memoryview(bytes(body))
        self._enter()
        with self._turn:
            serial = 0
            if sync:
                self._serial = serial = self._serial + 1
            head = HEAD.pack(_SYNC if sync else _PLAIN, elements, tag, context, serial)
            self.watch.sent[dst] += 1
            sending = Sending(dst, tag, self.post.put(dst, head, body), acked=not sync)
            if sync:
                self._unacked[serial] = sending
            elif copy and not sending.out.done:
                self._see_off(dst, sending.out)
                sending.out = _FREE
            return sending

    def receive(self, src: int, context: int, tag: int, into: memoryview | None, among: Sequence[int] = ()) -> Receive:
        """Post a receive. `among` are the ranks that may send to a wildcard."""
        receive = Receive(context, src, tag, into, among or range(self.size))
        self._enter()
        with self._turn:
            arrival = self._queues.find(context, src, tag, take=True)
            if arrival is None:
                self._queues.post(receive)
            else:
                self._meet(arrival, receive)
                self._reply()
        return receive

    def probe(self, src: int, context: int, tag: int, *, take: bool = False) -> Arrival | None:
        """The oldest message that a receive would take, if there is one; `take` keeps it for its finder."""
        self._enter()
        with self._turn:
            self._progress(0.0)
            return self._queues.find(context, src, tag, take=take)

    def wait_probe(self, src: int, context: int, tag: int, among: Sequence[int] = (), *, take: bool = False) -> Arrival:
        """The same, when there is one."""
        found: list[Arrival] = []

        def ready() -> bool:
            arrival = self._queues.find(context, src, tag, take=take)
            found.extend([] if arrival is None else [arrival])
            return arrival is not None

        self.wait_until(ready, [Receive(context, src, tag, None, among or range(self.size))])
        return found[0]

    def accept(self, arrival: Arrival, into: memoryview | None) -> Receive:
        """Receive a message that a probe has taken."""
        receive = Receive(arrival.context, arrival.src, arrival.tag, into)
        self._enter()
        with self._turn:
            self._meet(arrival, receive)
            self._reply()
        return receive

    def cancel(self, receive: Receive) -> bool:
        """Take a receive back, if no message has met it; whether that was so."""
        with self._turn:
            return self._queues.withdraw(receive)

    def active(self, dst: int, context: int, tag: int, serial: int, body: bytes | memoryview) -> None:
        """Send a message that is handled on arrival; its memory is copied."""
        self._enter()
        with self._turn:
            self._put(dst, HEAD.pack(_ACTIVE, 0, tag, context, serial), body)

    def answer(self, dst: int, context: int, tag: int, serial: int, body: bytes) -> None:
        """The same from inside a handler: it leaves when the handler has returned."""
        self._replies.append((dst, HEAD.pack(_ACTIVE, 0, tag, context, serial), body))

    def handle(self, context: int, handler: Handler | None) -> None:
        """Who runs the active messages of a context; None: nobody any more."""
        with self._turn:
            if handler is None:
                self._handlers.pop(context, None)
            else:
                self._handlers[context] = handler

    # -- waiting ----------------------------------------------------------------------------------------------------

    def poke(self, *, helper: bool = False) -> None:
        """Move what can be moved, without waiting. A helper is a thread that never sends for itself."""
        if not helper:
            self._enter()
        with self._turn:
            self._progress(0.0)

    def wait(self, *items: Item) -> None:
        """Return when all are done."""
        for item in items:
            while not item.done:
                self.wait_until(lambda item=item: item.done, items)  # type: ignore[misc]  # a lambda with a default

    def wait_until(self, ready: Callable[[], bool], items: Iterable[Item], *, brief: bool = False) -> None:
        """Return when `ready()`; `items` are what it depends on. `brief`: another thread may make it ready."""
        self._enter()
        begun = 0.0
        waiting = None
        try:
            while True:
                with self._turn:
                    if waiting is None:
                        if ready():
                            return
                        waiting = self.watch.begin(items)
                    self._progress(_QUIET if len(self.watch.users) == 1 and not brief else _CROWDED)
                    if waiting.verdict is not None:
                        raise waiting.verdict
                    if ready():
                        return
                    now = time.monotonic()
                    begun = begun or now
                    self.watch.look(now - begun, now)
                    if now - begun > _HEALTH:
                        self._healthy(waiting.items)
                if self._turn.wanted:
                    time.sleep(1e-5)
        finally:
            if waiting is not None:
                self.watch.end(waiting)

    def _healthy(self, items: Iterable[Item]) -> None:
        """Refuse to wait for ranks that are gone without a word."""
        for item in items:
            reasons = {} if item.done else {rank: self.post.gone(rank) for rank in item.peers}
            if reasons and all(reasons.values()):
                rank, reason = next(iter(reasons.items()))
                raise GaveUp(f"rank {self.rank} waits for a message {item.about()}, but rank {rank} {reason}")

    def attend(self, item: Item, waited: float) -> DrumlineError | None:
        """For a thread that waits by other means for what `item` says, again and again: answer what other ranks ask,
        and ask them; the deadlock, if there is one. `leave` ends it."""
        self._enter()
        with self._turn:
            waiting = self.watch.of_this_thread() or self.watch.begin([item])
            self._progress(0.0)
            self.watch.look(waited, time.monotonic())
            return waiting.verdict

    def leave(self) -> None:
        """The thread that called `attend` waits no more."""
        with self._turn:
            waiting = self.watch.of_this_thread()
            if waiting is not None:
                self.watch.end(waiting)

    def close(self) -> None:
        """Say that this rank ends, and see off what it has sent; a peer that died ends the wait."""
        if self.closed:
            return
        self.closed = self._porter.closed = True
        try:
            with self._turn:
                for dst in range(self.size):
                    if dst != self.rank:
                        self._put(dst, HEAD.pack(_LEFT, 0, 0, 0, 0), b"")
                while self._porter.busy:
                    self._progress(_QUIET)
        except DrumlineError:
            return  # nobody is left to take it
        self.post.close()

    # -- turns and progress -----------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Note who uses the office: one thread may wait long, several may not."""
        self.watch.users.add(threading.get_ident())
        if self.closed:
            raise GaveUp(f"rank {self.rank} has ended its messages", rule="nothing is sent or received after Finalize")

    def _progress(self, timeout: float) -> None:
        if self._replies:
            self._reply()
        self.post.progress(timeout)
        if self._replies:
            self._reply()

    def _reply(self) -> None:
        """What callbacks wanted to send: they run inside `progress`, which must not be entered again."""
        replies, self._replies = self._replies, []
        for dst, head, body in replies:
            self._put(dst, head, body)

    def _put(self, dst: int, head: bytes, body: bytes | memoryview) -> None:
        if head[0] <= _LEFT:
            self.watch.sent[dst] += 1
        out = self.post.put(dst, head, memoryview(bytes(body)))
        if not out.done:
            self._see_off(dst, out)

    def _see_off(self, dst: int, out: Outgoing) -> None:
        """Nobody waits for this to leave."""
        if dst != self.rank:  # what is here needs nobody
            self._porter.take(out)

    def _control(self, dst: int, kind: str, body: bytes) -> None:
        """What `watch` wants to say to other ranks."""
        code = {"ask": _ASK, "tell": _TELL, "verdict": _VERDICT}[kind]
        self._replies.append((dst, HEAD.pack(code, 0, 0, 0, 0), body))

    # -- the desk of the post office --------------------------------------------------------------------------------

    def begin(self, src: int, head: bytes, size: int) -> memoryview:
        """A frame begins to arrive: find its receive, or keep it."""
        kind, elements, tag, context, serial = HEAD.unpack(head)
        if kind > _SYNC:
            self._arriving[src] = None
            return memoryview(bytearray(size))
        receive = self._queues.claim(context, src, tag)
        if receive is not None:
            self._arriving[src] = receive
            if serial:
                self._acknowledge(src, serial)
            receive.source, receive.tag, receive.nbytes, receive.elements = src, tag, size, elements
            if receive.into is None:
                receive.into = memoryview(bytearray(size))
            return memoryview(bytearray(size)) if receive.truncated else receive.into[:size]
        arrival = Arrival(context, src, tag, elements, serial, size)
        self._arriving[src] = arrival
        self._queues.keep(arrival)
        return arrival.data

    def end(self, src: int, head: bytes, body: memoryview) -> None:
        """The frame is there."""
        one = self._arriving.pop(src)
        kind = head[0]
        self.watch.moves += 1
        if kind <= _LEFT:
            self.watch.got[src] += 1
        if isinstance(one, Receive):
            one.done = True
        elif isinstance(one, Arrival):
            one.there = True
            if one.receive is not None:
                self._hand_over(one, one.receive)
        else:
            self._special(src, kind, head, body)

    def _special(self, src: int, kind: int, head: bytes, body: memoryview) -> None:
        _, _, tag, context, serial = HEAD.unpack(head)
        if kind == _ACK:
            self._unacked.pop(serial).acked = True
        elif kind == _ACTIVE:
            handler = self._handlers.get(context)
            if handler is None:
                raise GaveUp(f"rank {src} sent a one-sided message to a window that rank {self.rank} does not have")
            handler(src, tag, serial, body)
        elif kind == _LEFT:
            self.watch.left.add(src)
        else:
            self.watch.moves -= 1  # talk about waiting is not a move
            self.watch.hear(src, {_ASK: "ask", _TELL: "tell", _VERDICT: "verdict"}[kind], bytes(body))

    def _meet(self, arrival: Arrival, receive: Receive) -> None:
        """A receive takes a message that came before it."""
        receive.source, receive.tag, receive.nbytes = arrival.src, arrival.tag, arrival.nbytes
        receive.elements = arrival.elements
        if arrival.serial:
            self._acknowledge(arrival.src, arrival.serial)
        if arrival.there:
            self._hand_over(arrival, receive)
        else:
            arrival.receive = receive

    def _hand_over(self, arrival: Arrival, receive: Receive) -> None:
        if receive.into is None:
            receive.into = arrival.data
        elif not receive.truncated:
            receive.into[: arrival.nbytes] = arrival.data
        receive.done = True

    def _acknowledge(self, src: int, serial: int) -> None:
        self._replies.append((src, HEAD.pack(_ACK, 0, 0, 0, serial), b""))


class _Free:
    """Memory that is free."""

    done = True


_FREE = _Free()
