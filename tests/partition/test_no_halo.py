"""Tiles without halos: only sums are sent, and each tile is computed as a separate image."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import separate_tiles
import torch
from world import World

from drumline.partition.sharding.halo_exchange import rebalance, start_exchange, window
from drumline.partition.sharding.redistribution import Axis
from drumline.partition.spatial import avg_pool, conv, max_pool, resize

Worlds = Callable[[int], World]


@pytest.mark.parametrize("tiles", [(2, 1), (1, 2), (2, 2)])
def test_each_tile_is_a_separate_image(world: Worlds, tiles: tuple[int, int]) -> None:
    for rank, result in enumerate(world(tiles[0] * tiles[1]).run(separate_tiles.without_halo, tiles, (16, 24))):
        limits = {"loss": 1e-12, "gradients": 1e-10, "buffers": 1e-12}
        assert all(result.worst[k] <= limit for k, limit in limits.items()), (rank, result.worst)
        assert result.recorded and not [m for _, m, _ in result.recorded if m.startswith("halo")]


def test_with_halos_tiles_are_not_separate_images(world: Worlds) -> None:
    """Control: the test above detects a halo."""
    result = world(2).run(_with_halo)[0]
    assert result.worst["loss"] > 1e-6
    assert [m for _, m, _ in result.recorded if m.startswith("halo")]


def _with_halo() -> separate_tiles.Result:
    return separate_tiles.without_halo((2, 1), (16, 24), halo=True)


def test_a_window_without_a_halo() -> None:
    """One rank of three: it has rows 3 to 5 and sends nothing."""
    axis = Axis("rows", 3, 1, halo=False)
    x = torch.arange(3.0, 6.0).requires_grad_()
    bounds, wanted = (0, 3, 6, 9), ((0, 4), (1, 8), (5, 11))
    assert window(x, 0, bounds, wanted, axis, -1.0).tolist() == [-1, -1, 3, 4, 5, -1, -1]
    halo = start_exchange(x, 0, bounds, tuple((w,) for w in wanted), axis)
    made = halo.rows((2, 5), (5, 7))
    assert made.tolist() == [0, 3, 4, 5, 0]
    made.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1, 1]
    assert rebalance(x, 0, bounds, bounds, axis) is x


@pytest.mark.parametrize("rank", [0, 1])
def test_operators_without_halo(rank: int) -> None:
    """The functions on tensors, next to the rules on graphs."""
    axis, bounds = Axis("rows", 2, rank, halo=False), (0, 8, 16)
    x = torch.randn(2, 4, 8, 6, dtype=torch.float64)
    weight = torch.randn(4, 4, 3, 3, dtype=torch.float64)
    own = torch.nn.functional
    pairs = [
        (conv(x, weight, None, 1, 1, 1, 1, 2, bounds, axis), own.conv2d(x, weight, padding=1)),
        (max_pool(x, (3, 3), 2, 1, 1, False, 2, bounds, axis), own.max_pool2d(x, 3, 2, 1)),
        (avg_pool(x, (3, 3), 2, 1, False, False, None, 2, bounds, axis), own.avg_pool2d(x, 3, 2, 1, False, False)),
        (avg_pool(x, (3, 3), 2, 1, False, True, None, 2, bounds, axis), own.avg_pool2d(x, 3, 2, 1)),
        (
            resize(x, (32, 12), "linear", False, (None, None), 2, bounds, axis),
            own.interpolate(x, (16, 12), mode="bilinear"),
        ),
        (
            resize(x, (24, 12), "linear", False, (None, None), 2, bounds, axis),
            own.interpolate(x, (12, 12), mode="bilinear"),
        ),
        (
            resize(x, (24, 12), "cubic", False, (None, None), 2, bounds, axis),
            own.interpolate(x, (12, 12), mode="bicubic"),
        ),
    ]
    for (made, _), wanted in pairs:
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
