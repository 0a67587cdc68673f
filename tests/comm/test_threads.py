"""The contract over threads, and how errors of ranks come back."""

from __future__ import annotations

import threading

import comm_contract as contract
import pytest
import torch

from drumline.comm import Communicator, Transport, run_threads
from drumline.errors import GaveUp, InputError
from drumline.schedule import ring_all_reduce


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: contract.Check, p: int) -> None:
    def body(transport: Transport) -> None:
        torch.set_num_threads(1)
        check(Communicator(transport))

    run_threads(body, p)


def test_results_come_by_rank() -> None:
    assert run_threads(lambda t: t.rank * 10 + t.size, 3) == [3, 13, 23]


def test_the_first_error_ends_all_ranks_and_names_its_own() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("one rank")
        Communicator(transport).all_reduce(torch.ones(4))

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError) as caught:
        run_threads(body, 3)
    assert caught.value.__notes__ == ["in rank 1 of 3"]
    assert threading.active_count() == before


def test_a_rank_that_does_not_come_is_named() -> None:
    def body(transport: Transport) -> None:
        if transport.rank:
            Communicator(transport).broadcast(torch.ones(4))

    with pytest.raises(GaveUp, match=r"rank 1 waited 0.1 s for rank 0 \(tag 0\)\n.*same collectives in the same order"):
        run_threads(body, 2, timeout=0.1)


def test_sizes_and_types_that_differ_are_named() -> None:
    with pytest.raises(InputError, match=r"rank 0 sent 4 elements of torch.float32, rank 1 expects 5 of torch.float32"):
        run_threads(lambda t: Communicator(t).broadcast(torch.ones(4 + t.rank)), 2)
    types = (torch.int32, torch.float32)
    with pytest.raises(InputError, match=r"4 elements of torch.int32, rank 1 expects 4 of torch.float32"):
        run_threads(lambda t: Communicator(t).broadcast(torch.ones(4, dtype=types[t.rank])), 2)


def test_a_message_that_nobody_receives_is_found() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(torch.ones(1), 1, 5).wait()

    with pytest.raises(GaveUp, match=r"rank 0 sent rank 1 a message that it never received \(tag 5\)"):
        run_threads(body, 2)


def test_a_sent_tensor_may_change_after_the_wait() -> None:
    def body(transport: Transport) -> float:
        tensor = torch.ones(1)
        if transport.rank == 0:
            transport.send(tensor, 1, 0).wait()
            tensor.zero_()
            transport.send(tensor, 1, 1).wait()
        else:
            transport.receive(torch.empty(1), 0, 1).wait()
            transport.receive(tensor, 0, 0).wait()
        return tensor.item()

    assert run_threads(body, 2) == [0, 1]


def test_groups_do_not_hear_each_other() -> None:
    """Two groups of the same ranks, used in different order by the two ranks: each message finds its own group."""

    def body(transport: Transport) -> list[int]:
        comm = Communicator(transport)
        first, second = comm.split(0), comm.split(0)
        order = [first, second, comm] if comm.rank == 0 else [comm, second, first]
        values = {id(c): 1 + i for i, c in enumerate((first, second, comm))}
        got = {id(c): c.broadcast(torch.tensor([values[id(c)] * (comm.rank == 0)])).item() for c in order}
        return [int(got[id(c)]) for c in (first, second, comm)]

    assert run_threads(body, 2, timeout=10) == [[1, 2, 3], [1, 2, 3]]


def alone() -> Communicator:
    return run_threads(Communicator, 1)[0]


def test_wrong_calls() -> None:
    comm, tensor = alone(), torch.ones(2)
    with pytest.raises(InputError, match=r"unknown algorithm 'rings' for all_reduce(.|\n)*Did you mean 'ring'\?"):
        comm.all_reduce(tensor, algorithm="rings")
    with pytest.raises(InputError, match=r"unknown algorithm 'ring' for broadcast\n.*known: binomial"):
        comm.broadcast(tensor, algorithm="ring")
    with pytest.raises(InputError, match=r"unknown operation 'summ'\n.*product(.|\n)*Did you mean 'sum'\?"):
        comm.all_reduce(tensor, op="summ")
    with pytest.raises(InputError, match=r"root 1\n.*0 <= root < p = 1"):
        comm.broadcast(tensor, root=1)
    with pytest.raises(InputError, match=r"ring_all_reduce for 3 ranks on 1"):
        comm.run(ring_all_reduce(3), tensor)
    with pytest.raises(InputError, match=r"strides \(0,\)(.|\n)*call .contiguous\(\)"):
        comm.all_reduce(torch.ones(1).expand(4))
    with pytest.raises(InputError, match=r"layout torch.sparse_coo"):
        comm.all_reduce(torch.eye(2).to_sparse())
    with pytest.raises(InputError, match=r"0 ranks\n.*at least one"):
        run_threads(Communicator, 0)


def test_it_prints_itself() -> None:
    def body(transport: Transport) -> str:
        comm = Communicator(transport)
        comm.all_reduce(torch.ones(4))
        return str(comm)

    assert run_threads(body, 2)[1] == "rank 1 of 2: 2 rounds, 2 messages, 16 bytes sent"
