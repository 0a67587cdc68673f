"""Messages between two ranks: of buffers, and of Python objects."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from ..comm.mail.matching import EAGER
from ..comm.mail.message import Arrival, Receive
from . import constants as C
from . import pickles
from .buffers import NOTHING, simple
from .exception import MPIError
from .handle import Handle
from .request import Pending, Prequest, Request, done_already
from .state import MESSAGES, CommState
from .status import Status
from .transfer import ANY_SOURCE, ANY_TAG, MESSAGE_NO_PROC, Found, Message, arrived, into_object, into_spot, tell


class PointToPoint(Handle):
    """The messages of a communicator."""

    __slots__ = ()
    _h: CommState | None

    @property
    def _state(self) -> CommState:
        if self._h is None:
            raise MPIError(C.ERR_COMM, "COMM_NULL", rule="a communicator that exists")
        return self._h

    # -- starting ---------------------------------------------------------------------------------------------------

    def _peer(self, rank: int, *, wild: bool = False) -> int:
        """The number in the world of a rank."""
        state = self._state
        if wild and rank == C.ANY_SOURCE:
            return rank
        if not 0 <= rank < state.size:
            raise MPIError(
                C.ERR_RANK,
                f"rank {rank}",
                rule=f"0 <= rank < {state.size}{', ANY_SOURCE' if wild else ''} or PROC_NULL",
            )
        return state.members[rank]

    def _put(
        self, data: memoryview, check: int, dest: int, tag: int, *, sync: bool = False, copy: bool = False
    ) -> Pending:
        if not 0 <= tag <= C.TAG_LIMIT:
            raise MPIError(C.ERR_TAG, f"tag {tag}", rule=f"0 <= tag <= {C.TAG_LIMIT}")
        state = self._state
        sending = state.matching.send(
            self._peer(dest), state.context + MESSAGES, tag, data, sync=sync, copy=copy, elements=check
        )
        return Pending(state.matching, (sending,))

    def _isend(self, buf: Any, dest: int, tag: int, *, sync: bool = False, copy: bool = False) -> Pending:
        self._peer(dest) if dest != C.PROC_NULL else self._state
        if dest == C.PROC_NULL:
            return done_already()
        spot = simple(buf, writable=False)
        return self._put(spot.data(), spot.check, dest, tag, sync=sync, copy=copy)

    def _irecv(self, buf: Any, source: int, tag: int) -> Pending:
        if source == C.PROC_NULL:
            return done_already()
        spot = simple(buf, writable=True)
        landing = spot.landing()
        return into_spot(self._state, self._post(source, tag, landing), spot, landing)

    def _post(self, source: int, tag: int, into: memoryview | None) -> Receive:
        if tag != C.ANY_TAG and not 0 <= tag <= C.TAG_LIMIT:
            raise MPIError(C.ERR_TAG, f"tag {tag}", rule=f"0 <= tag <= {C.TAG_LIMIT}, or ANY_TAG")
        state, src = self._state, self._peer(source, wild=True)
        return state.matching.receive(src, state.context + MESSAGES, tag, into, state.members)

    def _complete(self, pending: Pending, status: Status | None = None) -> Any:
        """Wait for a message that nobody else knows of; if the wait fails it is taken back."""
        if pending.matching is not None and not pending.done:
            try:
                pending.matching.wait(*pending.items)
            except BaseException:
                pending.cancel()
                raise
        if status is not None:
            pending.tell(status)
        return pending.finish()

    # -- buffers, blocking ------------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send; the buffer may be used again on return."""
        if dest == C.PROC_NULL:
            return
        spot = simple(buf, writable=False)
        self._complete(self._put(spot.data(), spot.check, dest, tag, copy=spot.nbytes <= EAGER))

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send; return when a receive has met it."""
        self._complete(self._isend(buf, dest, tag, sync=True))

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy; never waits."""
        self._isend(buf, dest, tag, copy=True)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send where the receive is known to be posted."""
        self._complete(self._isend(buf, dest, tag))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive; fewer elements than fit are fine, more are an error."""
        if source == C.PROC_NULL:
            self._complete(done_already(), status)
            return
        spot, state = simple(buf, writable=True), self._state
        landing = spot.landing()
        receive = self._post(source, tag, landing)
        if not receive.done:
            try:
                state.matching.wait(receive)
            except BaseException:
                state.matching.cancel(receive)
                raise
        if status is not None:
            tell(state, receive, status)
        arrived(state, receive, spot, landing)

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send and receive at once."""
        receiving = self._irecv(recvbuf, source, recvtag)
        self._both(receiving, lambda: self._isend(sendbuf, dest, sendtag), status)

    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send what a buffer holds and receive into it."""
        spot = NOTHING if C.PROC_NULL in (dest, source) and buf is None else simple(buf, writable=True)
        data = memoryview(bytes(spot.data()))
        message = [spot.memory[spot.base :], spot.count, spot.type] if spot.base >= 0 else buf
        receiving = self._irecv(message if spot.device is None else buf, source, recvtag)
        self._both(
            receiving,
            lambda: done_already() if dest == C.PROC_NULL else self._put(data, spot.check, dest, sendtag),
            status,
        )

    def _both(self, receiving: Pending, send: Callable[[], Pending], status: Status | None) -> None:
        try:
            sending = send()
        except BaseException:
            receiving.cancel()
            raise
        self._complete(Pending(receiving.matching or sending.matching, (*receiving.items, *sending.items)))
        self._complete(receiving, status)

    # -- buffers, not blocking --------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send."""
        return Request._of(self._isend(buf, dest, tag))

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send; done when a receive has met it."""
        return Request._of(self._isend(buf, dest, tag, sync=True))

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a copy."""
        return Request._of(self._isend(buf, dest, tag, copy=True))

    def Irsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send where the receive is known to be posted."""
        return Request._of(self._isend(buf, dest, tag))

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive."""
        return Request._of(self._irecv(buf, source, tag))

    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        """Start to send and receive at once."""
        return Request._of(_joined(self._irecv(recvbuf, source, recvtag), self._isend(sendbuf, dest, sendtag)))

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Start to send what a buffer holds and receive into it."""
        sending = self._isend(buf, dest, sendtag, copy=True)
        return Request._of(_joined(self._irecv(buf, source, recvtag), sending))

    # -- buffers, again and again -----------------------------------------------------------------------------------

    def _init(self, start: Callable[[], Pending]) -> Prequest:
        return Prequest._of(Pending(self._state.matching, (), start=start))

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Describe a send that is started later, perhaps often."""
        return self._init(lambda: self._isend(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """The same, done when a receive has met it."""
        return self._init(lambda: self._isend(buf, dest, tag, sync=True))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """The same with a copy."""
        return self._init(lambda: self._isend(buf, dest, tag, copy=True))

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """The same where the receive is known to be posted."""
        return self._init(lambda: self._isend(buf, dest, tag))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Describe a receive that is started later, perhaps often."""
        return self._init(lambda: self._irecv(buf, source, tag))

    # -- looking ----------------------------------------------------------------------------------------------------

    def _look(self, source: int, tag: int, status: Status | None, *, block: bool, take: bool) -> Arrival | None:
        state, src = self._state, self._peer(source, wild=True)
        context = state.context + MESSAGES
        if block:
            found: Arrival | None = state.matching.wait_probe(src, context, tag, state.members, take=take)
        else:
            found = state.matching.probe(src, context, tag, take=take)
        if found is not None and status is not None:
            status._fill(state.index[found.src], found.tag, found.nbytes)
        return found

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return when there is a message that a receive would take."""
        if source == C.PROC_NULL:
            done_already().tell(Status() if status is None else status)
            return True
        self._look(source, tag, status, block=True, take=False)
        return True

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether there is a message that a receive would take."""
        if source == C.PROC_NULL:
            return self.Probe(source, tag, status)
        return self._look(source, tag, status, block=False, take=False) is not None

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message and keep it for its finder."""
        if source == C.PROC_NULL:
            self.Probe(source, tag, status)
            return Message(MESSAGE_NO_PROC)
        return Message._of(Found(self._state, self._look(source, tag, status, block=True, take=True)))

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """Keep a message for its finder, if there is one."""
        if source == C.PROC_NULL:
            return self.Mprobe(source, tag, status)
        found = self._look(source, tag, status, block=False, take=True)
        return None if found is None else Message._of(Found(self._state, found))

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    # -- objects ----------------------------------------------------------------------------------------------------

    def _ship(self, obj: Any, dest: int, tag: int, *, sync: bool = False, copy: bool = False) -> Pending:
        if dest == C.PROC_NULL:
            return done_already()
        return self._put(memoryview(pickles.default.dumps(obj)), 0, dest, tag, sync=sync, copy=copy)

    def _fetch(self, source: int, tag: int, hint: Any = None) -> Pending:
        if hint is not None and not isinstance(hint, int):
            memoryview(hint)
        if source == C.PROC_NULL:
            return done_already()
        return into_object(self._state, self._post(source, tag, None))

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self._complete(self._ship(obj, dest, tag))

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; return when a receive has met it."""
        self._complete(self._ship(obj, dest, tag, sync=True))

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; never waits."""
        self._ship(obj, dest, tag, copy=True)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receive an object. `buf` is of no use, and kept for old programs."""
        if buf is not None:
            warnings.warn("the 'buf' argument is deprecated", UserWarning, stacklevel=2)
        return self._complete(self._fetch(source, tag, buf), status)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:
        """Send and receive an object at once."""
        receiving, sending = self._fetch(source, recvtag, recvbuf), self._ship(sendobj, dest, sendtag)
        self._complete(Pending(receiving.matching or sending.matching, (*receiving.items, *sending.items)))
        return self._complete(receiving, status)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object."""
        return Request._of(self._ship(obj, dest, tag))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; done when a receive has met it."""
        return Request._of(self._ship(obj, dest, tag, sync=True))

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; done at once."""
        return Request._of(self._ship(obj, dest, tag, copy=True))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object; `wait` gives it. `buf` may be a size or a buffer, and is not needed."""
        return Request._of(self._fetch(source, tag, buf))


def _joined(receiving: Pending, sending: Pending) -> Pending:
    """Both as one request; its status is the receive's."""
    return Pending(
        receiving.matching or sending.matching,
        (*receiving.items, *sending.items),
        receiving.finish,
        receiving.tell,
        receiving.cancel,
    )
