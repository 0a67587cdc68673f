"""Sets an engine up for a plan that splits the model itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...core.job import Job
from ...plans import Plan
from ...tracing.warned import let_weights_lie_apart
from ..build import Built
from ..held import Held
from ..recording.recorder import Recorder
from ..recurrent import noticed
from ..strategies.buckets import Reach
from ..strategies.flat import FlatShard
from .groups import COPIES, Groups
from .model import SplitModel


def set_up(
    job: Job,
    plan: Plan,
    rank: int,
    device: torch.device,
    dtype: torch.dtype | None,
    flops_per_byte: float | None = None,
) -> Held:
    """This rank's part of the model, and the strategy that adds up its gradients."""
    world = dist.group.WORLD
    assert world is not None
    groups = Groups(plan, rank)
    record = Recorder(rank, device, world)
    split = SplitModel(
        job,
        plan,
        groups,
        device,
        dtype,
        watch=lambda axis, name, t: record.message(name, t),
        flops_per_byte=flops_per_byte,
    )
    strategy = FlatShard(
        plan,
        groups.group(["shard"]),
        groups.group(["replica", *COPIES]),
        split=groups.group(["pp", "shard", "tp"]),
    )
    if split.spreader.summands:  # what the tensor-parallel ranks have whole, for work that they share
        reach = Reach(groups.group(["shard"]), groups.group(["replica", *COPIES, "tp"]))
        strategy.keep_apart(split.spreader.summands, reach)
    strategy.record = record
    split.use(strategy)
    if noticed():
        let_weights_lie_apart()
    module = strategy.wrap(split.root)
    built = Built(split.root, module, split.places.parts, {}, [], world)
    return Held(built, strategy, world, record, split.places.data, split)
