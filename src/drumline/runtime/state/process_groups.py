"""Process groups, each created once in a world.

A group has threads and connections of its own, which last as long as the world. Later engines of a process need groups
of the same ranks again, and get the same groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")

_CACHE: dict[Any, Any] = {}
_WORLD: list[dist.ProcessGroup] = []
"""The world of these groups."""


def process_group(members: Sequence[int], *, use: str = "") -> dist.ProcessGroup | None:
    """The group of some ranks; all ranks of the world call this together. Each `use` has channels of its own."""
    cache = _cache()
    if len(members) == dist.get_world_size() and not use:
        return dist.group.WORLD
    key = use, tuple(members)
    if key not in cache:
        cache[key] = dist.new_group(list(members))
    group: dist.ProcessGroup | None = cache[key]
    return group


def group_along(shape: Sequence[int], dim: int, *, use: str = "") -> dist.ProcessGroup | None:
    """The group of ranks that differ from this one along one dim of all ranks in `shape`; None if it is alone."""
    return _along(shape, dim, use) if shape[dim] > 1 else None


def mesh_of(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks as a mesh over these groups, on one kind of device."""
    cache = _cache()
    key = kind, shape, names
    if key not in cache:
        if len(shape) == 1:  # torch decides whether the world's own group supports these devices
            cache[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
        else:
            groups = [_along(shape, dim) for dim in range(len(shape))]
            ranks = torch.arange(math.prod(shape)).view(shape)
            cache[key] = DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)
    mesh: DeviceMesh = cache[key]
    return mesh


def rows_along(shape: Sequence[int], dim: int) -> list[list[int]]:
    """The ranks of every group along one dim of all ranks in `shape`."""
    ranks = torch.arange(math.prod(shape)).view(*shape)
    rows: list[list[int]] = ranks.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
    return rows


def cached(key: Any, make: Callable[[], T]) -> T:
    """The value that `make` returned for this key in the current world."""
    cache = _cache()
    if key not in cache:
        cache[key] = make()
    value: T = cache[key]
    return value


def _along(shape: Sequence[int], dim: int, use: str = "") -> dist.ProcessGroup:
    """This rank's group along an axis. All of them are created: creating one takes the whole world."""
    rows = rows_along(shape, dim)
    mine = [group for row in rows if (group := process_group(row, use=use)) and dist.get_rank() in row]
    return mine[0]


def _cache() -> dict[Any, Any]:
    """The groups of the current world. Groups end with their world, and another may follow."""
    world = dist.group.WORLD
    assert world is not None
    if not _WORLD or _WORLD[0] is not world:
        _CACHE.clear()
        _WORLD[:] = [world]
    return _CACHE
