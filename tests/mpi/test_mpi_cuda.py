"""GPU tensors as buffers: staged through host memory, and copied back after a receive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drumline import MPI
from drumline.mpi import run_threads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def full(n: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype, device="cuda")


def messages(comm: Any) -> None:
    dst, src = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    into = full(3, 0, torch.bfloat16)
    request = comm.Irecv(into, src)
    comm.Send(full(3, comm.rank, torch.bfloat16), dst)
    request.Wait()
    assert (into == src).all()
    grid = torch.arange(6.0, device="cuda").view(2, 3)
    column = MPI.FLOAT.Create_vector(2, 1, 3).Commit()
    request = comm.Isend(np.array([7, 8], "f"), comm.rank, 9)
    comm.Recv([grid, 1, column], comm.rank, 9)
    request.Wait()
    assert grid.tolist() == [[7, 1, 2], [8, 4, 5]]


def collectives(comm: Any) -> None:
    p, rank = comm.size, comm.rank
    total = full(5, 0)
    comm.Allreduce(full(5, rank + 1), total)
    assert (total == p * (p + 1) // 2).all()
    comm.Allreduce(MPI.IN_PLACE, total, MPI.MAX)
    comm.Iallreduce(MPI.IN_PLACE, total).Wait()
    assert (total == p * p * (p + 1) // 2).all()
    every = torch.zeros(p, 2, device="cuda")
    comm.Allgather(full(2, rank), every)
    assert every[:, 0].tolist() == list(range(p))
    copy = full(4, rank)
    comm.Bcast(copy, p - 1)
    assert (copy == p - 1).all()
    shares = full(p * (p + 1) // 2, -1)
    comm.Allgatherv(full(rank + 1, rank), [shares, [r + 1 for r in range(p)]])
    assert shares.tolist() == [r for r in range(p) for _ in range(r + 1)]


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("check", [messages, collectives], ids=lambda c: c.__name__)
def test_cuda(check: Any, p: int) -> None:
    run_threads(check, p)
