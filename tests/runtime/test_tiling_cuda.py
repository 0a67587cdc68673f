"""On a GPU: a layer that is larger than the memory allowed trains in parts, and logits are never whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import tiling_memory as memory
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.runtime.engine import initialize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LAYER = 4 * 4096 * 32768
"""Bytes of the large layer: 512 MiB."""


class Large(nn.Module):
    """Up to the large layer's width and down again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 32768), nn.Linear(32768, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Vectors(torch.utils.data.Dataset[Any]):
    """A few of them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Any:
        return torch.randn(4096, generator=torch.Generator().manual_seed(i)), i


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@pytest.fixture(autouse=True)
def limit() -> Any:
    """Sets how many bytes may be taken; one rank, in this process."""

    def at_most(size: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.get_device_properties(0).total_memory)

    yield at_most
    torch.cuda.set_per_process_memory_fraction(1.0)
    if dist.is_initialized():
        dist.destroy_process_group()


def losses(plan: str) -> list[float]:
    job = dl.Job(model=Large, loss=F.cross_entropy, optimizer=sgd, data=Vectors, batch_size=8, seed=1)
    engine = initialize(job, plan)
    return [engine.step(batch) for batch in engine.data(3)]


def test_layer_larger_than_the_device(limit: Callable[[float], None]) -> None:
    """With parts it takes few of them; the losses are those of a device with room. Last, because what ran out of memory
    may keep some."""
    limit(8 * LAYER)
    wanted = losses("dp=1")
    limit(0.9 * LAYER)
    assert losses("dp=1,zero=3,offload=all,chunk=16") == pytest.approx(wanted, rel=1e-4)
    assert torch.cuda.max_memory_allocated() < 0.5 * LAYER
    with pytest.raises(torch.OutOfMemoryError):
        losses("dp=1,zero=3,offload=all")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_are_never_materialized(limit: Callable[[float], None], precision: str) -> None:
    limit(2**35)
    with torch.device("cuda"):
        peaks = [memory.peak_on_cuda(n, precision) for n in (1, 16)]
    assert peaks[0] > 2 * memory.LOGITS and peaks[1] < 0.4 * memory.LOGITS
