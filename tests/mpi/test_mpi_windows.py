"""One-sided communication: Put, Get, Accumulate, synchronised by Fence, Lock, or Post and Start."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi_checks import caught, everywhere, run

from drumline import MPI


def put_and_get(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    memory = np.full(p, -1, "i")
    win = MPI.Win.Create(memory, memory.itemsize, comm=comm)
    win.Fence()
    for target in range(p):
        win.Put(np.full(1, rank, "i"), target, rank)
    win.Fence()
    assert memory.tolist() == list(range(p))
    got = np.zeros(p, "i")
    win.Get(got, (rank + 1) % p)
    win.Fence()
    assert got.tolist() == list(range(p))
    every_other = MPI.INT.Create_vector((p + 1) // 2, 1, 2).Commit()
    got = np.zeros((p + 1) // 2, "i")
    win.Get(got, 0, (0, 1, every_other))
    assert got.tolist() == list(range(0, p, 2))
    win.Fence()
    win.Free()


def accumulate(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    win = MPI.Win.Allocate(16, 8, comm=comm)
    memory = np.frombuffer(win.tomemory(), "d")
    memory[:] = 0
    win.Fence()
    for target in range(p):
        win.Accumulate(np.array([1.0, rank]), target)
    win.Fence()
    assert memory.tolist() == [p, sum(range(p))]
    win.Fence()
    win.Accumulate(np.full(1, float(rank)), 0, 1, MPI.MAX)
    win.Fence()
    if rank == 0:
        assert memory[1] == max(sum(range(p)), p - 1)
    win.Free()


def locks_are_exclusive(comm: Any) -> None:
    """Read, add one, write: only safe under a lock."""
    p, rank = comm.size, comm.rank
    memory = np.zeros(1, "i")
    win = MPI.Win.Create(memory, 4, comm=comm)
    for _ in range(10):
        value = np.zeros(1, "i")
        win.Lock(0)
        win.Get(value, 0)
        win.Put(value + 1, 0)
        win.Unlock(0)
    comm.Barrier()
    if rank == 0:
        assert memory[0] == 10 * p
    comm.Barrier()
    ticket = np.zeros(1, "i")
    win.Lock(0, MPI.LOCK_SHARED)
    win.Fetch_and_op(np.ones(1, "i"), ticket, 0)
    win.Unlock(0)
    tickets = comm.allgather(int(ticket[0]))
    assert sorted(tickets) == [10 * p + i for i in range(p)]
    old = np.zeros(1, "i")
    win.Lock_all()
    win.Compare_and_swap(np.full(1, -5, "i"), np.full(1, 11 * p, "i"), old, 0)
    win.Unlock_all()
    assert sorted(comm.allgather(int(old[0]))) == [-5] * (p - 1) + [11 * p]
    win.Free()


def start_and_post(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    memory = np.zeros(p, "i")
    win = MPI.Win.Create(memory, 4, comm=comm)
    others = comm.group.Excl([rank])
    if p > 1:
        win.Post(others)
        win.Start(others)
        for target in range(p):
            if target != rank:
                win.Put(np.full(1, rank + 1, "i"), target, rank)
        win.Complete()
        win.Wait()
        assert memory.tolist() == [0 if r == rank else r + 1 for r in range(p)]
    win.Free()


def shared_memory(comm: Any) -> None:
    """Each rank writes to its own part and reads the parts of all others directly."""
    p, rank = comm.size, comm.rank
    size = 8 * (rank + 1)
    window = MPI.Win.Allocate_shared(size, 8, comm=comm)
    mine = np.frombuffer(window.tomemory(), "d")
    mine[:] = rank
    window.Fence()
    for other in range(p):
        part, unit = window.Shared_query(other)
        assert unit == 8
        assert np.frombuffer(part, "d").tolist() == [other] * (other + 1)
    first, _ = window.Shared_query(MPI.PROC_NULL)
    assert first.nbytes == 8
    window.Fence()
    window.Put(np.array([100.0 + rank]), (rank + 1) % p)
    window.Fence()
    assert mine[0] == 100 + (rank - 1) % p, "one-sided messages reach the same memory"
    assert window.flavor == MPI.WIN_FLAVOR_SHARED
    del first, part, mine
    window.Free()
    plain = MPI.Win.Allocate(8, comm=comm)
    assert "MPI_ERR_RMA_FLAVOR" in caught(MPI.Exception, lambda: plain.Shared_query(0))
    plain.Free()


def requests_and_refusals(comm: Any) -> None:
    win = MPI.Win.Allocate(8, comm=comm)
    win.Lock(comm.rank)
    win.Rput(b"abcdefgh", comm.rank).Wait()
    got = bytearray(8)
    request = win.Rget(got, comm.rank)
    request.Wait()
    assert got == b"abcdefgh"
    words = caught(MPI.Exception, lambda: win.Get(bytearray(4), comm.rank, 6))
    assert f"bytes 6 to 10 of a window of 8 on rank {comm.rank}" in words
    win.Put(b"too far", comm.rank, 100)
    assert "bytes 100 to 107" in caught(MPI.Exception, lambda: win.Flush(comm.rank))
    win.Unlock(comm.rank)
    assert "rank 99" in caught(MPI.Exception, lambda: win.Put(b"x", 99))
    comm.Barrier()
    win.Free()
    assert win == MPI.WIN_NULL


CHECKS = [put_and_get, accumulate, locks_are_exclusive, start_and_post, shared_memory, requests_and_refusals]


@everywhere(CHECKS)
def test_windows(check: Any, place: Any, world: Any) -> None:
    run(check, place, world)
