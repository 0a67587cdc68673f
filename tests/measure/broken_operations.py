"""Operations that go wrong in every way that a backend can, for the doctor to find."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def right(rank: int, size: int, device: torch.device) -> bool:
    tensor = torch.ones(1, device=device)
    dist.all_reduce(tensor)
    return tensor.item() == size


def wrong(rank: int, size: int, device: torch.device) -> bool:
    return right(rank, size, device) and rank == 0


def refused(rank: int, size: int, device: torch.device) -> bool:
    raise RuntimeError("this backend has no such operation\nand a long story")


def dies(rank: int, size: int, device: torch.device) -> bool:
    if rank == 1:
        os.abort()
    return right(rank, size, device)


def hangs(rank: int, size: int, device: torch.device) -> bool:
    if rank == 1:
        time.sleep(60)
    return True
