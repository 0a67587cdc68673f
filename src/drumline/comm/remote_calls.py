"""Remote calls between the processes of a job: a server answers named calls with JSON values and tensors.

For processes that come and go. A collective needs all of its ranks, and a process group cannot lose one; here each pair
of processes has a connection of its own, a lost one is noticed at once and means one lost caller, and a process that
comes later simply connects. On one host connections are Unix sockets in a private folder, between hosts TCP. A caller
must know the server's token, which is published where the ranks meet. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from ..core.errors import GaveUp

_HEAD = struct.Struct("<II")
"""Bytes of the JSON text, number of tensors."""
_MOST_TEXT = 1 << 22
"""The longest JSON text of a message, in bytes."""
_TOKEN_BYTES = 16
_HELLO_SECONDS = 10.0
"""Seconds in which a new connection must send its token and say who calls."""
_UNIX_PATH = 100
"""The longest path of a Unix socket, in bytes; Linux allows 107."""
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_DTYPES = {str(t).removeprefix("torch."): t for t in (*_FLOATS, *_INTEGERS)}

Values = dict[str, Any]
Handler = Callable[[int, str, Values, list[torch.Tensor]], tuple[Values, Sequence[torch.Tensor]]]
"""(caller, name, values, tensors) -> the answer's values and tensors. Runs in a thread of the caller's own."""


class CallerGone(Exception):
    """The connection was closed by the other side."""


class _MessageTooLarge(CallerGone):
    """Raised for a message that is larger than the receiver allows; the connection cannot be used after it."""


class CallServer:
    """Listens, and answers the calls of every caller in a thread of its own."""

    def __init__(
        self, handler: Handler, *, local: bool, most_bytes: int, on_lost: Callable[[int], None] = lambda _: None
    ) -> None:
        self._handler, self._most, self._on_lost = handler, most_bytes, on_lost
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._connections: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._socket, place = self._listen(local)
        self.address = f"{place}#{self._token.hex()}"
        """Address that callers connect to; it contains the token, so it is published only to ranks of the job."""
        threading.Thread(target=self._accept, name="calls", daemon=True).start()

    def _listen(self, local: bool) -> tuple[socket.socket, str]:
        if local:
            self._folder = tempfile.TemporaryDirectory(prefix="drumline-", ignore_cleanup_errors=True)
            path = os.path.join(self._folder.name, "calls")
            if len(path.encode()) <= _UNIX_PATH:
                listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listening.bind(path)
                listening.listen(512)
                return listening, f"unix:{path}"
        host = "127.0.0.1" if local else _interface_address()
        listening = socket.create_server((host, 0), backlog=512)
        return listening, f"tcp:{host}:{listening.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="caller", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        caller, known = -1, False
        try:
            _tune(connection)
            connection.settimeout(_HELLO_SECONDS)
            token = bytearray(_TOKEN_BYTES)
            _receive_into(connection, memoryview(token))
            if not hmac.compare_digest(bytes(token), self._token):
                return
            hello, _ = _receive(connection, 0)
            caller, known = int(hello["caller"]), True
            connection.settimeout(None)
            with self._lock:
                self._connections[caller] = connection
            _send(connection, {"most_bytes": self._most}, ())
            while True:
                values, tensors = _receive(connection, self._most)
                _send(connection, *self._answer(caller, values, tensors))
        except (CallerGone, GaveUp, OSError, ValueError, KeyError, TypeError):
            pass
        finally:
            connection.close()
            with self._lock:  # also around on_lost: the caller's next connection must not come in between
                if known and self._connections.get(caller) is connection:
                    del self._connections[caller]
                    self._on_lost(caller)

    def _answer(
        self, caller: int, values: Values, tensors: list[torch.Tensor]
    ) -> tuple[Values, Sequence[torch.Tensor]]:
        name = values.pop("call", "")
        try:
            answer, sent = self._handler(caller, name, values, tensors)
            return {"answer": answer}, sent
        except CallerGone:  # the handler knows that this connection is an old one
            raise
        except Exception as e:  # the error is sent to the caller; this side reports it by itself
            return {"error": f"{type(e).__name__}: {e}"}, ()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        for closing in (self._socket, *self._connections.values()):
            with contextlib.suppress(OSError):
                closing.shutdown(socket.SHUT_RDWR)
            closing.close()
        if self._folder is not None:
            self._folder.cleanup()


class CallClient:
    """A caller's connection to a server, for one call at a time."""

    def __init__(self, address: str, caller: int, *, timeout: float = 10.0) -> None:
        place, _, token = address.partition("#")
        kind, _, where = place.partition(":")
        self._lock = threading.Lock()
        if kind == "unix":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            host, _, port = where.rpartition(":")
            self._socket = socket.create_connection((host, int(port)), timeout=timeout)
        try:
            if kind == "unix":
                self._socket.settimeout(timeout)
                self._socket.connect(where)
            _tune(self._socket)
            self._socket.sendall(bytes.fromhex(token))
            _send(self._socket, {"caller": caller}, ())
            hello, _ = _receive(self._socket, 0)
            self._most = int(hello["most_bytes"])
            """Bytes of tensors that the server takes in one call."""
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(None)

    def call(
        self,
        name: str,
        values: Values | None = None,
        tensors: Sequence[torch.Tensor] = (),
        *,
        into: Sequence[torch.Tensor] = (),
        most_bytes: int = 0,
        on_sent: Callable[[], None] = lambda: None,
    ) -> tuple[Values, list[torch.Tensor]]:
        """Call the server, and wait for its answer. Raises CallerGone if the server is gone.

        The first tensors of the answer are received into the memory of `into`. `on_sent` is called before the wait.
        """
        if (size := sum(t.nbytes for t in tensors)) > self._most:
            raise GaveUp(
                f"the call {name!r} has {size:,} bytes of tensors", rule=f"the server takes at most {self._most:,}"
            )
        with self._lock:
            try:
                _send(self._socket, {"call": name, **(values or {})}, tensors)
                on_sent()
                answer, received = _receive(self._socket, most_bytes, into)
            except _MessageTooLarge as e:
                raise GaveUp(f"the answer to {name!r} is too large", rule=str(e)) from None
            except OSError as e:
                raise CallerGone(str(e)) from None
        if "error" in answer:
            raise GaveUp(f"the server could not answer {name!r}: {answer['error']}")
        return answer["answer"], received

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def connect_to_server(find: Callable[[], str], caller: int, *, patience: float) -> CallClient:
    """Connect to a server that may not listen yet, or not again; `find` looks its address up."""
    end = time.monotonic() + patience
    while True:
        try:
            return CallClient(find(), caller)
        except (OSError, CallerGone, ValueError) as e:
            if time.monotonic() > end:
                raise GaveUp(f"no parameter server answered within {patience:.0f} s", rule=str(e)) from None
            time.sleep(0.05)


def _send(connection: socket.socket, values: Values, tensors: Sequence[torch.Tensor]) -> None:
    shapes = [[str(t.dtype).removeprefix("torch."), t.numel()] for t in tensors]
    text = json.dumps({"values": values, "tensors": shapes}).encode()
    if len(text) > _MOST_TEXT:
        raise GaveUp(f"a message with {len(text):,} bytes of text", rule=f"at most {_MOST_TEXT:,}")
    connection.sendall(_HEAD.pack(len(text), len(tensors)) + text)
    for tensor in tensors:
        if tensor.numel():
            connection.sendall(_bytes_of(tensor))


def _receive(
    connection: socket.socket, most_bytes: int, into: Sequence[torch.Tensor] = ()
) -> tuple[Values, list[torch.Tensor]]:
    head = bytearray(_HEAD.size)
    _receive_into(connection, memoryview(head))
    length, count = _HEAD.unpack(head)
    if length > _MOST_TEXT:
        raise _MessageTooLarge(f"{length:,} bytes of text, and at most {_MOST_TEXT:,} are allowed")
    text = bytearray(length)
    _receive_into(connection, memoryview(text))
    message = json.loads(text)
    shapes = [(_DTYPES[kind], int(n)) for kind, n in message["tensors"]]
    if len(shapes) != count or any(n < 0 for _, n in shapes):
        raise CallerGone("a message that contradicts itself")
    if (size := sum(n * kind.itemsize for kind, n in shapes)) > most_bytes:
        raise _MessageTooLarge(f"{size:,} bytes of tensors, and at most {most_bytes:,} are allowed")
    tensors = [
        into[i]
        if i < len(into) and (into[i].dtype, into[i].numel()) == shape
        else torch.empty(shape[1], dtype=shape[0])
        for i, shape in enumerate(shapes)
    ]
    for tensor in tensors:
        if tensor.numel():
            _receive_into(connection, _bytes_of(tensor))
    values: Values = message["values"]
    return values, tensors


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        received = connection.recv_into(view)
        if not received:
            raise CallerGone("the connection was closed")
        view = view[received:]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of one dim."""
    data: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(data)


def _tune(connection: socket.socket) -> None:
    """Send short messages at once, and notice a host that is gone within half a minute."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _interface_address() -> str:
    """The address of the interface that leads to the other hosts, as the rendezvous has chosen it."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for entry in psutil.net_if_addrs().get(name, ()):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    return socket.gethostbyname(socket.gethostname())
