"""Point-to-point messages of Python objects: pickled, and received without knowing their size."""

from __future__ import annotations

import warnings
from typing import Any

from . import constants as C
from . import pickling
from .message import ANY_SOURCE, ANY_TAG, pending_object
from .pending import PendingOperation, null_message
from .probes import MessageProbes
from .request import Request
from .status import Status


class ObjectMessages(MessageProbes):
    """The lower-case messages of a communicator."""

    __slots__ = ()

    def _send_object(
        self, obj: Any, dest: int, tag: int, *, sync: bool = False, copy: bool = False
    ) -> PendingOperation:
        if dest == C.PROC_NULL:
            return null_message()
        return self._put(memoryview(pickling.default.dumps(obj)), 0, dest, tag, sync=sync, copy=copy)

    def _receive_object(self, source: int, tag: int, hint: Any = None) -> PendingOperation:
        if hint is not None and not isinstance(hint, int):
            memoryview(hint)
        if source == C.PROC_NULL:
            return null_message()
        return pending_object(self._state, self._post(source, tag, None))

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self._complete(self._send_object(obj, dest, tag))

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; return when a receive has matched it."""
        self._complete(self._send_object(obj, dest, tag, sync=True))

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; never blocks."""
        self._send_object(obj, dest, tag, copy=True)

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Receive an object. `buf` is unused and deprecated."""
        if buf is not None:
            warnings.warn("the 'buf' argument is deprecated", UserWarning, stacklevel=2)
        return self._complete(self._receive_object(source, tag, buf), status)

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
        """Send and receive an object."""
        receiving = self._receive_object(source, recvtag, recvbuf)
        return self._both(receiving, lambda: self._send_object(sendobj, dest, sendtag), status)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object."""
        return Request._of(self._send_object(obj, dest, tag))

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; complete when a receive has matched it."""
        return Request._of(self._send_object(obj, dest, tag, sync=True))

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Start to send an object; complete at once."""
        return Request._of(self._send_object(obj, dest, tag, copy=True))

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start to receive an object; `wait` returns it. `buf` may be a size or a buffer, and is unused."""
        return Request._of(self._receive_object(source, tag, buf))
