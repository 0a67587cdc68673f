"""One message of MPI, out or in: the bytes of a contiguous CPU tensor, by rank and tag of an mpi4py communicator."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from torch import Tensor

from ...core.errors import GaveUp, InputError
from .world import bytes_of, load, until

_PIECE = 1 << 30
"""The longest single message; a count of bytes is 31 bits wide in older MPIs."""

_lost: list[Any] = []
"""What MPI may still write to after a wait that was given up: kept, so that the memory is not used again."""


class Letter:
    """A message under way, in one or more pieces. Several threads may look after it."""

    def __init__(self, requests: list[Any], size: int, what: str, *, timeout: float, keep: Tensor) -> None:
        self._requests, self._size, self._what, self._timeout = requests, size, what, timeout
        self._status = load().Status()
        self._came = 0
        self._lock = threading.Lock()
        # MPI holds only the address.
        self._keep = keep
        self.source = -1
        """Whom it came from."""

    def test(self) -> bool:
        """Whether it is sent, or there; raises GaveUp when it failed or has another size than expected."""
        try:
            with self._lock:
                return self._move()
        except load().Exception as e:
            raise GaveUp(self._what, rule=e.Get_error_string().splitlines()[0]) from e

    def wait(self, timeout: float | None = None) -> None:
        """Block until it is."""
        limit = self._timeout if timeout is None else timeout
        if not until(self.test, limit):
            self._give_up(limit)

    def _move(self) -> bool:
        """Take the pieces one by one, because MPI says what is wrong of a single one only."""
        while self._requests:
            if not self._requests[0].Test(self._status):
                return False
            self._requests.pop(0)
            self._came += self._status.Get_count(load().BYTE)
            self.source = self._status.Get_source()
            if not self._requests and self._size >= 0 and self._came != self._size:
                raise GaveUp(self._what, rule=f"{self._came} bytes came where {self._size} were expected")
        return True

    def _give_up(self, seconds: float) -> None:
        _lost.append((self._requests, self._keep))
        if self._size >= 0:
            for request in self._requests:
                with contextlib.suppress(Exception):
                    request.Cancel()
        raise GaveUp(self._what, rule=f"nothing happened for {seconds:g} s")


def send(comm: Any, tensor: Tensor, dst: int, tag: int, *, timeout: float) -> Letter:
    """Start to send a contiguous CPU tensor."""
    requests = [comm.Isend([piece, load().BYTE], dst, tag) for piece in _pieces(tensor)]
    what = f"rank {comm.Get_rank()} could not send to rank {dst}"
    return Letter(requests, -1, what, timeout=timeout, keep=tensor)


def receive(comm: Any, tensor: Tensor, src: int, tag: int, *, timeout: float) -> Letter:
    """Start to receive into a contiguous CPU tensor, from anybody if `src` is -1."""
    pieces = _pieces(tensor)
    if src < 0 and len(pieces) > 1:
        raise InputError(
            f"a message of {tensor.numel() * tensor.element_size()} bytes from anybody",
            rule=f"messages above {_PIECE} bytes come in pieces, which have one sender",
            fix="name the sender",
        )
    source = load().ANY_SOURCE if src < 0 else src
    requests = [comm.Irecv([piece, load().BYTE], source, tag) for piece in pieces]
    what = f"rank {comm.Get_rank()} could not receive from {'anybody' if src < 0 else f'rank {src}'}"
    return Letter(requests, tensor.numel() * tensor.element_size(), what, timeout=timeout, keep=tensor)


def _pieces(tensor: Tensor) -> list[Any]:
    """The bytes of a tensor in pieces that MPI can count; an empty tensor is one empty message."""
    data = bytes_of(tensor)
    return [data[i : i + _PIECE] for i in range(0, max(1, len(data)), _PIECE)]
