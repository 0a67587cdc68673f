"""Lightning Fabric: DDP for the stages 0 and 1, FSDP2 through its model-parallel strategy for the stages 2 and 3.

Its own strategies for FSDP and DeepSpeed refuse CPUs.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .by_hand import optimizer_for, shard
from .work import CLIP, GPT, Step, Work, loss_of


def make(work: Work) -> Step:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    def parallel(model: GPT, mesh: Any) -> GPT:
        shard(work, model, mesh["data_parallel"])
        return model

    p = dist.get_world_size()
    strategy: Any = DDPStrategy(gradient_as_bucket_view=True)
    if work.stage >= 2:
        strategy = ModelParallelStrategy(parallel, data_parallel_size=p, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=p, strategy=strategy)
    fabric.launch()
    model = fabric.setup(work.model())
    optimizer = fabric.setup_optimizers(optimizer_for(work, model))

    def step(number: int) -> float:
        x, y = work.pair(number)
        loss = loss_of(model(x), y)
        fabric.backward(loss)
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(mean)

    return step
