"""Persistent collectives and partitioned messages: made once, started repeatedly."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from mpi_checks import caught, everywhere, run

from drumline import MPI


def every_collective_repeats(comm: Any) -> None:
    """Buffers are read at each start; results are those of the blocking collectives."""
    p, rank = comm.size, comm.rank
    one, many, out, all_of = np.zeros(2), np.zeros((p, 2)), np.zeros(2), np.zeros((p, 2))
    requests = {
        "Barrier": comm.Barrier_init(),
        "Allreduce": comm.Allreduce_init(one, out),
        "Allgather": comm.Allgather_init(one, all_of),
        "Alltoall": comm.Alltoall_init(many, all_of),
        "Scan": comm.Scan_init(one, out, MPI.MAX),
        "Reduce_scatter_block": comm.Reduce_scatter_block_init(many, out),
        "Gather": comm.Gather_init(one, all_of, root=p - 1),
        "Scatter": comm.Scatter_init(many, out, root=p - 1),
        "Bcast": comm.Bcast_init(out, root=p - 1),
    }
    for step in range(2):
        for name, request in requests.items():
            one[:], many[:] = step + rank, step + 10 * rank + np.arange(p)[:, None]
            out[:], all_of[:] = -1 - rank, -1 - rank
            request.Start()
            request.Wait()
            got = out.copy(), all_of.copy()
            out[:], all_of[:] = -1 - rank, -1 - rank
            call = getattr(comm, name)
            arguments = {
                "Barrier": (),
                "Allreduce": (one, out),
                "Allgather": (one, all_of),
                "Alltoall": (many, all_of),
                "Scan": (one, out, MPI.MAX),
                "Reduce_scatter_block": (many, out),
                "Gather": (one, all_of, p - 1),
                "Scatter": (many, out, p - 1),
                "Bcast": (out, p - 1),
            }
            call(*arguments[name])
            assert (got[0] == out).all(), name
            assert (got[1] == all_of).all(), name
    for request in requests.values():
        request.Free()
        assert request == MPI.REQUEST_NULL


def counts_that_vary_by_rank(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    counts = [r + 1 for r in range(p)]
    every = np.zeros(sum(counts), "i")
    request = comm.Allgatherv_init(np.full(rank + 1, rank, "i"), [every, counts])
    share = np.zeros(rank + 1, "i")
    back = comm.Reduce_scatter_init(every, share, counts, MPI.MAX)
    for _ in range(2):
        for r in (request, back):
            r.Start()
            r.Wait()
        assert every.tolist() == [r for r in range(p) for _ in range(r + 1)]
        assert (share == rank).all()
        every[:] = 0


def ranks_start_in_different_orders(comm: Any) -> None:
    """Only the order in which the requests are made must be the same."""
    total, biggest = np.zeros(1), np.zeros(1)
    requests = [
        comm.Allreduce_init(np.ones(1), total),
        comm.Allreduce_init(np.full(1, float(comm.rank)), biggest, MPI.MAX),
    ]
    for _ in range(3):
        MPI.Prequest.Startall(requests if comm.rank % 2 else requests[::-1])
        MPI.Request.Waitall(requests)
        assert (total[0], biggest[0]) == (comm.size, comm.size - 1)
    for request in requests:
        request.Free()


def test_the_thread_of_a_persistent_collective_ends_with_its_request() -> None:
    request = MPI.COMM_SELF.Barrier_init()
    before = set(threading.enumerate())
    request.Start()
    request.Wait()
    started = set(threading.enumerate()) - before
    assert len(started) == 1
    request.Free()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


def mistakes_of_persistent_collectives(comm: Any) -> None:
    text = caught(MPI.Exception, lambda: comm.Bcast_init(np.zeros(1), root=comm.size))
    assert text.startswith(f"MPI_ERR_ROOT: root {comm.size}"), "refused when it is made, not when it is started"
    request = comm.Barrier_init()
    assert request.Wait(), "an inactive request is complete"
    request.Start()
    assert "Start of a null or active request" in caught(MPI.Exception, request.Start)
    request.Wait()
    assert caught(MPI.Exception, lambda: request.Pready(0)).startswith("MPI_ERR_REQUEST")
    request.Free()
    caught(MPI.Exception, request.Start)


# -- partitioned messages ---------------------------------------------------------------------------------------------


def partitions_arrive_when_they_are_ready(comm: Any) -> None:
    """A ring: the sender has 4 partitions, the receiver 2 of twice the size."""
    p, rank = comm.size, comm.rank
    data, into = np.zeros(8, "i"), np.zeros(8, "i")
    send = comm.Psend_init(data, 4, (rank + 1) % p, tag=5)
    receive = comm.Precv_init(into, 2, (rank - 1) % p, tag=5)
    for step in range(3):
        data[:], into[:] = 100 * step + 10 * rank + np.arange(8), -1
        receive.Start()
        send.Start()
        send.Pready_range(0, 1)
        while not receive.Parrived(0):
            pass
        expected = 100 * step + 10 * ((rank - 1) % p) + np.arange(8)
        assert (into[:4] == expected[:4]).all()
        comm.Barrier()
        assert not receive.Parrived(1)
        comm.Barrier()
        send.Pready_list([3, 2])
        status = MPI.Status()
        MPI.Request.Waitall([receive, send], [status])
        assert (into == expected).all()
        assert (status.source, status.tag, status.Get_count(MPI.INT)) == ((rank - 1) % p, 5, 8)
        assert receive.Parrived(1), "an inactive request has arrived"
    send.Free()
    receive.Free()


def pairs_match_in_the_order_of_their_creation(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    up, down = (rank + 1) % p, (rank - 1) % p
    sends = [comm.Psend_init(np.full(2, float(n)), 2, up) for n in range(2)]
    buffers = [np.zeros(2) for _ in range(2)]
    receives = [comm.Precv_init(buffer, 1, down) for buffer in buffers]
    for request in [*receives, *sends]:
        request.Start()
    for send in reversed(sends):
        send.Pready_range(0, 1)
    MPI.Request.Waitall([*receives, *sends])
    assert [buffer.tolist() for buffer in buffers] == [[0, 0], [1, 1]]


def derived_types_and_proc_null(comm: Any) -> None:
    column = MPI.DOUBLE.Create_vector(2, 1, 3)
    column = column.Create_resized(0, 8)
    table, into = np.arange(6.0).reshape(2, 3), np.zeros((2, 3))
    send = comm.Psend_init([table, 1, column], 3, comm.rank)
    receive = comm.Precv_init([into, 1, column], 3, comm.rank)
    nothing = comm.Psend_init(table, 2, MPI.PROC_NULL)
    for request in (send, receive, nothing):
        request.Start()
    send.Pready(1)
    while not receive.Parrived(1):
        pass
    assert into.tolist() == [[0, 1, 0], [0, 4, 0]]
    send.Pready_list([0, 2])
    nothing.Pready_range(0, 1)
    MPI.Request.Waitall([send, receive, nothing])
    assert (into == table).all()


def mistakes_of_partitioned_messages(comm: Any) -> None:
    me = comm.rank
    assert "at least 1" in caught(MPI.Exception, lambda: comm.Psend_init(np.zeros(2), 0, me))
    caught(ValueError, lambda: comm.Psend_init(np.zeros(3), 2, me))
    assert caught(MPI.Exception, lambda: comm.Psend_init(np.zeros(2), 2, comm.size)).startswith("MPI_ERR_RANK")
    send, receive = comm.Psend_init(np.zeros(2), 2, me), comm.Precv_init(np.zeros(4), 2, me)
    assert "Start it first" in caught(MPI.Exception, lambda: send.Pready(0))
    send.Start()
    receive.Start()
    assert "0 <= partition < 2" in caught(MPI.Exception, lambda: send.Pready(2))
    assert "a request of Psend_init" in caught(MPI.Exception, lambda: receive.Pready(0))
    assert "a request of Precv_init" in caught(MPI.Exception, lambda: send.Parrived(0))
    send.Pready(0)
    assert "ready twice" in caught(MPI.Exception, lambda: send.Pready(0))
    send.Pready(1)
    text = caught(MPI.Exception, receive.Wait)
    assert text.startswith(f"MPI_ERR_TRUNCATE: rank {me} sends 16 bytes in 2 partitions")


CHECKS = [
    every_collective_repeats,
    counts_that_vary_by_rank,
    ranks_start_in_different_orders,
    mistakes_of_persistent_collectives,
    partitions_arrive_when_they_are_ready,
    pairs_match_in_the_order_of_their_creation,
    derived_types_and_proc_null,
    mistakes_of_partitioned_messages,
]


@everywhere(CHECKS)
def test_persistent_requests(check: Any, place: tuple[str, int], world: Any) -> None:
    run(check, place, world)
