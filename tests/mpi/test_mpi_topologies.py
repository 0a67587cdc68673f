"""Grids and graphs of ranks, and the collectives between neighbours, on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi_checks import caught, everywhere, run

from drumline import MPI
from drumline.mpi.topology import CartesianGrid, Neighborhood


def code_of(fn: Any) -> int:
    """The error class that a function raises."""
    with pytest.raises(MPI.Exception) as e:
        fn()
    return int(e.value.Get_error_class())


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_grid_counts_its_ranks_by_rows() -> None:
    grid = CartesianGrid((2, 3), (False, True))
    assert [grid.coords(r) for r in range(6)] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert all(grid.rank(grid.coords(r)) == r for r in range(6))
    assert grid.rank([1, -1]) == 5, "a periodic dim wraps around"
    assert grid.shift(0, 1, 1) == (2, 1)
    assert grid.shift(0, 0, 1) == (MPI.PROC_NULL, 3)
    assert grid.shift(4, 0, -1) == (MPI.PROC_NULL, 1)


def test_what_goes_down_in_a_small_ring_arrives_from_above() -> None:
    """Both neighbours of a ring of two are one rank, so the lanes must tell its two messages apart."""
    assert CartesianGrid((2,), (True,)).neighborhood(0) == Neighborhood(((1, 1), (1, 0)), ((1, 0), (1, 1)))


# -- construction -----------------------------------------------------------------------------------------------------


def grids(comm: Any) -> None:
    dims = MPI.Compute_dims(comm.size, 2)
    grid = comm.Create_cart(dims, periods=[False, True])
    assert type(grid) is MPI.Cartcomm
    assert grid.topology == MPI.CART
    assert grid.is_topo
    assert not comm.is_topo
    assert grid.dims == dims
    assert grid.periods == [0, 1]
    assert grid.Get_cart_rank(grid.coords) == grid.rank == comm.rank
    row, column = grid.coords
    assert grid.Shift(0, 1) == tuple(
        grid.Get_cart_rank([r, column]) if 0 <= r < dims[0] else MPI.PROC_NULL for r in (row - 1, row + 1)
    )
    lines = grid.Sub(np.array([False, True]))
    assert lines.dims == dims[1:]
    assert lines.size == dims[1]
    assert lines.rank == column
    assert lines.allgather(row) == [row] * dims[1], "the ranks of one row"
    copy = grid.Dup()
    assert type(copy) is MPI.Cartcomm
    assert copy.topo == grid.topo
    assert type(MPI.Comm.fromhandle(grid.handle)) is MPI.Cartcomm
    assert type(grid.Split(0)) is MPI.Intracomm, "a part of a grid has no topology"
    point = comm.Create_cart([])
    assert (point.dims == [] and point.size == 1) if comm.rank == 0 else point == MPI.COMM_NULL


def graphs(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    star = comm.Create_graph([p - 1 + r for r in range(p)], [*range(1, p), *[0] * (p - 1)])
    assert type(star) is MPI.Graphcomm
    assert star.dims == (p, 2 * (p - 1))
    assert star.neighbors == ([0] if rank else list(range(1, p)))
    assert star.Get_neighbors_count(0) == p - 1
    assert star.inoutedges == (star.neighbors, star.neighbors)
    ring = comm.Create_dist_graph_adjacent([(rank - 1) % p], [(rank + 1) % p], [10 + rank], [11 + rank])
    assert type(ring) is MPI.Distgraphcomm
    assert ring.Get_dist_neighbors() == ([(rank - 1) % p], [(rank + 1) % p], ([10 + rank], [11 + rank]))
    assert ring.Get_dist_neighbors_count() == (1, 1, True)
    # Rank 0 knows all edges: from each rank to each lower one.
    edges = [(r, list(range(r))) for r in range(p)] if rank == 0 else []
    heads = [head for _, lower in edges for head in lower]
    lower = comm.Create_dist_graph([r for r, _ in edges], [len(e) for _, e in edges], heads)
    assert lower.Get_dist_neighbors() == (list(range(rank + 1, p)), list(range(rank)), None)
    assert lower.degrees == (p - 1 - rank, rank)


# -- collectives between neighbours -----------------------------------------------------------------------------------


def exchanges_of_a_ring(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    ring = comm.Create_cart([p], periods=True)
    down, up = (rank - 1) % p, (rank + 1) % p
    for ready in (ring.Neighbor_alltoall, lambda *a: ring.Ineighbor_alltoall(*a).Wait()):
        got = np.zeros((2, 3), "i")
        ready(np.array([[10 * rank] * 3, [10 * rank + 1] * 3], "i"), got)
        assert got[:, 0].tolist() == [10 * down + 1, 10 * up], "from below what went up, from above what went down"
    got = np.zeros(2)
    ring.Neighbor_allgather(np.full(1, float(rank)), got)
    assert got.tolist() == [down, up]
    assert ring.neighbor_allgather({rank}) == [{down}, {up}]
    assert ring.neighbor_alltoall([("down", rank), ("up", rank)]) == [("up", down), ("down", up)]


def ends_of_a_line_receive_nothing(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    line = comm.Create_cart([p])
    expected = [rank - 1 if rank else -9, rank + 1 if rank < p - 1 else -9]
    got = np.full(2, -9)
    line.Neighbor_allgather(np.array([rank]), got)
    assert got.tolist() == expected
    got[:] = -9
    line.Ineighbor_alltoall(np.full(2, rank), got).Wait()
    assert got.tolist() == expected
    assert line.neighbor_allgather(rank) == [None if r == -9 else r for r in expected]


def sizes_and_types_that_vary(comm: Any) -> None:
    """Every rank sends r + 1 elements to rank r, along the edges of a complete graph."""
    p, rank = comm.size, comm.rank
    ranks = list(range(p))
    whole = comm.Create_dist_graph_adjacent(ranks, ranks)
    counts = [r + 1 for r in ranks]
    sent, expected = np.full(sum(counts), rank, "i"), np.repeat(np.arange(p, dtype="i"), rank + 1)
    for exchange in (whole.Neighbor_alltoallv, lambda *a: whole.Ineighbor_alltoallv(*a).Wait()):
        got = np.zeros(p * (rank + 1), "i")
        exchange([sent, counts], [got, [rank + 1] * p])
        assert (got == expected).all()
    places = [4 * sum(counts[:r]) for r in ranks]
    got = np.zeros(p * (rank + 1), "i")
    whole.Neighbor_alltoallw(
        [sent, (counts, places), [MPI.INT] * p],
        [got, ([rank + 1] * p, [4 * r * (rank + 1) for r in ranks]), [MPI.INT] * p],
    )
    assert (got == expected).all()
    every = np.zeros(sum(counts), "i")
    whole.Neighbor_allgatherv(np.full(rank + 1, rank, "i"), [every, counts])
    assert (every == np.concatenate([np.full(n, r) for r, n in zip(ranks, counts, strict=True)])).all()


def parallel_edges_keep_their_order(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    down, up = (rank - 1) % p, (rank + 1) % p
    double = comm.Create_dist_graph_adjacent([down, down], [up, up])
    got = np.zeros(2, "i")
    double.Neighbor_alltoall(np.array([10 * rank, 10 * rank + 1], "i"), got)
    assert got.tolist() == [10 * down, 10 * down + 1]


def persistent_exchanges(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    ring = comm.Create_cart([p], periods=True)
    down, up = (rank - 1) % p, (rank + 1) % p
    sent, got, every = np.zeros(2, "i"), np.zeros(2, "i"), np.zeros(2, "i")
    requests = [ring.Neighbor_alltoall_init(sent, got), ring.Neighbor_allgatherv_init(sent[:1], every)]
    for step in range(3):
        sent[:] = [100 * step + 2 * rank, 100 * step + 2 * rank + 1]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        assert got.tolist() == [100 * step + 2 * down + 1, 100 * step + 2 * up]
        assert every.tolist() == [100 * step + 2 * down, 100 * step + 2 * up]
    for request in requests:
        request.Free()


# -- mistakes ---------------------------------------------------------------------------------------------------------


def mistakes(comm: Any) -> None:
    p = comm.size
    assert code_of(lambda: comm.Create_cart([p + 1])) == MPI.ERR_ARG
    assert code_of(lambda: comm.Create_cart([-1])) == MPI.ERR_DIMS
    assert "expecting 1 items, got 2" in caught(ValueError, lambda: comm.Create_cart([p], [True, False]))
    text = caught(MPI.Exception, lambda: comm.Create_cart([p, 2]))
    assert text.splitlines()[0] == f"MPI_ERR_ARG: a grid of {2 * p} ranks"
    assert f"at most {p} ranks" in text
    assert "Compute_dims" in text
    line = comm.Create_cart([p])
    assert code_of(lambda: line.Get_cart_rank([p])) == MPI.ERR_ARG
    assert code_of(lambda: line.Get_coords(p)) == MPI.ERR_RANK
    assert code_of(lambda: line.Shift(1, 1)) == MPI.ERR_ARG
    assert "expecting 1 items, got 2" in caught(ValueError, lambda: line.Sub([True, True]))
    assert "expecting 2 items, got 1" in caught(ValueError, lambda: line.neighbor_alltoall([1]))
    caught(ValueError, lambda: line.Neighbor_alltoall(np.zeros(3), np.zeros(2)))
    assert code_of(lambda: comm.Create_graph([2, 1], [0, 0])) == MPI.ERR_ARG
    assert "edges with rank 7" in caught(MPI.Exception, lambda: comm.Create_graph([1], [7]))
    assert code_of(lambda: comm.Create_dist_graph_adjacent([p], [0])) == MPI.ERR_RANK
    assert code_of(lambda: comm.Create_dist_graph_adjacent([0], [0], [1], None)) == MPI.ERR_TOPOLOGY
    assert "for 1 edges" in caught(
        ValueError, lambda: comm.Create_dist_graph_adjacent([0], [0], MPI.WEIGHTS_EMPTY, MPI.WEIGHTS_EMPTY)
    )
    assert code_of(lambda: comm.Create_dist_graph([0], [-1], [])) == MPI.ERR_ARG
    assert "another topology, or with none" in caught(TypeError, lambda: MPI.Topocomm(comm))
    caught(TypeError, lambda: MPI.Graphcomm(line))
    assert code_of(lambda: MPI.Cartcomm().Get_dim()) == MPI.ERR_COMM


def messages_of_another_size(comm: Any) -> None:
    ring = comm.Create_cart([comm.size], periods=True)
    text = caught(MPI.Exception, lambda: ring.Neighbor_allgather(np.zeros(1), np.zeros(4)))
    assert "MPI_ERR_TRUNCATE" in text
    assert "sends 8 bytes where 16 are expected" in text


CHECKS = [
    grids,
    graphs,
    exchanges_of_a_ring,
    ends_of_a_line_receive_nothing,
    sizes_and_types_that_vary,
    parallel_edges_keep_their_order,
    persistent_exchanges,
    mistakes,
    messages_of_another_size,
]


@everywhere(CHECKS)
def test_topologies(check: Any, place: tuple[str, int], world: Any) -> None:
    run(check, place, world)
