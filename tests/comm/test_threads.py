"""The contract over threads, and how errors of ranks are reported."""

from __future__ import annotations

import re
import threading
import time

import comm_contract as contract
import expected_results as plain
import pytest
import torch

from drumline.comm import Communicator, Operator, Transport, run_threads
from drumline.core.errors import GaveUp, InputError
from drumline.schedules import ring_all_reduce


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, *(pytest.param(p, marks=pytest.mark.slow) for p in (6, 7, 8, 9, 16))])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: contract.Check, p: int) -> None:
    def body(transport: Transport) -> None:
        torch.set_num_threads(1)
        check(Communicator(transport))

    run_threads(body, p)


def test_results_are_ordered_by_rank() -> None:
    assert run_threads(lambda t: t.rank * 10 + t.size, 3) == [3, 13, 23]


def test_the_first_error_ends_all_ranks_and_names_its_rank() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("one rank")
        Communicator(transport).all_reduce(torch.ones(4))

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError) as caught:
        run_threads(body, 3)
    assert caught.value.__notes__ == ["in rank 1 of 3"]
    assert threading.active_count() == before


def test_a_rank_that_has_ended_is_reported_at_once() -> None:
    def body(transport: Transport) -> None:
        if transport.rank:
            Communicator(transport).broadcast(torch.ones(4))

    with pytest.raises(GaveUp) as caught:
        run_threads(body, 2)
    text = str(caught.value)
    assert re.search(
        r"all ranks are blocked:\n    rank 0 has ended\n    rank 1 waits for the others, in broadcast float32 \(4\) root=0 "
        r"algorithm=\w+ \(call 1\), at \S+test_threads.py:\d+\n",
        text,
    ), text


@pytest.mark.alone
def test_a_late_rank_is_reported() -> None:
    asleep = threading.Event()

    def body(transport: Transport) -> None:
        if transport.rank:
            transport.receive(torch.ones(4), 0, 3).wait()
        else:
            asleep.wait(1)

    with pytest.raises(GaveUp, match=r"rank 1 waited 0.1 s for rank 0 \(tag 3\), at \S+test_threads.py:\d+\n"):
        run_threads(body, 2, timeout=0.1)


@pytest.mark.alone
def test_a_deadlock_is_reported_with_all_lines() -> None:
    """The classic: all receive before they send."""
    errors: dict[int, str] = {}

    def body(transport: Transport) -> None:
        comm = Communicator(transport)
        try:
            comm.receive(torch.ones(1), (comm.rank + 1) % comm.size, tag=5)
        except GaveUp as e:
            errors[comm.rank] = str(e)
        else:
            comm.send(torch.ones(1), (comm.rank - 1) % comm.size, tag=5)

    start = time.monotonic()
    run_threads(body, 3)
    assert time.monotonic() - start < 1
    assert set(errors) == {0, 1, 2} and len(set(errors.values())) == 1
    for rank in range(3):
        other = (rank + 1) % 3
        assert re.search(
            rf"rank {rank} waits for rank {other}, in receive from rank {other} \(tag 5\), at \S+test_threads.py:\d+",
            errors[0],
        )


def test_a_helper_thread_prevents_a_deadlock() -> None:
    """Both ranks wait, but a helper thread of rank 0 still sends."""

    def body(transport: Transport) -> float:
        into = torch.zeros(1)
        helper = threading.Timer(0.3, lambda: transport.send(torch.ones(1), 1, 0).wait())
        if transport.rank == 0:
            helper.start()
            helper.join()
            return 0.0
        transport.receive(into, 0, 0).wait()
        return into.item()

    assert run_threads(body, 2) == [0.0, 1.0]


def test_messages_of_wrong_size_or_type_are_reported() -> None:
    def body(transport: Transport, size: int, dtype: torch.dtype) -> None:
        if transport.rank:
            Communicator(transport).receive(torch.ones(size, dtype=dtype), 0)
        else:
            Communicator(transport).send(torch.ones(4), 1)

    with pytest.raises(
        InputError, match=r"rank 0 sent 4 elements of float32, rank 1 expects 5 of float32\n.*receive from"
    ):
        run_threads(lambda t: body(t, 5, torch.float32), 2)
    with pytest.raises(InputError, match=r"4 elements of float32, rank 1 expects 4 of int32"):
        run_threads(lambda t: body(t, 4, torch.int32), 2)


def test_a_message_that_is_never_received_is_an_error() -> None:
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


def test_groups_are_separate() -> None:
    """Two groups of the same ranks, used in a different order by the two ranks: each message reaches its own group.

    Only without the comparison of calls, for which ranks meet: see the test below.
    """

    def body(transport: Transport) -> list[int]:
        comm = Communicator(transport, check=False)
        first, second = comm.split(0), comm.split(0)
        order = [first, second, comm] if comm.rank == 0 else [comm, second, first]
        values = {id(c): 1 + i for i, c in enumerate((first, second, comm))}
        got = {id(c): c.broadcast(torch.tensor([values[id(c)] * (comm.rank == 0)])).item() for c in order}
        return [int(got[id(c)]) for c in (first, second, comm)]

    assert run_threads(body, 2, timeout=10) == [[1, 2, 3], [1, 2, 3]]


def test_groups_in_a_different_order_are_reported() -> None:
    def body(transport: Transport) -> None:
        comm = Communicator(transport)
        first, second = comm.split(0), comm.split(0)
        for one in (first, second) if comm.rank == 0 else (second, first):
            one.all_reduce(torch.ones(1))

    with pytest.raises(
        GaveUp, match=r"all ranks are blocked:\n    rank 0 waits for rank 1, in all_reduce float32 \(1\)"
    ):
        run_threads(body, 2)


def alone() -> Communicator:
    return run_threads(Communicator, 1)[0]


def test_wrong_calls() -> None:
    comm, tensor = alone(), torch.ones(2)
    with pytest.raises(InputError, match=r"unknown algorithm 'rings' for all_reduce(.|\n)*Did you mean 'ring'\?"):
        comm.all_reduce(tensor, algorithm="rings")
    with pytest.raises(
        InputError, match=r"unknown algorithm 'ring' for broadcast\n(.|\n)*known: auto, native, binomial"
    ):
        comm.broadcast(tensor, algorithm="ring")
    with pytest.raises(InputError, match=r"unknown operator 'summ'\n(.|\n)*product(.|\n)*Did you mean 'sum'\?"):
        comm.all_reduce(tensor, op="summ")
    with pytest.raises(InputError, match=r"root 1\n(.|\n)*0 <= root < p = 1"):
        comm.broadcast(tensor, root=1)
    with pytest.raises(InputError, match=r"ring_all_reduce for 3 ranks on 1"):
        comm.run(ring_all_reduce(3), tensor)
    with pytest.raises(InputError, match=r"strides \(0,\)(.|\n)*call .contiguous\(\)"):
        comm.all_reduce(torch.ones(1).expand(4))
    with pytest.raises(InputError, match=r"layout torch.sparse_coo"):
        comm.all_reduce(torch.eye(2).to_sparse())
    with pytest.raises(InputError, match=r"max of complex64\n(.|\n)*max takes ordered numbers"):
        comm.all_reduce(torch.ones(2, dtype=torch.complex64), op="max")
    with pytest.raises(InputError, match=r"avg of int64\n(.|\n)*avg takes floating-point numbers"):
        comm.all_reduce(torch.tensor([1]), op="avg")
    with pytest.raises(InputError, match=r"avg in scan"):
        comm.scan(tensor, op="avg")
    with pytest.raises(InputError, match=r"3 elements for matmul\n(.|\n)*a multiple of its unit, 4"):
        comm.all_reduce(torch.ones(3), op=plain.MATMUL)
    with pytest.raises(InputError, match=r"all_to_all of a tensor of shape \(2,\)\n(.|\n)*1 rows, one for each rank"):
        comm.all_to_all(tensor)
    with pytest.raises(InputError, match=r"scatter: the root gives no tensor of rows"):
        comm.scatter(None)
    with pytest.raises(InputError, match=r"native all_reduce with sum over threads(.|\n)*one of: ring"):
        comm.all_reduce(tensor, algorithm="native")
    with pytest.raises(InputError, match=r"all_reduce in 0 segments"):
        comm.all_reduce(tensor, segments=0)
    with pytest.raises(InputError, match=r"unknown collective 'allreduce'(.|\n)*Did you mean 'all_reduce'\?"):
        comm.choose("allreduce", 4)
    with pytest.raises(InputError, match=r"0 ranks\n.*at least one"):
        run_threads(Communicator, 0)
    with pytest.raises(InputError, match=r"an operator of 0 elements"):
        Operator(torch.add, unit=0)


def test_an_operator_that_changes_the_shape_is_refused() -> None:
    bad = Operator(lambda a, b: (a + b)[:1], name="bad")
    with pytest.raises(InputError, match=r"operator bad made float32 \(1,\) of two float32 \(4,\)"):
        run_threads(lambda t: Communicator(t).all_reduce(torch.ones(8), op=bad, algorithm="ring"), 2)


def test_str() -> None:
    def body(transport: Transport) -> str:
        comm = Communicator(transport)
        comm.all_reduce(torch.ones(4), algorithm="ring")
        return str(comm)

    assert run_threads(body, 2)[1] == "rank 1 of 2: 2 rounds, 2 messages, 16 bytes sent"
