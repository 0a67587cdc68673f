"""Point-to-point messages of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..comm.messaging.matching import EAGER
from ..comm.messaging.messages import ReceiveOperation
from . import constants as C
from .buffers import NOTHING, parse_message
from .exception import MPIError
from .handles import Handle
from .message import (
    ANY_SOURCE,
    ANY_TAG,
    fill_status,
    finish_receive,
    pending_receive,
)
from .pending import PendingOperation, null_message
from .persistent_request import Prequest
from .request import Request
from .state import MESSAGES, CommState
from .status import Status


class PointToPoint(Handle):
    """The point-to-point messages of a communicator."""

    __slots__ = ()
    _h: CommState | None

    @property
    def _state(self) -> CommState:
        if self._h is None:
            raise MPIError(C.ERR_COMM, "COMM_NULL", rule="a communicator that exists")
        return self._h

    # -- starting -----------------------------------------------------------------------------------------------------

    def _peer(self, rank: int, *, wild: bool = False) -> int:
        """The world rank of a rank."""
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
    ) -> PendingOperation:
        if not 0 <= tag <= C.TAG_LIMIT:
            raise MPIError(C.ERR_TAG, f"tag {tag}", rule=f"0 <= tag <= {C.TAG_LIMIT}")
        state = self._state
        sending = state.matcher.send(
            self._peer(dest), state.context + MESSAGES, tag, data, sync=sync, copy=copy, type_code=check
        )
        return PendingOperation(state.matcher, (sending,))

    def _isend(self, buf: Any, dest: int, tag: int, *, sync: bool = False, copy: bool = False) -> PendingOperation:
        self._peer(dest) if dest != C.PROC_NULL else self._state
        if dest == C.PROC_NULL:
            return null_message()
        region = parse_message(buf, writable=False)
        return self._put(region.data(), region.check, dest, tag, sync=sync, copy=copy)

    def _irecv(self, buf: Any, source: int, tag: int) -> PendingOperation:
        if source == C.PROC_NULL:
            return null_message()
        region = parse_message(buf, writable=True)
        receive_memory = region.receive_memory()
        return pending_receive(self._state, self._post(source, tag, receive_memory), region, receive_memory)

    def _post(self, source: int, tag: int, into: memoryview | None) -> ReceiveOperation:
        if tag != C.ANY_TAG and not 0 <= tag <= C.TAG_LIMIT:
            raise MPIError(C.ERR_TAG, f"tag {tag}", rule=f"0 <= tag <= {C.TAG_LIMIT}, or ANY_TAG")
        state, src = self._state, self._peer(source, wild=True)
        return state.matcher.receive(src, state.context + MESSAGES, tag, into, state.members)

    def _complete(self, pending: PendingOperation, status: Status | None = None) -> Any:
        """Wait for a message of a blocking call; if the wait fails, it is cancelled."""
        if pending.matcher is not None and not pending.done:
            try:
                pending.matcher.wait(*pending.items)
            except BaseException:
                pending.cancel()
                raise
        if status is not None:
            pending.fill_status(status)
        return pending.finish()

    # -- buffers, blocking --------------------------------------------------------------------------------------------

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send; the buffer may be used again on return."""
        if dest == C.PROC_NULL:
            return
        region = parse_message(buf, writable=False)
        self._complete(self._put(region.data(), region.check, dest, tag, copy=region.nbytes <= EAGER))

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send; return when a receive has matched it."""
        self._complete(self._isend(buf, dest, tag, sync=True))

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy; never blocks."""
        self._isend(buf, dest, tag, copy=True)

    def Rsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send; the receive must already be posted."""
        self._complete(self._isend(buf, dest, tag))

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive; fewer elements than fit are allowed, more are an error."""
        if source == C.PROC_NULL:
            self._complete(null_message(), status)
            return
        region, state = parse_message(buf, writable=True), self._state
        receive_memory = region.receive_memory()
        receive = self._post(source, tag, receive_memory)
        if not receive.done:
            try:
                state.matcher.wait(receive)
            except BaseException:
                state.matcher.cancel(receive)
                raise
        if status is not None:
            fill_status(state, receive, status)
        finish_receive(state, receive, region, receive_memory)

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
        """Send and receive."""
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
        """Send a buffer's contents and receive into it."""
        region = NOTHING if C.PROC_NULL in (dest, source) and buf is None else parse_message(buf, writable=True)
        data = memoryview(bytes(region.data()))
        message = [region.memory[region.base :], region.count, region.type] if region.base >= 0 else buf
        receiving = self._irecv(message if region.device is None else buf, source, recvtag)
        self._both(
            receiving,
            lambda: null_message() if dest == C.PROC_NULL else self._put(data, region.check, dest, sendtag),
            status,
        )

    def _both(self, receiving: PendingOperation, send: Callable[[], PendingOperation], status: Status | None) -> Any:
        """Send and wait for both; what was received. If the send is refused, the receive is cancelled."""
        try:
            sending = send()
        except BaseException:
            receiving.cancel()
            raise
        self._complete(PendingOperation(receiving.matcher or sending.matcher, (*receiving.items, *sending.items)))
        return self._complete(receiving, status)

    # -- buffers, not blocking ----------------------------------------------------------------------------------------

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send."""
        return Request._of(self._isend(buf, dest, tag))

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send; complete when a receive has matched it."""
        return Request._of(self._isend(buf, dest, tag, sync=True))

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send a copy."""
        return Request._of(self._isend(buf, dest, tag, copy=True))

    def Irsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start to send; the receive must already be posted."""
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
        """Start to send and receive."""
        return Request._of(_joined(self._irecv(recvbuf, source, recvtag), self._isend(sendbuf, dest, sendtag)))

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Start to send a buffer's contents and receive into it."""
        sending = self._isend(buf, dest, sendtag, copy=True)
        return Request._of(_joined(self._irecv(buf, source, recvtag), sending))

    # -- buffers, persistent ------------------------------------------------------------------------------------------

    def _init(self, start: Callable[[], PendingOperation]) -> Prequest:
        return Prequest._of(PendingOperation(self._state.matcher, (), start=start))

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Make a persistent send."""
        return self._init(lambda: self._isend(buf, dest, tag))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Make a persistent synchronous send."""
        return self._init(lambda: self._isend(buf, dest, tag, sync=True))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Make a persistent buffered send."""
        return self._init(lambda: self._isend(buf, dest, tag, copy=True))

    def Rsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Make a persistent ready send."""
        return self._init(lambda: self._isend(buf, dest, tag))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Make a persistent receive."""
        return self._init(lambda: self._irecv(buf, source, tag))


def _joined(receiving: PendingOperation, sending: PendingOperation) -> PendingOperation:
    """Both as one request, with the receive's status."""
    return PendingOperation(
        receiving.matcher or sending.matcher,
        (*receiving.items, *sending.items),
        receiving.finish,
        receiving.fill_status,
        receiving.cancel,
    )
