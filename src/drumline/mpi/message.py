"""Completing receives into buffers and objects; and messages found by a matched probe."""

from __future__ import annotations

from typing import Any, Self

from ..comm.messaging.messages import ReceiveOperation, UnexpectedMessage
from . import constants as C
from . import pickling
from .buffers import MessageBuffer, parse_message
from .exception import MPIError
from .handles import Handle
from .pending import PendingOperation, null_message
from .request import Request
from .state import CommState
from .status import Status

ANY_SOURCE, ANY_TAG = C.ANY_SOURCE, C.ANY_TAG


def finish_receive(
    state: CommState, receive: ReceiveOperation, region: MessageBuffer, receive_memory: memoryview
) -> None:
    """Complete a receive: refuse a message that does not fit, and unpack it."""
    if receive.cancelled:
        return
    if receive.truncated:
        raise MPIError(
            C.ERR_TRUNCATE,
            f"a message of {receive.nbytes} bytes {_origin(state, receive)}",
            rule=f"the buffer has room for {len(receive_memory)}",
            fix="a larger buffer; Probe returns the size in advance",
        )
    if receive.type_code and region.check and receive.type_code != region.check and receive.nbytes:
        name = region.type.Get_name() or "the datatype given"
        raise MPIError(
            C.ERR_TYPE,
            f"a message {_origin(state, receive)} has other elements than {name}",
            rule="sender and receiver use the same type",
            fix="MPI.BYTE on both sides moves bytes as they are",
        )
    region.unpack_received(receive_memory, receive.nbytes)


def _origin(state: CommState, receive: ReceiveOperation) -> str:
    return f"from rank {state.index[receive.source]}, tag {receive.tag}"


def fill_status(state: CommState, receive: ReceiveOperation, status: Status) -> None:
    """Fill a status from a receive."""
    source = state.index.get(receive.source, C.ANY_SOURCE)
    error = C.ERR_TRUNCATE if receive.truncated else C.SUCCESS
    nbytes = 0 if receive.cancelled else receive.nbytes
    status._fill(source, receive.tag, nbytes, error=error, cancelled=receive.cancelled)


def pending_receive(
    state: CommState, receive: ReceiveOperation, region: MessageBuffer, receive_memory: memoryview
) -> PendingOperation:
    """A pending receive into a buffer."""
    return PendingOperation(
        state.matcher,
        (receive,),
        lambda: finish_receive(state, receive, region, receive_memory),
        lambda status: fill_status(state, receive, status),
        lambda: state.matcher.cancel(receive),
    )


def pending_object(state: CommState, receive: ReceiveOperation) -> PendingOperation:
    """A pending receive of an object."""

    def finish() -> Any:
        return None if receive.cancelled else pickling.default.loads(receive.into)

    return PendingOperation(
        state.matcher,
        (receive,),
        finish,
        lambda status: fill_status(state, receive, status),
        lambda: state.matcher.cancel(receive),
    )


class ProbedMessage:
    """A message that a probe has reserved; both fields are None for MESSAGE_NO_PROC."""

    __slots__ = ("__weakref__", "message", "state")

    def __init__(self, state: CommState | None, message: UnexpectedMessage | None) -> None:
        self.state, self.message = state, message


class Message(Handle, family=True):
    """A message found by a matched probe, reserved for its finder."""

    __slots__ = ()
    _h: ProbedMessage | None

    @classmethod
    def Probe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Self:
        """Wait for a message and reserve it."""
        return cls(comm.Mprobe(source, tag, status))

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Self | None:
        """Reserve a message, if there is one."""
        message = comm.Improbe(source, tag, status)
        return None if message is None else cls(message)

    probe, iprobe = Probe, Iprobe

    def _take(self) -> ProbedMessage:
        probed = self._h
        if probed is None:
            raise MPIError(C.ERR_REQUEST, "MESSAGE_NULL", rule="a message found by a probe")
        if self is not MESSAGE_NO_PROC:
            self._h = None
        return probed

    def _start(self, buf: Any, *, is_object: bool) -> PendingOperation:
        probed = self._take()
        if probed.state is None or probed.message is None:
            return null_message()
        if is_object:
            return pending_object(probed.state, probed.state.matcher.accept(probed.message, None))
        region = parse_message(buf, writable=True)
        receive_memory = region.receive_memory()
        return pending_receive(
            probed.state, probed.state.matcher.accept(probed.message, receive_memory), region, receive_memory
        )

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
MESSAGE_NO_PROC = Message._constant("MESSAGE_NO_PROC", ProbedMessage(None, None))
