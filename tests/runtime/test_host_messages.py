"""Point-to-point messages through host memory: plans that use them compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
from world import World

from drumline.comm import gloo_fallbacks

Worlds = Callable[[int], World]


def _verify(job: str, plan: str) -> tuple[Any, int]:
    """As on GPUs over gloo; returns the number of messages through host memory."""
    with mock.patch.object(gloo_fallbacks, "via_host_memory", return_value=True) as asked:
        return parity.run_verify(job, plan, 2), asked.call_count


@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "pp=2,micro=2"),
        ("gpt", "cp=2"),
        ("groups", "tile=2x1"),
        ("llama", "tp=2"),
    ],
)
def test_plans_compute_the_same(world: Worlds, job: str, plan: str) -> None:
    result, messages = world(2).run(_verify, job, plan)[0]
    parity.check(result)
    assert messages > 0


def _exchange() -> list[torch.Tensor]:
    """Over the host and not, by two calls and in a batch."""
    other = 1 - dist.get_rank()
    results = []
    for through in (True, False):
        with mock.patch.object(gloo_fallbacks, "via_host_memory", return_value=through):
            sent, room, rooms = torch.arange(4.0) + other, torch.zeros(4), torch.zeros(2, 3)
            works = [
                gloo_fallbacks.irecv(room, group=None, src=other, tag=3),
                gloo_fallbacks.isend(sent, group=None, dst=other, tag=3),
            ]
            for work in works:
                work.wait()
            there = [dist.P2POp(dist.irecv, rooms, peer=other), dist.P2POp(dist.isend, torch.ones(2, 3), peer=other)]
            for work in gloo_fallbacks.batch_isend_irecv(there):
                work.wait()
            results += [room, rooms]
    return results


def test_host_and_direct_messages_are_equal(world: Worlds) -> None:
    for rank, (room, rooms, plain, plains) in enumerate(world(2).run(_exchange)):
        assert room.tolist() == plain.tolist() == [rank + i for i in range(4)]
        assert rooms.tolist() == plains.tolist() == [[1.0] * 3] * 2


def test_cpu_sends_directly(world: Worlds) -> None:
    assert world(2).run(_direct) == [True, True]


def _direct() -> bool:
    return not gloo_fallbacks.via_host_memory(torch.ones(1), None) and gloo_fallbacks.batch_isend_irecv([]) == []
