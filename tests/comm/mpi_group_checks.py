"""Checks of the torch backend `mpi4py`, run on ranks of mpiexec: every operation, DDP, FSDP2, wrong calls, groups."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from drumline.comm.mpi.world import load
from drumline.core.errors import InputError
from drumline.measurement.doctor.operations import OPERATIONS, PAIRS


@contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """(rank, size) of a default group of this backend, without any variables."""
    dist.init_process_group("mpi4py", init_method="mpi://", timeout=timedelta(seconds=60))
    assert dist.get_backend() == "mpi4py"
    assert dist.get_rank() == load().COMM_WORLD.Get_rank()
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def every_operation() -> None:
    with joined() as (rank, size):
        for name, operation in OPERATIONS.items():
            if size > 1 or name not in PAIRS:
                assert operation(rank, size, torch.device("cpu")), name


def large_and_odd_tensors() -> None:
    """Above the size where the method changes; strided tensors; asynchronous work."""
    with joined() as (rank, size):
        works, tensors = [], []
        for n in (1, 100, 300_000):
            tensors.append(torch.full((n, 2), float(rank))[:, 0])
            works.append(dist.all_reduce(tensors[-1], async_op=True))
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert work.is_completed()
            assert bool((tensor == sum(range(size))).all())
        truth = torch.tensor([rank == 0, False])
        dist.all_reduce(truth, op=dist.ReduceOp.MAX)
        assert truth.tolist() == [True, False]
        half = torch.full((5,), 0.5 + rank, dtype=torch.float16)
        dist.all_reduce(half, op=dist.ReduceOp.AVG)
        assert half.tolist() == [0.5 + (size - 1) / 2] * 5


def sub_groups() -> None:
    with joined() as (rank, size):
        halves = [dist.new_group([r for r in range(size) if r % 2 == side]) for side in range(min(2, size))]
        mine = halves[rank % 2]
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=mine)
        assert tensor.item() == sum(r for r in range(size) if r % 2 == rank % 2)


def a_wrong_call_is_reported() -> None:
    with joined() as (rank, size):
        if size == 1:
            return
        start = time.monotonic()
        try:
            dist.all_reduce(torch.zeros(4 if rank == 0 else 5))
        except InputError as e:
            assert "ranks made different calls" in e.what, e
            assert "(4)" in e.what, e
            assert "(5)" in e.what, e
            assert "mpi_group_checks.py" in e.what, e
        else:
            raise AssertionError("no error was raised")
        assert time.monotonic() - start < 20  # long before the timeout of 60 s


def training() -> None:
    """A step of DDP and of FSDP2 gives the weights of a step on the whole batch."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with joined() as (rank, size):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)).double()
        x, y = torch.randn(4 * size, 8).double(), torch.randn(4 * size, 4).double()

        def step(module: torch.nn.Module, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
            torch.nn.functional.mse_loss(module(a), b).backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
            weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
            return [p.detach().clone() for p in weights]

        expected = step(copy.deepcopy(model), x, y)
        mine = slice(4 * rank, 4 * rank + 4)
        replicated = step(DistributedDataParallel(copy.deepcopy(model)), x[mine], y[mine])
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        sharded = step(fully_shard(copy.deepcopy(model), mesh=mesh), x[mine], y[mine])
        for a, b, c in zip(expected, replicated, sharded, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)


CHECKS = (every_operation, large_and_odd_tensors, sub_groups, training, a_wrong_call_is_reported)
