"""The contract over a transport that copies nothing until the receiver takes it: finds tensors changed too early."""

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


class Loan:
    """A tensor lent to the receiver, and whether it was taken."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.taken = tensor, threading.Event()

    def wait(self) -> None:
        assert self.taken.wait(20), "nobody took it"


class Taking:
    """A receive: takes the loan at the wait, straight from the sender's memory."""

    def __init__(self, shelf: Shelf, key: tuple[int, int, int], into: Tensor) -> None:
        self.shelf, self.key, self.into = shelf, key, into

    def wait(self) -> None:
        with self.shelf.changed:
            assert self.shelf.changed.wait_for(lambda: self.shelf.loans.get(self.key), 20), "nothing came"
            loan = self.shelf.loans[self.key].pop(0)
        self.into.copy_(loan.tensor)
        loan.taken.set()


class Shelf:
    """What the threads share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.loans: dict[tuple[int, int, int], list[Loan]] = {}


class LendingTransport(Transport):
    """As strict as a network card: dense memory only, read when the other end is ready."""

    def __init__(self, inner: Transport, shelf: Shelf) -> None:
        self.inner, self.shelf = inner, shelf

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        assert tensor.is_contiguous() and not tensor.is_conj()
        loan = Loan(tensor)
        with self.shelf.changed:
            self.shelf.loans.setdefault((self.rank, dst, tag), []).append(loan)
            self.shelf.changed.notify_all()
        return loan

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        assert tensor.is_contiguous() and not tensor.is_conj()
        return Taking(self.shelf, (src, self.rank, tag), tensor)


def run_lending(body: Any, p: int) -> list[Any]:
    shelf = Shelf()
    return run_threads(lambda inner: body(Communicator(LendingTransport(inner, shelf))), p)


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: contract.Check, p: int) -> None:
    run_lending(check, p)


def test_a_chunk_sent_and_written_in_one_round_is_sent_as_it_was() -> None:
    """Three ranks pass the same chunk round: each must send what it held before the round."""
    turn = tuple(Send(r, (r + 1) % 3, 0, False) for r in range(3))
    schedule = dataclasses.replace(ring_all_reduce(3), chunks=1, rounds=(turn,) * 20)

    def body(comm: Communicator) -> int:
        tensor = torch.tensor([comm.rank])
        comm.run(schedule, tensor)
        return int(tensor.item())

    assert run_lending(body, 3) == [(r - 20) % 3 for r in range(3)]
