"""A transport over a message matcher, so that the communicator and every schedule run over any endpoint."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import InputError
from ..transport import PendingMessage, Transport
from .matching import MessageMatcher
from .messages import ReceiveOperation, SendOperation


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor exists."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


class _PendingSend:
    """A send in progress."""

    def __init__(self, matcher: MessageMatcher, sending: SendOperation, keep: Tensor) -> None:
        self._matching, self._sending, self._keep = matcher, sending, keep

    def wait(self) -> None:
        """Block until the tensor's memory is free."""
        if not self._sending.done:
            self._matching.wait(self._sending)


class _PendingReceive:
    """A receive in progress."""

    def __init__(self, transport: MatcherTransport, receive: ReceiveOperation, host: Tensor, into: Tensor) -> None:
        self._transport, self._receive, self._host, self._into = transport, receive, host, into

    def wait(self) -> None:
        """Block until the tensor is filled."""
        receive, matcher = self._receive, self._transport.matcher
        if not receive.done:
            try:
                matcher.wait(receive)
            except BaseException:
                matcher.cancel(receive)
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


class MatcherTransport(Transport):
    """Ranks `members` of a matcher, in that order, in a context of their own. CUDA tensors go through host memory."""

    def __init__(self, matcher: MessageMatcher, context: int, members: Sequence[int] | None = None) -> None:
        self.matcher, self.context = matcher, context
        self.members = tuple(range(matcher.size) if members is None else members)
        self._rank = self.members.index(matcher.rank)

    @property
    def rank(self) -> int:
        """This rank's number among the members."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        """Start a send from the tensor's memory."""
        host = tensor.detach()
        if host.is_cuda:
            host = host.cpu()
        sending = self.matcher.send(self.members[dst], self.context, tag, bytes_of(host))
        return _PendingSend(self.matcher, sending, host)

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        """Post a receive into the tensor's memory."""
        into = tensor.detach()
        host = torch.empty(into.shape, dtype=into.dtype) if into.is_cuda else into
        receive = self.matcher.receive(self.members[src], self.context, tag, bytes_of(host))
        return _PendingReceive(self, receive, host, into)
