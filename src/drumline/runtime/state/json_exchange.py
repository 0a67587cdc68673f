"""Ranks exchange JSON values: sent as bytes in tensors, never pickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: object, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """The JSON-serializable value of every rank of a group, in rank order, on every rank."""
    size = dist.get_world_size(group)
    text = json.dumps(value).encode()
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
