"""Compares replicas by digests, and finds the rank whose tensors differ from the majority.

A digest is 64 bits: the sum of the tensor's words, each times an odd number that depends on its index, modulo 2^64. A
single flipped bit always changes it: an odd number times a power of two below 2^64 is not zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..core.engine_core import EngineCore
from ..state.json_exchange import gather_json

CHUNK = 2**16
"""Words that are widened to 64 bits at a time: the temporary memory of a digest stays in the cache."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio in 64 bits: its multiples spread over all of them."""


@dataclass(frozen=True, slots=True)
class ReplicatedTensors:
    """Tensors that must be equal on all ranks of a group."""

    tensors: dict[str, torch.Tensor]
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class ReplicaMismatch:
    """A tensor that differs between replicas."""

    name: str
    ranks: tuple[int, ...]
    """Ranks whose digest is not the majority's; all ranks of the group if there is no majority."""
    majority: bool

    def __str__(self) -> str:
        names = ", ".join(map(str, self.ranks))
        if self.majority:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {names}: {self.name!r} differs from the majority"
        return f"ranks {names}: {self.name!r} differs, and no majority shows which is right"


# -- digests


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """The 64-bit digest of a tensor's memory, as an int64 scalar on its device."""
    words = _words(tensor)
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(CHUNK):
        total = total * _ODD + part.to(torch.int64).mul_(weights[: part.numel()]).sum()
    return total * _ODD + words.numel()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as flat integers of at most 32 bits."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """An odd number for every index in a chunk."""
    return (torch.arange(CHUNK, dtype=torch.int64, device=device) * _ODD) | 1


def digests(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The digests of some tensors."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([digest(t).to(device) for t in tensors])


# -- comparison


def compare_group(replicated: ReplicatedTensors, device: torch.device) -> list[ReplicaMismatch]:
    """Compare the digests of all ranks of a group; every rank of it gets the same result.

    If all agree, 16 bytes are sent. Otherwise the digests of the single tensors are gathered.
    """
    size = dist.get_world_size(replicated.group)
    if size < 2 or not replicated.tensors:
        return []
    mine = digests(list(replicated.tensors.values()), device)
    combined = digest(mine)
    extremes = torch.stack([combined, ~combined])  # the maximum of ~x is ~ of the minimum of x
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=replicated.group)
    highest, lowest = extremes[0], ~extremes[1]
    if bool(highest == lowest):
        return []
    table = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(table, mine, group=replicated.group)
    columns = zip(*(row.tolist() for row in table), strict=True)
    ranks = dist.get_process_group_ranks(replicated.group)
    return [
        _mismatch(name, column, ranks)
        for name, column in zip(replicated.tensors, columns, strict=True)
        if len(set(column)) > 1
    ]


def compare_by_name(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> list[ReplicaMismatch]:
    """Compare tensors of the same name between the ranks of a group that have it.

    `names` are those of all ranks, in the same order everywhere. If all agree, 16 bytes per name are sent.
    """
    size = dist.get_world_size(group)
    if size < 2 or not names:
        return []
    index_of = {name: i for i, name in enumerate(names)}
    at = torch.tensor([index_of[name] for name in tensors], dtype=torch.int64, device=device)
    mine = digests(list(tensors.values()), device)
    extremes = torch.full((2, len(names)), -(2**63), dtype=torch.int64, device=device)  # the neutral element of MAX
    extremes[0, at], extremes[1, at] = mine, ~mine
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    different = (extremes[0] != ~extremes[1]).nonzero().flatten().tolist()
    if not different:
        return []
    own = torch.zeros((2, len(names)), dtype=torch.int64, device=device)
    own[0, at], own[1, at] = mine, 1
    chosen = own[:, different].contiguous()
    table = [torch.empty_like(chosen) for _ in range(size)]
    dist.all_gather(table, chosen, group=group)
    ranks, rows = dist.get_process_group_ranks(group), [row.tolist() for row in table]
    mismatches = []
    for j, i in enumerate(different):
        holders = [r for r in range(size) if rows[r][1][j]]
        mismatches.append(_mismatch(names[i], [rows[r][0][j] for r in holders], [ranks[r] for r in holders]))
    return mismatches


def _mismatch(name: str, column: Sequence[int], ranks: Sequence[int]) -> ReplicaMismatch:
    value, votes = Counter(column).most_common(1)[0]
    if votes * 2 <= len(column):
        return ReplicaMismatch(name, tuple(ranks), False)
    return ReplicaMismatch(name, tuple(n for n, v in zip(ranks, column, strict=True) if v != value), True)


# -- the replicas of an engine


def why_no_replicas(engine: EngineCore) -> str:
    """Why a comparison of replicas would find nothing under this plan; empty if it can find something."""
    if engine.ranks == 1:
        return "one rank has no replica to compare with"
    if engine.plan.sync_mode == "gossip":
        return (
            f"under sync={engine.plan.sync} replicas differ after every step; they are compared at saves and at the end"
        )
    if engine.strategy.steps_alone:
        return f"under sync={engine.plan.sync} replicas are compared after averages, which hide earlier differences"
    if engine.plan.pp * engine.plan.tp == engine.ranks:
        rest = (
            "only parameters that tp leaves whole are compared" if engine.plan.tp > 1 else "only tied ones are compared"
        )
        return f"under {engine.plan} most parameters are on one rank only; {rest}"
    sharded = [p for p in engine.model.parameters() if isinstance(p, DTensor)]
    if sharded and all(p.device_mesh.ndim == 1 for p in sharded):
        buffers = "; only buffers are compared" if any(True for _ in engine.model.buffers()) else ""
        return f"under {engine.plan} every parameter element is on one rank only{buffers}"
    return ""


def replica_mismatches(engine: EngineCore, names: list[str] | None = None) -> list[ReplicaMismatch]:
    """Compare the replicas; every rank gets the mismatches of all groups. `names` caches the names of all parts."""
    if engine.strategy.holds_parts:
        return _mismatched_parts(engine, [] if names is None else names)
    groups = replicated_tensors(engine)
    mismatches = [m for replicated in groups for m in compare_group(replicated, engine.device)]
    if all(replicated.group is engine.group for replicated in groups):
        return mismatches  # all ranks were compared together
    flag = torch.tensor([len(mismatches)], dtype=torch.int64, device=engine.device)
    dist.all_reduce(flag, group=engine.group)
    if not int(flag):
        return []
    lists: list[list[tuple[str, list[int], bool]]] = gather_json(
        [[m.name, m.ranks, m.majority] for m in mismatches], engine.group, engine.device
    )
    distinct = {(name, tuple(ranks), majority) for rows in lists for name, ranks, majority in rows}
    return [ReplicaMismatch(*item) for item in sorted(distinct)]


def replicated_tensors(engine: EngineCore) -> list[ReplicatedTensors]:
    """The tensors that must be equal, by group: whole tensors on all ranks, shards on the replicas of the shard."""
    whole: dict[str, torch.Tensor] = {}
    shards: dict[str, torch.Tensor] = {}
    replicas: dist.ProcessGroup | None = None
    for name, p in engine.model.named_parameters():
        if isinstance(p, DTensor):
            axes = p.device_mesh.mesh_dim_names or ()
            if p.device_mesh.ndim > 1:
                # the outer axis is that of the replicas
                replicas = p.device_mesh.get_group(axes[0] if axes else 0)
                shards[name] = p.to_local()
        else:
            whole[name] = p
    whole.update(engine.model.named_buffers())
    groups = [ReplicatedTensors(whole, engine.group)] if whole else []
    return groups + ([ReplicatedTensors(shards, replicas)] if replicas is not None and shards else [])


def named_parts(engine: EngineCore) -> dict[str, torch.Tensor]:
    """This rank's parts of a split model, by names that identify the part: equal names mean equal values."""
    tensors: dict[str, torch.Tensor] = {}
    for name, p in engine.model.named_parameters():
        part = engine.part(name)
        rows = f"{name}, elements {part.start} to {part.start + p.numel()}" if p.shape != part.shape else name
        tensors[rows if part.slice is None else f"{name}, part {part.slice.index} of {part.slice.split}"] = p
    tensors.update(engine.model.named_buffers())
    return tensors


def _mismatched_parts(engine: EngineCore, names: list[str]) -> list[ReplicaMismatch]:
    """The ranks of one copy of the model hold different parts: each part is compared between its replicas."""
    own = named_parts(engine)
    if not names:
        lists: list[list[str]] = gather_json(list(own), engine.group, engine.device)
        names += sorted({name for row in lists for name in row})
    return compare_by_name(own, names, engine.group, engine.device)
