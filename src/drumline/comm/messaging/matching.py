"""Messages by context, source and tag over any endpoint: wildcards, probes, active messages, and waiting.

Several threads may wait at the same time: the one that has the lock makes progress for all. Long waits are examined by
`deadlock_detector`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ...core.errors import DrumlineError, GaveUp
from .deadlock_detector import DeadlockDetector
from .endpoint import Endpoint, OutgoingFrame
from .messages import MessageQueues, ReceiveOperation, SendOperation, UnexpectedMessage, Waitable
from .send_flusher import ProgressLock, SendFlusher

EAGER = 4 << 10
"""Bodies up to this size are copied by the sender, which then need not wait."""

HEAD = struct.Struct("<BBxxiQQ")
"""Frame kind, element type, tag, context, serial number."""
_PLAIN, _SYNC, _ACK, _ACTIVE, _LEFT, _QUERY, _STATE, _DEADLOCK = range(8)
"""Frame kinds. Those up to _LEFT count as traffic; the rest belong to the deadlock detector."""
_ALONE = 0.05
"""Seconds of one wait for progress while a single thread uses this rank's endpoint."""
_HEALTH = 0.1
"""Seconds of waiting before a rank checks whether its peers are alive."""
_CROWDED = 0.0003
"""Seconds of one wait for progress while several threads share the endpoint."""

Handler = Callable[[int, int, int, memoryview], None]
"""Runs an active message on arrival: (source, tag, serial, body)."""


class MessageMatcher:
    """Sends, receives and matches the messages of one rank over its endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.rank, self.size = endpoint.rank, endpoint.size
        self._lock, self._queues = ProgressLock(), MessageQueues()
        self._arriving: dict[int, UnexpectedMessage | ReceiveOperation | None] = {}
        self._unacked: dict[int, SendOperation] = {}
        self._replies: list[tuple[int, bytes, bytes | memoryview]] = []
        self._handlers: dict[int, Handler] = {}
        self._serial = 0
        self._flusher = SendFlusher(f"send flusher of rank {self.rank}", self._lock, self._progress)
        self.closed = False
        self.detector = DeadlockDetector(self.rank, self.size, self._control, self._queues.withdraw)
        endpoint.receiver = self

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(
        self,
        dst: int,
        context: int,
        tag: int,
        body: memoryview,
        *,
        sync: bool = False,
        copy: bool = False,
        type_code: int = 0,
    ) -> SendOperation:
        """Start a send. `copy` frees its memory at once; `sync` completes when a receive has matched it."""
        if copy:
            body = memoryview(bytes(body))
        self._enter()
        with self._lock:
            serial = 0
            if sync:
                self._serial = serial = self._serial + 1
            head = HEAD.pack(_SYNC if sync else _PLAIN, type_code, tag, context, serial)
            self.detector.sent[dst] += 1
            sending = SendOperation(dst, tag, self.endpoint.put(dst, head, body), acked=not sync)
            if sync:
                self._unacked[serial] = sending
            elif copy and not sending.frame.done:
                self._flush_later(dst, sending.frame)
                sending.frame = _COMPLETED
            return sending

    def receive(
        self, src: int, context: int, tag: int, into: memoryview | None, among: Sequence[int] = ()
    ) -> ReceiveOperation:
        """Post a receive. `among` are the ranks that may match a wildcard source."""
        receive = ReceiveOperation(context, src, tag, into, among or range(self.size))
        self._enter()
        with self._lock:
            message = self._queues.find(context, src, tag, take=True)
            if message is None:
                self._queues.post(receive)
            else:
                self._match(message, receive)
                self._reply()
        return receive

    def probe(self, src: int, context: int, tag: int, *, take: bool = False) -> UnexpectedMessage | None:
        """The oldest message that a receive would match, or None; `take` reserves it for the caller."""
        self._enter()
        with self._lock:
            self._progress(0.0)
            return self._queues.find(context, src, tag, take=take)

    def wait_probe(
        self, src: int, context: int, tag: int, among: Sequence[int] = (), *, take: bool = False
    ) -> UnexpectedMessage:
        """Wait for a message that a receive would match, and return it."""
        matches: list[UnexpectedMessage] = []

        def ready() -> bool:
            message = self._queues.find(context, src, tag, take=take)
            matches.extend([] if message is None else [message])
            return message is not None

        self.wait_until(ready, [ReceiveOperation(context, src, tag, None, among or range(self.size))])
        return matches[0]

    def accept(self, message: UnexpectedMessage, into: memoryview | None) -> ReceiveOperation:
        """Receive a message that a probe has reserved."""
        receive = ReceiveOperation(message.context, message.src, message.tag, into)
        self._enter()
        with self._lock:
            self._match(message, receive)
            self._reply()
        return receive

    def cancel(self, receive: ReceiveOperation) -> bool:
        """Cancel a receive if no message has matched it; returns whether it was cancelled."""
        with self._lock:
            return self._queues.withdraw(receive)

    def active(self, dst: int, context: int, tag: int, serial: int, body: bytes | memoryview) -> None:
        """Send an active message: a handler runs on arrival. Its memory is copied."""
        self._enter()
        with self._lock:
            self._put(dst, HEAD.pack(_ACTIVE, 0, tag, context, serial), body)

    def answer(self, dst: int, context: int, tag: int, serial: int, body: bytes) -> None:
        """Send an active message from inside a handler; it is sent when the handler has returned."""
        self._replies.append((dst, HEAD.pack(_ACTIVE, 0, tag, context, serial), body))

    def handle(self, context: int, handler: Handler | None) -> None:
        """Set the handler of a context's active messages; None removes it."""
        with self._lock:
            if handler is None:
                self._handlers.pop(context, None)
            else:
                self._handlers[context] = handler

    # -- waiting ------------------------------------------------------------------------------------------------------

    def make_progress(self, *, helper: bool = False) -> None:
        """Make progress without waiting. A helper is a thread that never sends for itself."""
        if not helper:
            self._enter()
        with self._lock:
            self._progress(0.0)

    def wait(self, *items: Waitable) -> None:
        """Return when all are complete."""
        for item in items:
            while not item.done:
                self.wait_until(lambda item=item: item.done, items)  # type: ignore[misc]  # a lambda with a default

    def wait_until(self, ready: Callable[[], bool], items: Iterable[Waitable], *, brief: bool = False) -> None:
        """Return when `ready()`, which depends on `items`. `brief`: another thread may make it ready."""
        self._enter()
        started = 0.0
        wait = None
        try:
            while True:
                with self._lock:
                    if wait is None:
                        if ready():
                            return
                        wait = self.detector.begin(items)
                    self._progress(_ALONE if len(self.detector.users) == 1 and not brief else _CROWDED)
                    if wait.deadlock is not None:
                        raise wait.deadlock
                    if ready():
                        return
                    now = time.monotonic()
                    started = started or now
                    self.detector.check(now - started, now)
                    if now - started > _HEALTH:
                        self._check_alive(wait.items)
                if self._lock.waiters:
                    time.sleep(1e-5)
        finally:
            if wait is not None:
                self.detector.end(wait)

    def _check_alive(self, items: Iterable[Waitable]) -> None:
        """Refuse to wait for ranks that have died."""
        for item in items:
            reasons = {} if item.done else {rank: self.endpoint.gone(rank) for rank in item.peers}
            if reasons and all(reasons.values()):
                rank, reason = next(iter(reasons.items()))
                raise GaveUp(f"rank {self.rank} waits for a message {item.about()}, but rank {rank} {reason}")

    def attend(self, item: Waitable, waited: float) -> DrumlineError | None:
        """Take part in deadlock detection while a thread waits by other means; called repeatedly, returns a deadlock.
        `leave` ends it."""
        self._enter()
        with self._lock:
            wait = self.detector.of_this_thread() or self.detector.begin([item])
            self._progress(0.0)
            self.detector.check(waited, time.monotonic())
            return wait.deadlock

    def leave(self) -> None:
        """End the wait of a thread that called `attend`."""
        with self._lock:
            wait = self.detector.of_this_thread()
            if wait is not None:
                self.detector.end(wait)

    def close(self) -> None:
        """Announce that this rank ends, and flush its sends; a peer that died ends the wait."""
        if self.closed:
            return
        self.closed = self._flusher.closed = True
        try:
            with self._lock:
                for dst in range(self.size):
                    if dst != self.rank:
                        self._put(dst, HEAD.pack(_LEFT, 0, 0, 0, 0), b"")
                while self._flusher.busy:
                    self._progress(_ALONE)
        except DrumlineError:
            return  # no rank is left to receive them
        self.endpoint.close()

    # -- progress -----------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Record the threads that use the endpoint: one thread may wait long, several may not."""
        self.detector.users.add(threading.get_ident())
        if self.closed:
            raise GaveUp(f"rank {self.rank} has ended its messages", rule="nothing is sent or received after Finalize")

    def _progress(self, timeout: float) -> None:
        if self._replies:
            self._reply()
        self.endpoint.progress(timeout)
        if self._replies:
            self._reply()

    def _reply(self) -> None:
        """Send the replies of callbacks: they run inside `progress`, which is not reentrant."""
        replies, self._replies = self._replies, []
        for dst, head, body in replies:
            self._put(dst, head, body)

    def _put(self, dst: int, head: bytes, body: bytes | memoryview) -> None:
        if head[0] <= _LEFT:
            self.detector.sent[dst] += 1
        frame = self.endpoint.put(dst, head, memoryview(bytes(body)))
        if not frame.done:
            self._flush_later(dst, frame)

    def _flush_later(self, dst: int, frame: OutgoingFrame) -> None:
        """Flush a send that no caller waits on."""
        if dst != self.rank:  # a frame to this rank needs no flushing
            self._flusher.add(frame)

    def _control(self, dst: int, kind: str, body: bytes) -> None:
        """Send a message of the deadlock detector."""
        code = {"query": _QUERY, "state": _STATE, "deadlock": _DEADLOCK}[kind]
        self._replies.append((dst, HEAD.pack(code, 0, 0, 0, 0), body))

    # -- incoming frames ----------------------------------------------------------------------------------------------

    def begin(self, src: int, head: bytes, size: int) -> memoryview:
        """A frame starts to arrive: match a receive, or queue it as unexpected."""
        kind, type_code, tag, context, serial = HEAD.unpack(head)
        if kind > _SYNC:
            self._arriving[src] = None
            return memoryview(bytearray(size))
        receive = self._queues.claim(context, src, tag)
        if receive is not None:
            self._arriving[src] = receive
            if serial:
                self._acknowledge(src, serial)
            receive.source, receive.tag, receive.nbytes, receive.type_code = src, tag, size, type_code
            if receive.into is None:
                receive.into = memoryview(bytearray(size))
            return memoryview(bytearray(size)) if receive.truncated else receive.into[:size]
        message = UnexpectedMessage(context, src, tag, type_code, serial, size)
        self._arriving[src] = message
        self._queues.keep(message)
        return message.data

    def end(self, src: int, head: bytes, body: memoryview) -> None:
        """A frame is complete."""
        arrived = self._arriving.pop(src)
        kind = head[0]
        self.detector.moves += 1
        if kind <= _LEFT:
            self.detector.received[src] += 1
        if isinstance(arrived, ReceiveOperation):
            arrived.done = True
        elif isinstance(arrived, UnexpectedMessage):
            arrived.complete = True
            if arrived.receive is not None:
                self._deliver(arrived, arrived.receive)
        else:
            self._handle_control(src, kind, head, body)

    def _handle_control(self, src: int, kind: int, head: bytes, body: memoryview) -> None:
        _, _, tag, context, serial = HEAD.unpack(head)
        if kind == _ACK:
            self._unacked.pop(serial).acked = True
        elif kind == _ACTIVE:
            handler = self._handlers.get(context)
            if handler is None:
                raise GaveUp(f"rank {src} sent a one-sided message to a window that rank {self.rank} does not have")
            handler(src, tag, serial, body)
        elif kind == _LEFT:
            self.detector.left.add(src)
        else:
            self.detector.moves -= 1  # the detector's own messages are not progress
            self.detector.handle(src, {_QUERY: "query", _STATE: "state", _DEADLOCK: "deadlock"}[kind], bytes(body))

    def _match(self, message: UnexpectedMessage, receive: ReceiveOperation) -> None:
        """Match a receive with a message that arrived before it."""
        receive.source, receive.tag, receive.nbytes = message.src, message.tag, message.nbytes
        receive.type_code = message.type_code
        if message.serial:
            self._acknowledge(message.src, message.serial)
        if message.complete:
            self._deliver(message, receive)
        else:
            message.receive = receive

    def _deliver(self, message: UnexpectedMessage, receive: ReceiveOperation) -> None:
        if receive.into is None:
            receive.into = message.data
        elif not receive.truncated:
            receive.into[: message.nbytes] = message.data
        receive.done = True

    def _acknowledge(self, src: int, serial: int) -> None:
        self._replies.append((src, HEAD.pack(_ACK, 0, 0, 0, serial), b""))


class _CompletedFrame:
    """A frame whose memory is free."""

    done = True


_COMPLETED = _CompletedFrame()
