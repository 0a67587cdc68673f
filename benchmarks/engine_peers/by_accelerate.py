"""Hugging Face Accelerate: DDP for the stages 0 and 1. On CPUs it has no other strategy."""

from __future__ import annotations

from typing import Any

from .by_hand import optimizer_for
from .work import CLIP, Refused, Step, Work, loss_of


def make(work: Work) -> Step:
    from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugins: dict[str, Any] = {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]}
    if work.stage >= 2:
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=work.stage == 3,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    accelerator = Accelerator(cpu=True, **plugins)
    if work.stage >= 2 and accelerator.distributed_type != DistributedType.FSDP:
        raise Refused("on a CPU it takes its FSDP plugin and runs DDP, without a word")
    model = work.model()
    # it would move an optimizer by its state dict, which a sharded one does not give
    model, optimizer = accelerator.prepare(model, optimizer_for(work, model), device_placement=[True, False])

    def step(number: int) -> float:
        x, y = work.pair(number)
        loss = loss_of(model(x), y)
        accelerator.backward(loss)
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(mean)

    return step
