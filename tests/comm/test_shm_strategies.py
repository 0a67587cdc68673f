"""torch's own engines on an shm group: DDP, FSDP2, DTensor and pipelines compute what they compute on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_shm import group_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 16)).double()


def batch(rows: int = 8) -> Tensor:
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(rows, 16, dtype=torch.float64)


def ddp(group: dist.ProcessGroup) -> list[Tensor]:
    net = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.001)
    for _ in range(3):
        net(batch()).square().mean().backward()
    return [p.grad for p in net.parameters()]


def fsdp(group: dist.ProcessGroup) -> list[Tensor]:
    mesh, net = DeviceMesh.from_group(group, "cpu"), model()
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in net.parameters()]


def tensor_parallel(group: dist.ProcessGroup) -> list[Tensor]:
    mesh, net = DeviceMesh.from_group(group, "cpu"), model()
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(3)
    net(torch.randn(8, 16, dtype=torch.float64)).square().mean().backward()
    grads = [p.grad for p in net.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def pipeline(group: dist.ProcessGroup, *, virtual: int = 1) -> list[Tensor]:
    p, r, net = group.size(), group.rank(), model()
    torch.manual_seed(5)
    layers = nn.ModuleList([nn.Linear(16, 16).double() for _ in range(p * virtual)])
    mine = [i for i in range(p * virtual) if i % p == r]
    stages = [PipelineStage(layers[i], i, p * virtual, torch.device("cpu"), group=group) for i in mine]
    loss = nn.MSELoss()
    schedule = (
        Schedule1F1B(stages[0], 4, loss_fn=loss) if virtual == 1 else ScheduleInterleaved1F1B(stages, 4, loss_fn=loss)
    )
    data = torch.randn(8, 16, dtype=torch.float64)
    if r == 0:
        schedule.step(data)
    elif r == p - 1:
        schedule.step(target=torch.zeros(8, 16, dtype=torch.float64))
    else:
        schedule.step()
    del net
    return [q.grad for i in mine for q in layers[i].parameters()]


def interleaved(group: dist.ProcessGroup) -> list[Tensor]:
    return pipeline(group, virtual=2)


STRATEGIES = {"ddp": ddp, "fsdp": fsdp, "tensor": tensor_parallel, "pipeline": pipeline, "interleaved": interleaved}


def compare(name: str) -> float:
    strategy = STRATEGIES[name]
    if "plain" not in globals():
        globals()["plain"] = dist.new_group(backend="gloo")
    ours, theirs = strategy(group_of()), strategy(globals()["plain"])
    return max((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_same_as_on_gloo(world, name: str, p: int) -> None:
    assert max(world(p).run(compare, name)) < 1e-13
