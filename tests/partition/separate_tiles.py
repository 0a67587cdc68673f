"""Rank functions of the tests without halos: a model on tiles against the same model on each tile as an image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from image_functions import Result, axes_of, compared, program_of, run_model
from torch import nn

from drumline.partition.capture import capture
from drumline.partition.partial_gradients import leave_partial_gradients
from drumline.partition.sharding.layout import Split, even_bounds
from drumline.partition.sharding_pass import ShardingPass
from drumline.partition.spatial.conv import overlap_halos
from drumline.tracing.fake import fake_mode

CLASSES = 4


class Everything(nn.Module):
    """All operators that read neighbouring rows, with a class per pixel: strides, dilation, pools, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 5, padding=2), nn.BatchNorm2d(8)
        self.down, self.wide = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.up, self.deep = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(self.norm(self.stem(x)))
        low = self.wide(torch.tanh(self.down(seen)))
        low = low + F.max_pool2d(low, 3, 1, 1) + F.avg_pool2d(low, 3, 1, 1, count_include_pad=False)
        low = self.up(low) + F.interpolate(self.deep(low), scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(torch.cat([seen, low], 1))  # type: ignore[no-any-return]  # a tensor


def _tiles(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Every tile of every image as an image of its own; the last two dims are cut."""
    bands = [tile for band in x.chunk(rows, -2) for tile in band.chunk(columns, -1)]
    return torch.cat(bands)


class TileByTile(nn.Module):
    """The model on each tile of its images separately."""

    def __init__(self, model: nn.Module, tiles: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.tiles = model, tiles

    def forward(self, x: torch.Tensor) -> Any:
        made = self.model(_tiles(x, *self.tiles))
        rows, columns = self.tiles
        bands = [torch.cat(made.chunk(rows * columns)[r * columns : (r + 1) * columns], -1) for r in range(rows)]
        return torch.cat(bands, -2)


def without_halo(tiles: tuple[int, int], size: tuple[int, int], *, halo: bool = False) -> Result:
    """On every rank: two steps on tiles without halos, against the model on each tile separately."""
    recorded: list[tuple[str, str, int]] = []
    axes = [(replace(axis, halo=halo), dim) for axis, dim in axes_of(tiles, recorded)]
    by_name = {axis.name: axis for axis, _ in axes}
    torch.manual_seed(0)
    model = Everything().double().train()
    g = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(3, 3, *size, generator=g, dtype=torch.float64),
        torch.randint(0, CLASSES, (3, *size), generator=g),
    ]
    mode = fake_mode()
    template = Everything().double().train()
    captured = capture(template, run_model, [mode.from_tensor(t) for t in leaves], mode)
    graph = captured.graph
    for axis, dim in axes:
        image, target = (n for n in graph.nodes if n.op == "placeholder" and n.meta["role"] == "batch")
        cuts = (even_bounds(size[dim - 2], axis.size),)
        graph = ShardingPass(
            graph, axis, captured.mode, {image.name: Split(dim, cuts), target.name: Split(dim - 1, cuts)}
        ).run()
        leave_partial_gradients(graph, axis)
    overlap_halos(graph)
    program, root = program_of(graph, captured, model, by_name)
    recorded.clear()
    apart = _Renamed(model, tiles)
    result = compared(program, root, apart, leaves, by_name, [axis for axis, _ in axes])
    result.recorded = list(recorded)
    assert dist.get_world_size() == tiles[0] * tiles[1]
    return result


class _Renamed(TileByTile):
    """The same with the model's own names."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_buffers(*args, **kwargs)
