"""The contract over a transport that copies only at the receiver: detects tensors that are changed too early."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import comm_contract as contract
import pytest
import torch
from torch import Tensor

from drumline.comm import Communicator, PendingMessage, Transport, run_threads
from drumline.schedules import Send, ring_all_reduce


class BorrowedSend:
    """A tensor that the receiver reads directly, and whether it was read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.taken = tensor, threading.Event()

    def wait(self) -> None:
        assert self.taken.wait(20), "it was never received"


class DirectReceive:
    """A receive that copies at the wait, directly from the sender's memory."""

    def __init__(self, shared: SharedSends, key: tuple[int, int, int], into: Tensor) -> None:
        self.shared, self.key, self.into = shared, key, into

    def wait(self) -> None:
        with self.shared.changed:
            assert self.shared.changed.wait_for(lambda: self.shared.borrowed.get(self.key), 20), "nothing came"
            borrowed = self.shared.borrowed[self.key].pop(0)
        self.into.copy_(borrowed.tensor)
        borrowed.taken.set()


class SharedSends:
    """The sends that the threads share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.borrowed: dict[tuple[int, int, int], list[BorrowedSend]] = {}


class ZeroCopyTransport(Transport):
    """As strict as a network card: dense memory only, read when the receiver is ready."""

    def __init__(self, inner: Transport, shared: SharedSends) -> None:
        self.inner, self.shared = inner, shared

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        assert tensor.is_contiguous() and not tensor.is_conj()
        borrowed = BorrowedSend(tensor)
        with self.shared.changed:
            self.shared.borrowed.setdefault((self.rank, dst, tag), []).append(borrowed)
            self.shared.changed.notify_all()
        return borrowed

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        assert tensor.is_contiguous() and not tensor.is_conj()
        return DirectReceive(self.shared, (src, self.rank, tag), tensor)


def run_zero_copy(body: Any, p: int) -> list[Any]:
    shared = SharedSends()
    return run_threads(lambda inner: body(Communicator(ZeroCopyTransport(inner, shared))), p)


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: contract.Check, p: int) -> None:
    run_zero_copy(check, p)


def test_a_chunk_sent_and_written_in_one_round_is_sent_unchanged() -> None:
    """Three ranks pass the same chunk round: each must send its value from before the round."""
    turn = tuple(Send(r, (r + 1) % 3, 0, False) for r in range(3))
    schedule = dataclasses.replace(ring_all_reduce(3), chunks=1, rounds=(turn,) * 20)

    def body(comm: Communicator) -> int:
        tensor = torch.tensor([comm.rank])
        comm.run(schedule, tensor)
        return int(tensor.item())

    assert run_zero_copy(body, 3) == [(r - 20) % 3 for r in range(3)]
