"""Probes: which message a receive would match, and messages reserved for their finder."""

from __future__ import annotations

from ..comm.messaging.messages import UnexpectedMessage
from . import constants as C
from .message import ANY_SOURCE, ANY_TAG, MESSAGE_NO_PROC, Message, ProbedMessage
from .pending import null_message
from .point_to_point import PointToPoint
from .state import MESSAGES
from .status import Status


class MessageProbes(PointToPoint):
    """The probes of a communicator."""

    __slots__ = ()

    def _probe(
        self, source: int, tag: int, status: Status | None, *, block: bool, take: bool
    ) -> UnexpectedMessage | None:
        state, src = self._state, self._peer(source, wild=True)
        context = state.context + MESSAGES
        if block:
            message: UnexpectedMessage | None = state.matcher.wait_probe(src, context, tag, state.members, take=take)
        else:
            message = state.matcher.probe(src, context, tag, take=take)
        if message is not None and status is not None:
            status._fill(state.index[message.src], message.tag, message.nbytes)
        return message

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return when there is a message that a receive would match."""
        if source == C.PROC_NULL:
            null_message().fill_status(Status() if status is None else status)
            return True
        self._probe(source, tag, status, block=True, take=False)
        return True

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether there is a message that a receive would match."""
        if source == C.PROC_NULL:
            return self.Probe(source, tag, status)
        return self._probe(source, tag, status, block=False, take=False) is not None

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message and reserve it."""
        if source == C.PROC_NULL:
            self.Probe(source, tag, status)
            return Message(MESSAGE_NO_PROC)
        return Message._of(ProbedMessage(self._state, self._probe(source, tag, status, block=True, take=True)))

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """Reserve a message, if there is one."""
        if source == C.PROC_NULL:
            return self.Mprobe(source, tag, status)
        message = self._probe(source, tag, status, block=False, take=True)
        return None if message is None else Message._of(ProbedMessage(self._state, message))

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe
