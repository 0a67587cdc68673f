"""Error reports: deadlocks and different calls, on every rank, with operations and lines."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi_checks import caught, in_processes

from drumline import MPI
from drumline.core.errors import GaveUp, InputError
from drumline.mpi import run_threads


def both_receive_first(comm: Any) -> str:
    other = 1 - comm.rank
    into = np.zeros(1)

    def exchange() -> None:
        comm.Recv(into, other, 7)
        comm.Send(into, other, 7)

    return caught(GaveUp, exchange)


def ring_of_ssend(comm: Any) -> str:
    return caught(GaveUp, lambda: comm.Ssend(np.zeros(1), (comm.rank + 1) % comm.size))


def collective_against_receive(comm: Any) -> str:
    if comm.rank == 0:
        return caught(GaveUp, lambda: comm.Allreduce(np.zeros(1), np.zeros(1)))
    return caught(GaveUp, lambda: comm.recv(source=0))


def nonblocking_against_receive(comm: Any) -> str:
    if comm.rank == 0:
        request = comm.Iallreduce(np.zeros(1), np.zeros(1))
        return caught(GaveUp, request.Wait)
    return caught(GaveUp, lambda: comm.recv(source=0))


def probe_without_a_sender(comm: Any) -> str:
    return caught(GaveUp, lambda: comm.Probe(tag=3))


CASES = [
    (
        both_receive_first,
        2,
        ["rank 0: Recv from rank 1, tag 7, at test_mpi_mistakes.py:", "rank 1: Recv from rank 0, tag 7"],
    ),
    (ring_of_ssend, 3, ["rank 0: Ssend to rank 1, tag 0", "rank 2: Ssend to rank 0, tag 0"]),
    (collective_against_receive, 2, ["rank 0: Allreduce ", "rank 1: recv from rank 0, any tag"]),
    (nonblocking_against_receive, 2, ["rank 0: Iallreduce ", "rank 1: recv from rank 0, any tag"]),
    (probe_without_a_sender, 3, ["rank 0: Probe from any rank, tag 3", "rank 2: Probe from any rank, tag 3"]),
]


def on_a_duplicate(case: Any, comm: Any) -> Any:
    """Run on a duplicated communicator: a collective that failed leaves its ranks out of step."""
    own = comm.Dup()
    try:
        return case(own)
    finally:
        own.Free()


@pytest.mark.alone  # deadlock detection depends on timing
@pytest.mark.parametrize(("case", "p", "words"), CASES, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("place", ["threads", "processes"])
def test_deadlocks(case: Any, p: int, words: list[str], place: str, world: Any) -> None:
    if place == "processes":
        world(p).run(os.getpid)  # starts the ranks, which takes seconds
    start = time.monotonic()
    case = partial(on_a_duplicate, case)
    texts = run_threads(case, p) if place == "threads" else world(p).run(in_processes, case)
    assert time.monotonic() - start < 10.0
    for text in texts:
        assert text.startswith("deadlock: ranks 0, 1")
        for word in words:
            assert word in text, text


def different_calls(comm: Any) -> list[str]:
    rank = comm.rank
    texts = [
        caught(InputError, lambda: comm.Allreduce(np.zeros(3 + rank), np.zeros(3 + rank))),
        caught(InputError, lambda: comm.Bcast(np.zeros(2, "f" if rank else "i"))),
        caught(InputError, lambda: comm.Reduce(np.zeros(2), np.zeros(2), MPI.SUM, root=rank)),
        caught(InputError, lambda: comm.Allreduce(np.zeros(2), np.zeros(2), MPI.MAX if rank else MPI.SUM)),
        caught(InputError, lambda: comm.Barrier() if rank else comm.bcast(1)),
        caught(InputError, lambda: comm.Iallreduce(np.zeros(5 + rank), np.zeros(5 + rank)).Wait()),
    ]
    assert comm.allreduce(1) == comm.size, "it goes on after that"
    return texts


@pytest.mark.parametrize("place", ["threads", "processes"])
def test_different_calls(place: str, world: Any) -> None:
    case = partial(on_a_duplicate, different_calls)
    both = run_threads(case, 2) if place == "threads" else world(2).run(in_processes, case)
    for texts in both:
        for text, words in zip(texts, ["(3)", "int32", "root=1", "op=sum", "barrier", "(5)"], strict=True):
            assert "ranks made different calls" in text
            assert words in text, text
            assert "test_mpi_mistakes.py:" in text


def test_wrong_arguments() -> None:
    def check(comm: Any) -> None:
        one = np.zeros(1)
        for words, call in [
            ("MPI_ERR_RANK: rank 5", lambda: comm.Send(one, 5)),
            ("0 <= rank < 2, ANY_SOURCE or PROC_NULL", lambda: comm.Recv(one, 5)),
            ("MPI_ERR_TAG: tag -3", lambda: comm.Send(one, 0, -3)),
            ("MPI_ERR_ROOT: root 2", lambda: comm.Bcast(one, 2)),
            ("MPI_ERR_ARG: color -1", lambda: comm.Split(-1)),
            ("MPI_ERR_GROUP", lambda: comm.Split(comm.rank).Create(comm.group)),
            ("COMM_WORLD and COMM_SELF cannot be freed", lambda: MPI.COMM_SELF.Free()),
        ]:
            assert words in caught(MPI.Exception, call)
        for words, call in [
            ("1 of MPI_DOUBLE are sent where 2 of MPI_DOUBLE", lambda: comm.Allreduce(one, np.zeros(2))),
            ("3 objects for 2 ranks", lambda: comm.alltoall([1, 2, 3])),
            ("3 bytes are no multiple of 2 blocks", lambda: comm.Allgather(one, bytearray(3))),
        ]:
            assert words in caught(ValueError, call)

    run_threads(check, 2)


def test_errors_have_classes() -> None:
    with pytest.raises(MPI.Exception) as e:
        MPI.COMM_SELF.Send(b"", 3)
    assert e.value.Get_error_class() == MPI.ERR_RANK
    assert e.value == MPI.ERR_RANK
    assert int(e.value) == MPI.ERR_RANK
    assert MPI.Get_error_string(MPI.ERR_RANK) == "MPI_ERR_RANK"
