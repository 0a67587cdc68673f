"""GPU tensors: between threads, through host memory over gloo, and by nccl (with one rank on one GPU)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import expected_results as plain
import pytest
import torch
from world import World

from drumline.comm import Communicator, TorchTransport, Transport, run_threads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

NCCL = """
import torch, torch.distributed as dist
from drumline.comm import Communicator, TorchTransport
import expected_results as plain

torch.cuda.set_device(0)
dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
transport = TorchTransport()
assert transport.name == "nccl", transport.name
comm = Communicator(transport)
for collective, algorithm in (*plain.TABLE, *((c, "native") for c in plain.ALGORITHMS if transport.native(c))):
    inputs = [plain.whole(0, plain.shape_of(collective, 5, 1)).cuda()]
    got = plain.call(comm, collective, inputs[0].clone(), algorithm=algorithm)
    plain.same(got, plain.expected(collective, inputs, 0, 0))
batch = transport._nccl_batch([], [])
batch.wait()
assert comm.all_reduce(torch.ones(3), algorithm="native").tolist() == [1, 1, 1]  # on the host, over gloo
comm.barrier()
dist.destroy_process_group()
print("done")
"""


def on_the_gpu(comm: Communicator) -> None:
    p = comm.size
    for collective, algorithm in plain.TABLE:
        inputs = [plain.whole(r, plain.shape_of(collective, 7, p)).cuda() for r in range(p)]
        got = plain.call(comm, collective, inputs[comm.rank].clone(), root=p - 1, algorithm=algorithm, segments=2)
        plain.same(got, plain.expected(collective, inputs, comm.rank, p - 1))
    for dtype in (torch.bfloat16, torch.complex64, torch.uint8, torch.bool):
        assert comm.all_gather(torch.ones(3, dtype=dtype, device="cuda")).dtype == dtype
    one = torch.ones(4, device="cuda", requires_grad=True)
    assert comm.all_reduce(one).tolist() == [p] * 4
    if p > 1 and comm.rank < 2:
        into = torch.zeros(2, device="cuda")
        coming = comm.start_receive(into, 1 - comm.rank)
        comm.start_send(torch.full((2,), float(comm.rank), device="cuda"), 1 - comm.rank).wait()
        coming.wait()
        assert into.tolist() == [1 - comm.rank] * 2


@pytest.mark.parametrize("p", [1, 3])
def test_threads(p: int) -> None:
    def body(transport: Transport) -> None:
        on_the_gpu(Communicator(transport))

    run_threads(body, p)


def over_gloo() -> None:
    on_the_gpu(Communicator(TorchTransport(torch.distributed.new_group(backend="gloo"))))


def test_gloo(world: Callable[[int], World]) -> None:
    world(2).run(over_gloo)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_with_one_rank(backend: str) -> None:
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", f"BACKEND = {backend!r}\n{NCCL}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stderr


SHM = """
import torch, torch.distributed as dist
import drumline.comm
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(0)
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
one = torch.arange(5.0, device="cuda")
for call in (
    lambda: dist.all_reduce(one), lambda: dist.broadcast(one, 0), lambda: dist.reduce(one, 0),
    lambda: dist.all_gather([torch.empty_like(one)], one), lambda: dist.all_to_all_single(torch.empty_like(one), one),
    lambda: dist.reduce_scatter(one, [one.clone()]), lambda: dist.barrier(),
):
    call()
work = dist.all_reduce(one, async_op=True)
work.wait()
assert one.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
assert dist.group.WORLD._nccl is not None
host = torch.ones(3)
dist.all_reduce(host)
net = DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
net(torch.randn(4, 8, device="cuda")).sum().backward()
assert net.module.weight.grad.is_cuda
shards = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
fully_shard(shards)
shards(torch.randn(4, 8, device="cuda")).sum().backward()
dist.destroy_process_group()
print("done")
"""


def test_shm_forwards_to_nccl() -> None:
    done = subprocess.run([sys.executable, "-c", SHM], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]


def mpi_on_the_gpu() -> None:
    from drumline import MPI

    comm = MPI.COMM_WORLD
    t = torch.full((5,), float(comm.rank + 1), device="cuda")
    comm.Allreduce(MPI.IN_PLACE, t)
    p = comm.size
    assert t.is_cuda and t.tolist() == [p * (p + 1) / 2] * 5
    into = torch.zeros(3, device="cuda")
    comm.Sendrecv(
        torch.full((3,), float(comm.rank), device="cuda"), (comm.rank + 1) % p, 0, into, (comm.rank - 1) % p, 0
    )
    assert into.tolist() == [float((comm.rank - 1) % p)] * 3
    comm.Bcast(into, root=0)
    assert into.tolist() == [float(p - 1)] * 3


def test_mpi_accepts_gpu_tensors(world: Callable[..., World]) -> None:
    world(2).run(mpi_on_the_gpu)
