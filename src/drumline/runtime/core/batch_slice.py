"""Converts a batch of the caller's own loader to what `data()` yields: this rank's samples, in micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...core.errors import JobError
from ...datasets.batch_form import as_pair
from ...datasets.stream import RankBatch, RankMicroBatch, split_range
from .data_agreement import check_own_batch

if TYPE_CHECKING:
    from .engine_core import EngineCore


def own_batch_slice(engine: EngineCore, batch: Any) -> RankBatch:
    """Cut (input, target), or a mapping: this rank's samples along the first dim, as many as it has."""
    batch = as_pair(batch)
    if not engine.position:
        check_own_batch(engine, batch)
    n = total = _length(batch)
    if engine.step_ranks > 1:
        count = torch.tensor([float(n)], dtype=torch.float64, device=engine.device)
        dist.all_reduce(count, group=engine.group)
        total = round(count.item() * engine.data_ranks / engine.ranks)
    micro = engine.plan.micro
    parts = [part for part in split_range(n, micro) if part]
    if len(parts) < micro:
        raise JobError(f"{n} samples for {micro=}", rule="each rank has at least one sample for every micro-batch")
    if micro == 1:  # nothing to cut
        return RankBatch(engine.steps + engine.steps_in_flight, (RankMicroBatch(batch[0], batch[1], n, 0),), total)
    micros = [RankMicroBatch(_cut(batch[0], part), _cut(batch[1], part), len(part), 0) for part in parts]
    return RankBatch(engine.steps + engine.steps_in_flight, tuple(micros), total)


def _length(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0]
    for item in batch.values() if isinstance(batch, dict) else batch:
        if isinstance(item, torch.Tensor | dict | tuple | list):
            return _length(item)
    raise JobError("a batch has no tensor", rule="a batch is (input, target)")


def _cut(value: Any, part: range) -> Any:
    if isinstance(value, torch.Tensor):
        return value[part.start : part.stop]
    if isinstance(value, dict):
        return {k: _cut(v, part) for k, v in value.items()}
    return type(value)(_cut(v, part) for v in value) if isinstance(value, tuple | list) else value
