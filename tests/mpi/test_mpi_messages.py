"""Point-to-point messages, as in the MPI standard."""

from __future__ import annotations

import array
import threading
from typing import Any

import numpy as np
import torch
from mpi_checks import caught, everywhere, run

from drumline import MPI


def ring(comm: Any) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def buffers_of_all_kinds(comm: Any) -> None:
    dst, src = ring(comm)
    pairs = [
        (np.arange(5.0), np.zeros(5)),
        (torch.arange(5.0), torch.zeros(5)),
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (array.array("i", [1, 2, 3]), array.array("i", [0, 0, 0])),
        (b"bytes", bytearray(5)),
        (memoryview(b"view"), bytearray(4)),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), np.asfortranarray(np.zeros((2, 3), int))),
    ]
    for give, get in pairs:
        request = comm.Isend(give, dst, 3)
        status = MPI.Status()
        comm.Recv(get, src, 3, status)
        request.Wait()
        assert bytes(memoryview(_plain(get)).tobytes()) == bytes(memoryview(_plain(give)).tobytes())
        assert (status.Get_source(), status.Get_tag(), status.Get_count()) == (src, 3, memoryview(_plain(give)).nbytes)


def _plain(buf: Any) -> Any:
    return buf.view(torch.uint8).numpy() if isinstance(buf, torch.Tensor) else buf


def forms_of_a_message(comm: Any) -> None:
    dst, src = ring(comm)
    data = np.arange(10, dtype="i")
    for give, expected in [
        ([data, 3, MPI.INT], [0, 1, 2]),
        ([data, (3, 4), MPI.INT], [4, 5, 6]),
        ([data, 2, 5, "i"], [5, 6]),
        ([data, MPI.INT], list(range(10))),
    ]:
        get = np.full(10, -1, "i")
        request = comm.Isend(give, dst)
        comm.Recv(get, src)
        request.Wait()
        assert get[: len(expected)].tolist() == expected
        assert (get[len(expected) :] == -1).all(), "a shorter message leaves the rest alone"


def a_buffer_may_be_used_again(comm: Any) -> None:
    dst, src = ring(comm)
    for size in (1, 1000, 300_000):
        data = np.full(size, comm.rank, "i")
        into = np.zeros(size, "i")
        request = comm.Irecv(into, src)
        comm.Send(data, dst)
        data[:] = -7
        request.Wait()
        assert (into == src).all()


def messages_do_not_overtake(comm: Any) -> None:
    dst, src = ring(comm)
    for i in range(50):
        comm.Isend(np.full(1 if i % 3 else 5000, i, "i"), dst, i % 2)
    for tag in (1, 0):
        for i in range(tag, 50, 2):
            into = np.zeros(5000, "i")
            comm.Recv(into, src, tag)
            assert into[0] == i
    comm.Barrier()


def wildcards_probes_and_status(comm: Any) -> None:
    if comm.rank == 0:
        for _ in range(comm.size - 1):
            status = MPI.Status()
            comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            n = status.Get_count(MPI.DOUBLE)
            assert n == status.Get_source()
            assert status.Get_tag() == 10 * n
            into = np.zeros(n)
            comm.Recv(into, status.source, status.tag)
            assert (into == n).all()
        assert not comm.Iprobe()
    else:
        comm.Send(np.full(comm.rank, float(comm.rank)), 0, 10 * comm.rank)
    comm.Barrier()


def truncation_is_an_error(comm: Any) -> None:
    comm.Isend(np.zeros(8), comm.rank, 1)
    words = caught(MPI.Exception, lambda: comm.Recv(np.zeros(2), comm.rank, 1))
    assert words.startswith(f"MPI_ERR_TRUNCATE: a message of 64 bytes from rank {comm.rank}, tag 1")
    assert "the buffer has room for 16" in words


def types_are_compared(comm: Any) -> None:
    comm.Isend(np.ones(2, "i"), comm.rank)
    words = caught(MPI.Exception, lambda: comm.Recv(np.zeros(2, "f"), comm.rank))
    assert "MPI_ERR_TYPE" in words
    assert "has other elements than MPI_FLOAT" in words
    comm.Isend(np.ones(2, "i"), comm.rank)
    comm.Recv([np.zeros(2, "f"), MPI.BYTE], comm.rank)  # BYTE matches every type


def proc_null(comm: Any) -> None:
    status = MPI.Status()
    comm.Send(None, MPI.PROC_NULL)
    comm.Recv(None, MPI.PROC_NULL, status=status)
    assert status.source == MPI.PROC_NULL
    assert comm.recv(source=MPI.PROC_NULL) is None
    comm.Sendrecv(None, MPI.PROC_NULL, 0, None, MPI.PROC_NULL, 0)


def synchronous_and_buffered(comm: Any) -> None:
    dst, src = ring(comm)
    request = comm.Issend(np.ones(1), dst)
    assert not request.Test()
    comm.Barrier()
    assert not request.Test()
    comm.Barrier()
    into = np.zeros(1)
    comm.Recv(into, src)
    request.Wait()
    big = np.ones(100_000)
    comm.Bsend(big, dst)
    big[:] = 0
    into = np.zeros(100_000)
    comm.Recv(into, src)
    assert into.all()


def several_requests(comm: Any) -> None:
    dst, src = ring(comm)
    gets = [np.zeros(1, "i") for _ in range(4)]
    requests = [comm.Irecv(g, src, i) for i, g in enumerate(gets)]
    assert MPI.Request.Testany(requests) == (MPI.UNDEFINED, False) or comm.size > 1
    comm.Barrier()
    for i in (2, 0, 1, 3):
        comm.Send(np.full(1, i, "i"), dst, i)
    completed = set()
    completed.add(MPI.Request.Waitany(requests))
    completed.update(MPI.Request.Waitsome(requests))
    statuses: list[MPI.Status] = []
    MPI.Request.Waitall(requests, statuses)
    assert len(statuses) == 4
    assert [int(g[0]) for g in gets] == [0, 1, 2, 3]
    assert not any(requests)
    assert MPI.Request.Waitany(requests) == MPI.UNDEFINED
    taken_back = comm.Irecv(np.zeros(1), src, 77)
    taken_back.Cancel()
    status = MPI.Status()
    taken_back.Wait(status)
    assert status.Is_cancelled()


def persistent_requests(comm: Any) -> None:
    dst, src = ring(comm)
    give, get = np.zeros(3), np.zeros(3)
    out, into = comm.Send_init(give, dst), comm.Recv_init(get, src)
    for i in range(3):
        give[:] = i
        MPI.Prequest.Startall([into, out])
        MPI.Request.Waitall([into, out])
        assert (get == i).all()
    assert "active request" in caught(MPI.Exception, lambda: (into.Start(), into.Start()))
    into.Cancel()
    into.Wait()
    out.Free()
    assert not out


def objects(comm: Any) -> None:
    dst, src = ring(comm)
    things = [None, 7, "text", {"a": [1, 2]}, np.arange(1000), b"x" * 100_000]
    for thing in things:
        request = comm.isend(thing, dst, 5)
        got = comm.recv(source=src, tag=5)
        request.wait()
        assert np.array_equal(got, thing) if isinstance(thing, np.ndarray) else got == thing
    assert comm.sendrecv(comm.rank, dst, source=src) == src
    assert "tag -5" in caught(MPI.Exception, lambda: comm.sendrecv(comm.rank, dst, sendtag=-5, source=src))
    comm.Barrier()
    request = comm.irecv(source=src)  # the receive of the call that was refused does not take its message
    comm.send("later", dst)
    assert request.wait() == "later"
    message = None
    comm.isend("probed", comm.rank, 9)
    while message is None:
        message = comm.improbe(comm.rank, 9)
    assert message.recv() == "probed"


def concurrent_threads(comm: Any) -> None:
    dst, src = ring(comm)
    failed: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for i in range(20):
                request = comm.isend((tag, i), dst, tag)
                assert comm.recv(source=src, tag=tag) == (tag, i)
                request.wait()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in (1, 2)]
    for thread in threads:
        thread.start()
    talk(3)
    for thread in threads:
        thread.join()
    assert not failed, failed


CHECKS = [
    buffers_of_all_kinds,
    forms_of_a_message,
    a_buffer_may_be_used_again,
    messages_do_not_overtake,
    wildcards_probes_and_status,
    truncation_is_an_error,
    types_are_compared,
    proc_null,
    synchronous_and_buffered,
    several_requests,
    persistent_requests,
    objects,
    concurrent_threads,
]


@everywhere(CHECKS)
def test_messages(check: Any, place: Any, world: Any) -> None:
    run(check, place, world)
