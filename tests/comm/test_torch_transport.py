"""The contract over real processes and gloo, and against torch's own collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import comm_contract as contract
import pytest
import torch
import torch.distributed as dist
from world import World

from drumline.comm import Communicator, TorchTransport
from drumline.core.errors import GaveUp, InputError

Worlds = Callable[[int], World]


def keeps_the_contract() -> None:
    for check in contract.CHECKS:
        check(Communicator(TorchTransport()))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_contract_over_gloo(world: Worlds, p: int) -> None:
    world(p).run(keeps_the_contract)


def equals_torch() -> None:
    """The same result as torch's all_reduce and broadcast, at several sizes."""
    comm = Communicator(TorchTransport())
    for size in (1, 2, 5, 999, 100_000):
        for algorithm in ("ring", "halving", "native"):
            ours, theirs = (contract.tensor_of(comm.rank, size) for _ in range(2))
            dist.all_reduce(theirs)
            assert torch.equal(comm.all_reduce(ours, algorithm=algorithm), theirs)
        ours, theirs = (contract.tensor_of(comm.rank, size) for _ in range(2))
        dist.broadcast(theirs, src=2)
        assert torch.equal(comm.broadcast(ours, root=2, algorithm="chain", segments=4), theirs)


def groups_have_their_own_numbering() -> None:
    """A process group of ranks 1 and 2: the transport calls them ranks 0 and 1."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    pair = Communicator(TorchTransport(group))
    assert (pair.rank, pair.size) == (dist.get_rank() - 1, 2)
    for algorithm in ("ring", "native"):
        assert pair.all_reduce(torch.tensor([dist.get_rank()]), algorithm=algorithm).item() == 3
    for algorithm in ("binomial", "native"):
        assert pair.broadcast(torch.tensor([dist.get_rank()]), root=1, algorithm=algorithm).item() == 2
        rows = torch.tensor([[5], [6]]) if pair.rank == 1 else None
        mine = pair.scatter(rows, root=1, out=torch.zeros(1, dtype=torch.int64), algorithm=algorithm)
        assert mine.item() == 5 + pair.rank
        gathered = pair.gather(mine, root=1, algorithm=algorithm)
        assert gathered is None if pair.rank == 0 else gathered.tolist() == [[5], [6]]


def native_refuses_unsupported_calls() -> None:
    """Where gloo has no collective, auto uses another algorithm, `native` fails on every rank, and the ranks stay in step."""
    comm = Communicator(TorchTransport())
    truth = comm.all_reduce(torch.tensor([comm.rank == 1, False]), op="lor")
    assert truth.tolist() == [comm.size > 1, False]
    with pytest.raises(
        InputError, match=r"native all_reduce with lor over gloo(.|\n)*or not for this operator and type"
    ):
        comm.all_reduce(torch.tensor([True]), op="lor", algorithm="native")
    with pytest.raises(InputError, match=r"native scan with sum over gloo"):
        comm.scan(torch.ones(1), algorithm="native")
    assert comm.choose("all_reduce", 100).algorithm == "native"
    assert comm.choose("scan", 100).algorithm != "native"
    assert comm.all_reduce(torch.ones(1)).item() == comm.size


@pytest.mark.parametrize("function", [equals_torch, groups_have_their_own_numbering, native_refuses_unsupported_calls])
def test_against_torch(world: Worlds, function: Callable[[], None]) -> None:
    world(3).run(function)


def waits_for_a_missing_rank() -> str:
    """Rank 2 does not take part: the others report which rank is missing, and where they wait."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=20))
    comm = Communicator(TorchTransport(group, timeout=0.5))
    text = ""
    if comm.rank < 2:
        try:
            comm.all_reduce(torch.ones(3), algorithm="ring")
        except GaveUp as e:
            text = str(e)
    dist.barrier()  # over the world group, which still works
    return text


@pytest.mark.alone
def test_a_missing_rank_is_reported(world: Worlds) -> None:
    first, second, last = world(3).run(waits_for_a_missing_rank)
    assert last == ""
    for text in (first, second):
        assert "rank 2 has not called it" in text
        assert "in all_reduce" not in text and "all_reduce float32 (3) op=sum algorithm=ring (call 1)" in text
        assert "test_torch_transport.py:" in text and "same collectives in the same order" in text
    assert "rank 1: all_reduce float32 (3)" in first and "rank 0: all_reduce float32 (3)" in second


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(InputError, match=r"not initialised\n.*init_process_group\(backend='gloo'\)"):
        TorchTransport()


def test_a_backend_without_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:fake")
    with pytest.raises(
        InputError, match=r"a process group of cpu:fake\n.*by gloo, shm, mpi4py, and between GPUs by nccl\n.*new_group"
    ):
        TorchTransport()
