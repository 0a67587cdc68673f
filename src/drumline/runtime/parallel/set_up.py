"""Sets an engine up for a plan that splits the model itself."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...job import Job
from ...plan import Plan
from ..build import Built
from ..observe.record import Recorder
from ..strategies.buckets import Reach
from ..strategies.flat import FlatShard
from .captures import Weigh
from .groups import COPIES, Groups
from .model import SplitModel


def set_up(
    job: Job, plan: Plan, rank: int, device: torch.device, dtype: torch.dtype | None, weigh: Weigh,
    flops_per_byte: float | None = None,
) -> tuple[Built, SplitModel, FlatShard, dist.ProcessGroup, Recorder]:  # fmt: skip
    """The model, the strategy that adds up its gradients, the group of all ranks, and the recorder."""
    world = dist.group.WORLD
    assert world is not None
    groups = Groups(plan, rank)
    record = Recorder(rank, device, world)
    split = SplitModel(
        job, plan, groups, device, dtype, weigh, watch=lambda axis, name, t: record.message(name, t),
        flops_per_byte=flops_per_byte,
    )  # fmt: skip
    strategy = FlatShard(
        plan, groups.group(["shard"]), groups.group(["replica", *COPIES]),
        split=groups.group(["pp", "shard", "tp"]),
    )  # fmt: skip
    if split.spreader.summands:  # what the tensor-parallel ranks have whole, for work that they share
        reach = Reach(groups.group(["shard"]), groups.group(["replica", *COPIES, "tp"]))
        strategy.keep_apart(split.spreader.summands, reach)
    strategy.record = record
    split.use(strategy)
    module = strategy.wrap(split.root)
    return Built(split.root, module, split.places.parts, {}, [], world), split, strategy, world, record
