"""Later engines of a process use the same process groups: the second adds no threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import expert_jobs
import pytest
import small_jobs
import torch.distributed as dist
from world import World

from drumline.runtime.engine import initialize
from drumline.runtime.state.process_groups import group_along, mesh_of, process_group

Worlds = Callable[..., World]


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def counted(kind: str, job: str, plan: str, more: int) -> list[int]:
    """This rank's threads after the first engine, and after each of the next."""
    results = []
    for _ in range(1 + more):
        made = expert_jobs.make(job) if kind == "experts" else small_jobs.make(job)
        engine = initialize(made, plan)
        engine.step(next(iter(engine.data())))
        del engine
        gc.collect()
        dist.barrier()
        results.append(threads())
    return results


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted by /proc")
@pytest.mark.parametrize("more", [1, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "job", "plan"),
    [
        ("dense", "mlp", "dp=4,zero=2,shard=2"),
        ("dense", "mlp", "dp=4,zero=3,shard=2"),
        ("experts", "mixture", "dp=4,ep=2,zero=1,shard=2"),
        ("dense", "mlp", "dp=2,tp=2,zero=1"),
        ("dense", "mlp", "dp=2,pp=2,micro=3"),
        pytest.param("dense", "groups", "tile=2x2", marks=pytest.mark.slow),
    ],
)
def test_later_engines_add_no_threads(world: Worlds, kind: str, job: str, plan: str, more: int) -> None:
    for rank, result in enumerate(world(4).run(counted, kind, job, plan, more, timeout=200)):
        assert max(result) == result[0], f"rank {rank}: {result}"


def whom() -> list[object]:
    """Ranks of groups along the axes of a mesh, and whether a second asking gets the same ones."""
    shape = (2, 1, 2)
    axes = [group_along(shape, dim) for dim in range(3)]
    mesh = mesh_of("cpu", (2, 2), ("replica", "shard"))
    again = mesh_of("cpu", (2, 2), ("replica", "shard"))
    return [
        [dist.get_process_group_ranks(g) if g else None for g in axes],
        [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("replica", "shard")],
        mesh is again and mesh.get_group("shard") is axes[2] is group_along(shape, 2),
        process_group(range(4)) is dist.group.WORLD,
        process_group(range(4), use="other") not in (None, dist.group.WORLD, process_group(range(4), use="third")),
        mesh["shard"].get_local_rank(),
        mesh["replica"].get_local_rank(),
    ]


def test_groups_along_axes(world: Worlds) -> None:
    for rank, result in enumerate(world(4).run(whom)):
        row, column = divmod(rank, 2)
        over, neighbors = [column, column + 2], [2 * row, 2 * row + 1]
        assert result == [[over, None, neighbors], [over, neighbors], True, True, True, column, row]
