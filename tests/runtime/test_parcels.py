"""Tensors of all ranks come to the first one in few messages, equal in every type and shape."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from world import World

from drumline.runtime.verification import parcels

FORMS = (
    ((), torch.float64),
    ((3,), torch.bfloat16),
    ((0, 4), torch.float32),
    ((2, 3, 5), torch.float64),
    ((7,), torch.float16),
    ((4, 0), torch.float64),
    ((1, 1, 1, 1), torch.float32),
)


def tensors_of(rank: int) -> dict[int, torch.Tensor]:
    """Rank 1 has those with an odd number, rank 2 only empty ones; some are not contiguous."""
    made = {
        k: (torch.arange(torch.Size(shape).numel()) + 100 * k + rank)
        .to(dtype)
        .reshape(shape[::-1])
        .permute(list(range(len(shape)))[::-1])
        for k, (shape, dtype) in enumerate(FORMS)
    }
    if rank == 2:
        return {k: t for k, t in made.items() if not t.numel()}
    return {k: t for k, t in made.items() if rank != 1 or k % 2}


def gathered(size: int, limit: int) -> tuple[dict[int, list[torch.Tensor]], int]:
    """On every rank: what arrives, and the messages sent."""
    with mock.patch.object(parcels, "PARCEL", limit), mock.patch.object(dist, "send", wraps=dist.send) as send:
        rank = dist.get_rank()
        return parcels.gather_tensors(tensors_of(rank), rank, size), send.call_count


def check(world: World, limit: int) -> list[int]:
    (arrived, _), *others = world.run(gathered, world.size, limit)
    assert all(tensors == {} for tensors, _ in others)
    expected: dict[int, list[torch.Tensor]] = {}
    for rank in range(world.size):
        for k, tensor in tensors_of(rank).items():
            expected.setdefault(k, []).append(tensor)
    assert set(arrived) == set(expected)
    for k, tensors in expected.items():
        assert [t.dtype for t in arrived[k]] == [t.dtype for t in tensors]
        assert all(map(torch.equal, arrived[k], tensors)) and len(arrived[k]) == len(tensors)
    return [messages for _, messages in others]


def test_two_messages_of_each_rank(world: Callable[[int], World]) -> None:
    """The forms and one parcel; of empty tensors the forms alone."""
    assert check(world(3), parcels.PARCEL) == [2, 1]


def test_a_parcel_is_limited(world: Callable[[int], World]) -> None:
    """The forms, 16 bytes, and 240 bytes, which are a parcel of their own."""
    assert check(world(2), 64) == [3]


def test_one_rank_has_its_own(world: Callable[[int], World]) -> None:
    assert check(world(1), parcels.PARCEL) == []
