"""The worlds of ranks that other tests use: errors are returned, hangs end, broken worlds are replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import shared_memory

import pytest
import torch
import torch.distributed as dist
from conftest import left_behind
from world import Hang, RankFailed, World

from drumline.core.errors import PlanError

Worlds = Callable[[int], World]


def who() -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), torch.get_num_threads()


def raises_on(bad: int) -> None:
    if bad in (dist.get_rank(), -1):
        raise PlanError(f"bad on {dist.get_rank()}", rule="a rule")
    dist.barrier()


def hangs() -> None:
    if dist.get_rank() == 0:
        signal.pause()


def dies() -> None:
    os._exit(3) if dist.get_rank() == 1 else dist.barrier()


def raises_what_cannot_travel() -> None:
    class Local(Exception):
        pass

    raise Local("from inside")


def test_ranks_are_reused(world: Worlds) -> None:
    first = world(2).run(who)
    assert [(r, n, threads) for r, n, _, threads in first] == [(0, 2, 1), (1, 2, 1)]
    assert world(2).run(who) == first


def test_error_on_all_ranks_keeps_the_world(world: Worlds) -> None:
    first = world(2).run(who)
    with pytest.raises(PlanError, match="bad on 0") as caught:
        world(2).run(raises_on, -1)
    assert caught.value.rule == "a rule"
    assert "in raises_on" in caught.value.__notes__[0]
    assert world(2).run(who) == first


def test_error_on_one_rank_replaces_the_world(world: Worlds) -> None:
    first = world(2).run(who)
    with pytest.raises(PlanError, match="bad on 1"):
        world(2).run(raises_on, 1)
    again = world(2).run(who)
    assert {pid for _, _, pid, _ in again}.isdisjoint(pid for _, _, pid, _ in first)


def test_hang_times_out(world: Worlds) -> None:
    with pytest.raises(Hang, match=r"hangs: ranks \[0\] of 2 did not answer within 2 s"):
        world(2).run(hangs, timeout=2.0)
    assert len(world(2).run(who)) == 2


def test_dead_rank_is_reported(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="rank 1 died with exit code 3"):
        world(2).run(dies)


def test_unpicklable_results_come_as_text(world: Worlds) -> None:
    with pytest.raises(RankFailed, match="Local: from inside"):
        world(2).run(raises_what_cannot_travel)


def test_leaks_are_detected() -> None:
    assert left_behind(set(), set(os.listdir("/dev/shm"))) == []
    before = set(os.listdir("/dev/shm"))
    segment = shared_memory.SharedMemory(create=True, size=16)
    try:
        assert left_behind(set(), before) == [f"segment {segment.name}"]
    finally:
        segment.close()
        segment.unlink()
    stray = World(1)
    stray.run(who)
    try:
        assert left_behind(set(), before) == [f"process {next(iter(stray.pids))}"]
    finally:
        stray.stop()
    assert left_behind(set(), before) == []
