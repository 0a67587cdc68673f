"""A transport over a matching: so the communicator, and every schedule, runs over any post office."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import InputError
from ..transport import Pending, Transport
from .matching import Matching
from .message import Receive, Sending


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; it lives as long as the tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class _Sent:
    """A send under way."""

    def __init__(self, matching: Matching, sending: Sending, keep: Tensor) -> None:
        self._matching, self._sending, self._keep = matching, sending, keep

    def wait(self) -> None:
        """Block until the tensor's memory is free."""
        if not self._sending.done:
            self._matching.wait(self._sending)


class _Received:
    """A receive under way."""

    def __init__(self, transport: MailTransport, receive: Receive, host: Tensor, into: Tensor) -> None:
        self._transport, self._receive, self._host, self._into = transport, receive, host, into

    def wait(self) -> None:
        """Block until the tensor is there."""
        receive, matching = self._receive, self._transport.matching
        if not receive.done:
            try:
                matching.wait(receive)
            except BaseException:
                matching.cancel(receive)
                raise
        expected = self._host.numel() * self._host.element_size()
        if receive.nbytes != expected:
            src, dst = self._transport.members.index(receive.source), self._transport.rank
            raise InputError(
                f"rank {src} sent {receive.nbytes} bytes, rank {dst} expects {expected}",
                rule="all ranks call a collective with the same number and type of elements",
            )
        if self._host is not self._into:
            self._into.copy_(self._host)


class MailTransport(Transport):
    """Ranks `members` of a matching, in that order, in a context that nobody else uses. CUDA goes through the host."""

    def __init__(self, matching: Matching, context: int, members: Sequence[int] | None = None) -> None:
        self.matching, self.context = matching, context
        self.members = tuple(range(matching.size) if members is None else members)
        self._rank = self.members.index(matching.rank)

    @property
    def rank(self) -> int:
        """This rank's number among the members."""
        return self._rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.members)

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Start a message from the tensor's memory."""
        host = tensor.detach()
        if host.is_cuda:
            host = host.cpu()
        sending = self.matching.send(self.members[dst], self.context, tag, bytes_of(host))
        return _Sent(self.matching, sending, host)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Post a receive into the tensor's memory."""
        into = tensor.detach()
        host = torch.empty(into.shape, dtype=into.dtype) if into.is_cuda else into
        receive = self.matching.receive(self.members[src], self.context, tag, bytes_of(host))
        return _Received(self, receive, host, into)
