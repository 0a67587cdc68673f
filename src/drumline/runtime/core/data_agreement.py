"""Checks that ranks agree about the data: one global order, of which each takes its slice."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...core.errors import JobError
from ...datasets.fingerprint import digest, fingerprint_of
from ...torchkit.fake_tensors import with_real_tensors
from ..state.prebuilt import NoDataset

if TYPE_CHECKING:
    from .engine_core import EngineCore


def check_same_data(engine: EngineCore) -> None:
    """Refuse data that differs between ranks: it was sharded before, or is random without a seed."""
    if engine.ranks == 1 or isinstance(engine.stream.dataset, NoDataset):
        return
    with with_real_tensors():  # not part of what a counter of memory or operators looks at
        own = fingerprint_of(engine.stream.source, engine.job.seed)
    fingerprints = _of_all_ranks(engine, own)
    other = next((rank for rank, value in enumerate(fingerprints) if value != fingerprints[0]), None)
    if other is None or 0 in fingerprints:
        return
    raise JobError(
        f"the job's data differs between ranks: rank {other} does not have the data of rank 0 "
        f"({engine.stream.source.name})",
        rule="data() gives the same data on every rank, and Drumline gives each rank its slice of every batch; what is "
        "sharded by rank already would be sharded twice",
        fix="leave out the sharding by rank (DistributedSampler, dataset[rank::ranks], shard()); seed what is random",
    )


def check_own_batch(engine: EngineCore, batch: tuple[Any, Any]) -> None:
    """Compare the batches that a loop of the user's own gave to the ranks in its first step.

    Ranks that share a slice (they hold parts of one copy of the model) need equal batches, others have each their own.
    """
    if engine.ranks == 1:
        return
    mine = digest(batch)
    fingerprints, slices = _of_all_ranks(engine, mine), _of_all_ranks(engine, engine.data_index)
    first: dict[int, int] = {}
    for rank, index in enumerate(slices):
        if fingerprints[first.setdefault(index, rank)] != fingerprints[rank]:
            raise JobError(
                f"ranks {first[index]} and {rank} were given different batches",
                where=f"plan {engine.plan}",
                rule="they hold parts of one copy of the model, and compute the same samples together",
                fix="shard the loader by engine.data_index of engine.data_ranks, or use engine.data()",
            )
    if engine.data_ranks > 1 and len(set(fingerprints)) == 1 and engine.rank == 0:
        warnings.warn(
            f"all {engine.data_ranks} data-parallel ranks were given the same batch: the loader is not sharded over "
            "ranks, and each sample counts once for every rank. engine.step() takes this rank's samples: use "
            "DistributedSampler(dataset, engine.data_ranks, engine.data_index), or engine.data()",
            stacklevel=2,
        )


def _of_all_ranks(engine: EngineCore, number: int) -> list[int]:
    mine = torch.tensor([number], dtype=torch.int64, device=engine.device)
    table = [torch.empty_like(mine) for _ in range(engine.ranks)]
    dist.all_gather(table, mine, group=engine.group)
    return [int(n) for n in table]
