"""Operations that fail in all ways that a backend can, for the tests of the doctor."""

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
        os.write(2, b"much before\nthe last words of rank 1\n")
        os.abort()
    return right(rank, size, device)


def hangs(rank: int, size: int, device: torch.device) -> bool:
    if rank == 1:
        time.sleep(60)
    return True


def slow(rank: int, size: int, device: torch.device) -> bool:
    """Correct, but one rank is a second later than the other."""
    done = right(rank, size, device)
    if rank == 0:
        time.sleep(1.0)
    return done


def gives_up(rank: int, size: int, device: torch.device) -> bool:
    """One rank arrives so late that the other's backend has timed out, if its timeout is short."""
    if rank == 1:
        time.sleep(1.0)
    return right(rank, size, device)
