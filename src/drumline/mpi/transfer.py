"""What becomes of a message that is received: into its buffer or its object; and messages that a probe has found."""

from __future__ import annotations

from typing import Any, Self

from ..comm.mail.message import Arrival, Receive
from . import constants as C
from . import pickles
from .buffers import Spot, simple
from .exception import MPIError
from .handle import Handle
from .request import Pending, Request, done_already
from .state import CommState
from .status import Status

ANY_SOURCE, ANY_TAG = C.ANY_SOURCE, C.ANY_TAG


def arrived(state: CommState, receive: Receive, spot: Spot, landing: memoryview) -> None:
    """A receive is done: refuse what does not fit, and put the rest in its place."""
    if receive.cancelled:
        return
    if receive.truncated:
        raise MPIError(
            C.ERR_TRUNCATE,
            f"a message of {receive.nbytes} bytes {_whence(state, receive)}",
            rule=f"the buffer has room for {len(landing)}",
            fix="a larger buffer; Probe tells the size beforehand",
        )
    if receive.elements and spot.check and receive.elements != spot.check and receive.nbytes:
        name = spot.type.Get_name() or "the datatype given"
        raise MPIError(
            C.ERR_TYPE,
            f"a message {_whence(state, receive)} has other elements than {name}",
            rule="sender and receiver name the same type",
            fix="MPI.BYTE on both sides moves bytes as they are",
        )
    spot.land(landing, receive.nbytes)


def _whence(state: CommState, receive: Receive) -> str:
    return f"from rank {state.index[receive.source]}, tag {receive.tag}"


def tell(state: CommState, receive: Receive, status: Status) -> None:
    """Fill a status from a receive."""
    source = state.index.get(receive.source, C.ANY_SOURCE)
    error = C.ERR_TRUNCATE if receive.truncated else C.SUCCESS
    nbytes = 0 if receive.cancelled else receive.nbytes
    status._fill(source, receive.tag, nbytes, error=error, cancelled=receive.cancelled)


def into_spot(state: CommState, receive: Receive, spot: Spot, landing: memoryview) -> Pending:
    """A receive into a buffer, as a request."""
    return Pending(
        state.matching,
        (receive,),
        lambda: arrived(state, receive, spot, landing),
        lambda status: tell(state, receive, status),
        lambda: state.matching.cancel(receive),
    )


def into_object(state: CommState, receive: Receive) -> Pending:
    """A receive of an object, as a request."""

    def finish() -> Any:
        return None if receive.cancelled else pickles.default.loads(receive.into)

    return Pending(
        state.matching,
        (receive,),
        finish,
        lambda status: tell(state, receive, status),
        lambda: state.matching.cancel(receive),
    )


class Found:
    """A message that a probe has taken; `arrival` is None for one from nobody."""

    __slots__ = ("__weakref__", "arrival", "state")

    def __init__(self, state: CommState | None, arrival: Arrival | None) -> None:
        self.state, self.arrival = state, arrival


class Message(Handle, family=True):
    """A message that was found by a matched probe, and that only its finder can receive."""

    __slots__ = ()
    _h: Found | None

    @classmethod
    def Probe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Self:
        """Wait for a message and keep it."""
        return cls(comm.Mprobe(source, tag, status))

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Self | None:
        """Keep a message, if there is one."""
        found = comm.Improbe(source, tag, status)
        return None if found is None else cls(found)

    probe, iprobe = Probe, Iprobe

    def _take(self) -> Found:
        found = self._h
        if found is None:
            raise MPIError(C.ERR_REQUEST, "MESSAGE_NULL", rule="a message that was found")
        if self is not MESSAGE_NO_PROC:
            self._h = None
        return found

    def _start(self, buf: Any, *, is_object: bool) -> Pending:
        found = self._take()
        if found.state is None or found.arrival is None:
            return done_already()
        if is_object:
            return into_object(found.state, found.state.matching.accept(found.arrival, None))
        spot = simple(buf, writable=True)
        landing = spot.landing()
        return into_spot(found.state, found.state.matching.accept(found.arrival, landing), spot, landing)

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive it."""
        Request._of(self._start(buf, is_object=False)).Wait(status)

    def Irecv(self, buf: Any) -> Request:
        """Start to receive it."""
        return Request._of(self._start(buf, is_object=False))

    def recv(self, status: Status | None = None) -> Any:
        """Receive the object."""
        return Request._of(self._start(None, is_object=True)).wait(status)

    def irecv(self) -> Request:
        """Start to receive the object."""
        return Request._of(self._start(None, is_object=True))


MESSAGE_NULL = Message._constant("MESSAGE_NULL")
MESSAGE_NO_PROC = Message._constant("MESSAGE_NO_PROC", Found(None, None))
