"""The process groups of this world, each made once.

A group has threads and connections of its own, which last as long as the world. Engines that follow each other in one
process ask for the same ranks again, so they get the same group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_MADE: dict[Any, Any] = {}
_WORLD: list[dist.ProcessGroup] = []
"""The world that they are of."""


def group_of(members: Sequence[int], *, use: str = "") -> dist.ProcessGroup | None:
    """The group of some ranks; all ranks of the world ask for it together. Groups of another use have other lines."""
    made = _of_this_world()
    if len(members) == dist.get_world_size() and not use:
        return dist.group.WORLD
    key = use, tuple(members)
    if key not in made:
        made[key] = dist.new_group(list(members))
    group: dist.ProcessGroup | None = made[key]
    return group


def group_along(shape: Sequence[int], dim: int, *, use: str = "") -> dist.ProcessGroup | None:
    """The ranks that differ from this one along one axis of all ranks, counted row by row; None where it is alone."""
    return _along(shape, dim, use) if shape[dim] > 1 else None


def mesh_of(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks as a mesh over these groups, on devices of a kind."""
    made = _of_this_world()
    key = kind, shape, names
    if key not in made:
        if len(shape) == 1:  # torch knows whether the world's own group will do for these devices
            made[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
        else:
            groups = [_along(shape, dim) for dim in range(len(shape))]
            ranks = torch.arange(math.prod(shape)).view(shape)
            made[key] = DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)
    mesh: DeviceMesh = made[key]
    return mesh


def _along(shape: Sequence[int], dim: int, use: str = "") -> dist.ProcessGroup:
    """This rank's group along an axis. All of them are made: making one takes the whole world."""
    rows = torch.arange(math.prod(shape)).view(*shape).movedim(dim, -1).reshape(-1, shape[dim]).tolist()
    found = [group for row in rows if (group := group_of(row, use=use)) and dist.get_rank() in row]
    return found[0]


def _of_this_world() -> dict[Any, Any]:
    """What was made in this world. Groups end with their world, which may be followed by another one."""
    world = dist.group.WORLD
    assert world is not None
    if not _WORLD or _WORLD[0] is not world:
        _MADE.clear()
        _WORLD[:] = [world]
    return _MADE
