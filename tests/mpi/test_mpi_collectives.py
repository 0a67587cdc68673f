"""Collectives of buffers and objects, blocking and nonblocking, on several kinds of communicators."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mpi_checks import caught, everywhere, run

from drumline import MPI
from drumline.mpi import run_threads
from drumline.schedules import ALGORITHMS, collective_schedule, prove


def movement(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    for root in range(p):
        buf = np.full(7, float(rank))
        comm.Bcast(buf, root)
        assert (buf == root).all()
        whole = np.zeros((p, 3), "i") if rank == root else None
        comm.Gather(np.full(3, rank, "i"), whole, root)
        if rank == root:
            assert (whole == np.arange(p)[:, None]).all()
        share = np.zeros(2)
        comm.Scatter(np.repeat(np.arange(float(p)), 2) if rank == root else None, share, root)
        assert (share == rank).all()
    every = np.zeros((p, 4), "i")
    comm.Allgather(np.full(4, rank, "i"), every)
    assert (every == np.arange(p)[:, None]).all()
    out = np.zeros((p, 2), "i")
    comm.Alltoall(np.array([[10 * rank + r] * 2 for r in range(p)], "i"), out)
    assert (out == 10 * np.arange(p)[:, None] + rank).all()
    comm.Barrier()


def sizes_that_vary_by_rank(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    counts = [r + 1 for r in range(p)]
    mine = np.full(rank + 1, rank, "i")
    expected = np.concatenate([np.full(r + 1, r) for r in range(p)])
    every = np.zeros(sum(counts), "i")
    comm.Allgatherv(mine, [every, counts])
    assert (every == expected).all()
    at_root = np.zeros(sum(counts), "i") if rank == 0 else None
    comm.Gatherv(mine, [at_root, counts] if rank == 0 else None)
    if rank == 0:
        assert (at_root == expected).all()
    share = np.zeros(rank + 1, "i")
    comm.Scatterv([expected.astype("i"), counts] if rank == 0 else None, share)
    assert (share == rank).all()
    got = np.zeros(p * (rank + 1), "i")
    comm.Alltoallv([np.repeat(np.full(1, rank, "i"), sum(counts)), counts], [got, [rank + 1] * p])
    assert (got == np.repeat(np.arange(p), rank + 1)).all()


def reductions(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    for dtype in ("b", "h", "i", "q", "B", "H", "I", "Q", "f", "d", "g", "F", "D", "G"):
        data, out = np.full(3, rank + 1).astype(dtype), np.zeros(3, dtype)
        comm.Allreduce(data, out)
        assert (out == p * (p + 1) // 2).all(), dtype
        comm.Allreduce(data, out, MPI.PROD)
        assert (out == np.prod(np.arange(1, p + 1))).all(), dtype
        if dtype not in "FDG":
            comm.Reduce(data, out, MPI.MAX, root=p - 1)
            assert rank < p - 1 or (out == p).all()
    bits = np.full(2, 1 << rank, "i")
    comm.Allreduce(MPI.IN_PLACE, bits, MPI.BOR)
    assert (bits == 2**p - 1).all()
    truth = np.array([rank == 0, True])
    comm.Allreduce(MPI.IN_PLACE, truth, MPI.LAND)
    assert truth.tolist() == [p == 1, True]
    half = torch.full((5,), rank + 1, dtype=torch.bfloat16)
    comm.Allreduce(MPI.IN_PLACE, half)
    assert (half == p * (p + 1) // 2).all()
    share = np.zeros(2)
    comm.Reduce_scatter_block(np.repeat(np.arange(float(p)), 2), share)
    assert (share == p * rank).all()
    own = np.zeros(rank + 1)
    comm.Reduce_scatter(np.ones(p * (p + 1) // 2), own, [r + 1 for r in range(p)])
    assert (own == p).all()
    scan, exscan = np.zeros(1, "i"), np.full(1, -1, "i")
    comm.Scan(np.full(1, rank, "i"), scan)
    comm.Exscan(np.full(1, rank, "i"), exscan)
    assert scan[0] == sum(range(rank + 1))
    assert exscan[0] == (sum(range(rank)) if rank else -1), "rank 0 keeps what it had"


def location_of_the_largest(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    kind = np.dtype([("value", "d"), ("index", "i")], align=True)
    data = np.array([(float(rank % 2), rank), (float(-rank), rank)], kind)
    out = np.zeros(2, kind)
    comm.Allreduce([data, MPI.DOUBLE_INT], [out, MPI.DOUBLE_INT], MPI.MAXLOC)
    assert out[0].tolist() == ((1.0, 1) if p > 1 else (0.0, 0)), "of equal values the lowest rank"
    assert out[1].tolist() == (0.0, 0)
    comm.Allreduce([data, MPI.DOUBLE_INT], [out, MPI.DOUBLE_INT], MPI.MINLOC)
    assert out[1].tolist() == (float(1 - p), p - 1)
    assert comm.allreduce((rank, rank), MPI.MAXLOC) == (p - 1, p - 1)


def matrices(a: Any, b: Any, datatype: Any) -> None:
    """Multiply 2 x 2 integer matrices; the first operand is on the left."""
    left = np.frombuffer(a, "q").reshape(-1, 2, 2)
    right = np.frombuffer(b, "q").reshape(-1, 2, 2)
    right[:] = left @ right


def rank_order_is_kept(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    op = MPI.Op.Create(matrices, commute=False)
    kind = MPI.LONG_LONG.Create_contiguous(4).Commit()
    all_of_them = [np.array([[r + 1, 1], [r, 2]]) for r in range(p)]
    data = np.array([all_of_them[rank], all_of_them[rank].T], "q")

    def product(ranks: range) -> list[list[int]]:
        made = np.eye(2, dtype=int)
        for r in ranks:
            made = made @ all_of_them[r]
        return made.tolist()

    for root in range(p):
        out = np.zeros_like(data)
        comm.Reduce([data, 2, kind], [out, 2, kind], op, root)
        assert rank != root or out[0].tolist() == product(range(p))
    comm.Allreduce([data, 2, kind], [out, 2, kind], op)
    assert out[0].tolist() == product(range(p))
    comm.Scan([data, 2, kind], [out, 2, kind], op)
    assert out[0].tolist() == product(range(rank + 1))
    assert comm.allreduce(str(rank)) == "".join(map(str, range(p)))
    assert comm.scan(str(rank)) == "".join(map(str, range(rank + 1)))
    op.Free()
    kind.Free()


def objects(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    assert comm.bcast({"from": rank} if rank == p - 1 else None, root=p - 1) == {"from": p - 1}
    assert comm.gather(rank, root=0) == (list(range(p)) if rank == 0 else None)
    assert comm.scatter([[r] for r in range(p)] if rank == 0 else None) == [rank]
    assert comm.allgather("x" * rank) == ["x" * r for r in range(p)]
    assert comm.alltoall([(rank, r) for r in range(p)]) == [(r, rank) for r in range(p)]
    assert comm.reduce([rank], root=p - 1) == (list(range(p)) if rank == p - 1 else None)
    assert comm.exscan(rank + 1) == (sum(range(1, rank + 1)) if rank else None)
    assert comm.allreduce(rank, op=max) == p - 1


def nonblocking(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    total, copy, every = np.zeros(2), np.full(3, rank, "i"), np.zeros((p, 1), "i")
    requests = [
        comm.Iallreduce(np.full(2, 1.0), total),
        comm.Ibcast(copy, p - 1),
        comm.Iallgather(np.full(1, rank, "i"), every),
        comm.Ibarrier(),
    ]
    comm.send(rank, (rank + 1) % p, 4)  # messages and other collectives continue meanwhile
    assert comm.allreduce(1) == p
    assert comm.recv(source=(rank - 1) % p, tag=4) == (rank - 1) % p
    MPI.Request.Waitall(requests)
    assert (total == p).all()
    assert (copy == p - 1).all()
    assert every.reshape(-1).tolist() == list(range(p))
    request = comm.Ireduce(np.ones(1), np.zeros(1) if rank == 0 else None)
    while not request.Test():
        pass


def communicators(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    parity = comm.Split(rank % 2, key=-rank)
    ranks = sorted((r for r in range(p) if r % 2 == rank % 2), reverse=True)
    assert parity.allgather(rank) == ranks
    assert parity.rank == ranks.index(rank)
    twin = parity.Dup()
    assert MPI.Comm.Compare(parity, twin) == MPI.CONGRUENT
    twin.isend("twin", twin.rank)
    assert not parity.Iprobe(), "a context of its own"
    assert twin.recv(source=twin.rank) == "twin"
    none = comm.Split(MPI.UNDEFINED if rank == 0 else 1)
    assert (none == MPI.COMM_NULL) == (rank == 0)
    front = comm.Create(comm.group.Incl(range((p + 1) // 2)))
    assert bool(front) == (rank < (p + 1) // 2)
    if front:
        assert front.allgather(rank) == list(range((p + 1) // 2))
        group = front.Get_group()
        own = comm.Create_group(group, tag=3)
        assert own.size == front.size
        own.Free()
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert host.size == p
    for made in (parity, twin, none, front, host):
        if made:
            made.Free()
            assert made == MPI.COMM_NULL
    assert "COMM_NULL" in caught(MPI.Exception, lambda: MPI.COMM_NULL.Get_rank())


CHECKS = [
    movement,
    sizes_that_vary_by_rank,
    reductions,
    location_of_the_largest,
    rank_order_is_kept,
    objects,
    nonblocking,
    communicators,
]


@everywhere(CHECKS)
def test_collectives(check: Any, place: Any, world: Any) -> None:
    run(check, place, world)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"])
def test_an_algorithm_keeps_the_rank_order(collective: str) -> None:
    """Used for operators that do not commute."""
    for p in (1, 2, 3, 4, 7):
        for root in range(p) if collective == "reduce" else [0]:
            proofs = [prove(collective_schedule(collective, a, p, root=root)) for a in ALGORITHMS[collective]]
            assert any(proof.in_rank_order for proof in proofs), (collective, p, root)


def test_an_operator_is_refused_for_unsupported_types() -> None:
    def check(comm: Any) -> None:
        data = np.zeros(2, "F")
        words = caught(MPI.Exception, lambda: comm.Allreduce(data, data.copy(), MPI.MAX))
        assert "MPI_ERR_OP: MAX of MPI_C_FLOAT_COMPLEX" in words
        assert "MAX takes integers, floating-point numbers" in words
        words = caught(MPI.Exception, lambda: comm.Allreduce(data, data.copy(), MPI.BAND))
        assert "BAND of MPI_C_FLOAT_COMPLEX" in words
        assert "root 9" in caught(MPI.Exception, lambda: comm.bcast(1, root=9))

    run_threads(check, 2)
