"""Digests of tensors, and the vote that finds the replica whose numbers are not those of the others.

A digest is 64 bits: the sum of the tensor's words, each times an odd number of its own place, in whole numbers modulo
2^64. One flipped bit changes it always: an odd number times a power of two below 2^64 is not zero.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

CHUNK = 2**16
"""Words that are widened to 64 bits at once: the temporary memory of a digest stays in the cache."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""The golden ratio in 64 bits: its multiples spread over all of them."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """Tensors that must be equal on all ranks of a group."""

    tensors: dict[str, torch.Tensor]
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Drift:
    """What a vote found in one tensor."""

    name: str
    ranks: tuple[int, ...]
    """Those whose digest is not the majority's; all of the group where there is no majority."""
    majority: bool

    def __str__(self) -> str:
        names = ", ".join(map(str, self.ranks))
        if self.majority:
            return f"rank{'s' if len(self.ranks) > 1 else ''} {names}: {self.name!r} is not what the majority holds"
        return f"ranks {names}: {self.name!r} differs, and no majority says which of them is right"


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits of a tensor's memory, as one whole number on its device."""
    words = _words(tensor)
    weights = _weights(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(CHUNK):
        total = total * _ODD + part.to(torch.int64).mul_(weights[: part.numel()]).sum()
    return total * _ODD + words.numel()


def digests(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """One digest a tensor."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([digest(t).to(device) for t in tensors])


def vote(ballot: Ballot, device: torch.device) -> list[Drift]:
    """Compare the digests of all ranks of the group; every rank of it gets the same answer.

    Where all agree, 16 bytes travel. Else the digests of the single tensors are gathered.
    """
    size = dist.get_world_size(ballot.group)
    if size < 2 or not ballot.tensors:
        return []
    mine = digests(list(ballot.tensors.values()), device)
    both = digest(mine)
    extremes = torch.stack([both, ~both])  # the largest of ~x is ~ of the smallest x
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=ballot.group)
    highest, lowest = extremes[0], ~extremes[1]
    if bool(highest == lowest):
        return []
    table = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(table, mine, group=ballot.group)
    columns = zip(*(row.tolist() for row in table), strict=True)
    numbers = dist.get_process_group_ranks(ballot.group)
    return [
        _drift(name, column, numbers)
        for name, column in zip(ballot.tensors, columns, strict=True)
        if len(set(column)) > 1
    ]


def vote_by_name(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> list[Drift]:
    """Compare what several ranks of the group hold under one name, where each may hold something else.

    `names` are those of all ranks, in one order. Where all agree, 16 bytes a name travel.
    """
    size = dist.get_world_size(group)
    if size < 2 or not names:
        return []
    places = {name: i for i, name in enumerate(names)}
    at = torch.tensor([places[name] for name in tensors], dtype=torch.int64, device=device)
    mine = digests(list(tensors.values()), device)
    extremes = torch.full((2, len(names)), -(2**63), dtype=torch.int64, device=device)  # who has nothing is silent
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
    numbers, rows = dist.get_process_group_ranks(group), [row.tolist() for row in table]
    found = []
    for j, i in enumerate(different):
        holders = [r for r in range(size) if rows[r][1][j]]
        found.append(_drift(names[i], [rows[r][0][j] for r in holders], [numbers[r] for r in holders]))
    return found


def tell_all(told: object, group: dist.ProcessGroup, device: torch.device) -> list[object]:
    """What every rank of the group tells, as JSON, in the order of ranks."""
    size = dist.get_world_size(group)
    text = json.dumps(told).encode()
    if size == 1:
        return [json.loads(text)]
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(n) for n in lengths)
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    table = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(table, mine, group=group)
    return [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(table, lengths, strict=True)]


def _drift(name: str, column: Sequence[int], numbers: Sequence[int]) -> Drift:
    value, votes = Counter(column).most_common(1)[0]
    if votes * 2 <= len(column):
        return Drift(name, tuple(numbers), False)
    return Drift(name, tuple(n for n, v in zip(numbers, column, strict=True) if v != value), True)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as a run of whole numbers of at most 32 bits."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    """An odd number for every place in a chunk."""
    return (torch.arange(CHUNK, dtype=torch.int64, device=device) * _ODD) | 1
