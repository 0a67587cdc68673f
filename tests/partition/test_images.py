"""Image models on tiles and by channels: the loss, every gradient and every buffer of the whole image on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from image_functions import (
    SAMPLES,
    Result,
    on_channels,
    on_tiles,
    on_tiles_and_channels,
    overlapped,
    with_a_stand_in,
    with_samples_too,
)
from image_nets import MODELS, PIXELS
from world import World

Worlds = Callable[[int], World]
UNEVEN = (37, 29)
NARROW = (21, 18)
"""The last maps of the deep models have three rows or fewer."""


def check(worst: dict[str, float], what: str) -> None:
    """In float64, over two steps."""
    limits = {"loss": 1e-12, "gradients": 1e-10, "buffers": 1e-12}
    wrong = {k: v for k, v in worst.items() if not v <= limits[k]}
    assert not wrong, f"{what}: {wrong}"


@pytest.mark.parametrize("tiles", [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_tiles_give_what_the_whole_image_gives(world: Worlds, tiles: tuple[int, int]) -> None:
    cases = [(name, UNEVEN if i % 2 == 0 or tiles == (2, 2) else NARROW) for i, name in enumerate(MODELS)]
    for rank, results in enumerate(world(tiles[0] * tiles[1]).run(on_tiles, cases, tiles)):
        for (name, size), result in zip(cases, results, strict=True):
            check(result.worst, f"{name} of {size} on rank {rank} of {tiles}")
            assert not result.gathered, f"{name}: {result.gathered}"
            if name in PIXELS:
                assert not result.moves, f"{name}: whole tensors in {result.moves}"


def test_a_rank_may_run_out_of_rows(world: Worlds) -> None:
    cases = [("resnet", (17, 33)), ("vgg", (9, 16)), ("unet", (8, 8))]
    for rank, results in enumerate(world(3).run(on_tiles, cases, (3, 1))):
        for (name, size), result in zip(cases, results, strict=True):
            check(result.worst, f"{name} of {size} on rank {rank}")


def test_only_the_halo_travels(world: Worlds) -> None:
    for result in world(2).run(on_tiles, [("convnet", (32, 24))], (2, 1)):
        sent = [b for _, message, b in result[0].heard if message == "halo"]
        back = [b for _, message, b in result[0].heard if message == "halo back"]
        assert sum(sent) + sum(back) == 2 * 2 * 8 * SAMPLES * _rows_and_backward(24), "two steps, there and back"


def _rows_and_backward(width: int) -> int:
    """Numbers per sample that cross the cut of `convnet`, both ways halved: derived below for each rank together."""
    raise NotImplementedError(width)


@pytest.mark.parametrize("n", [2])
def test_channels_give_what_one_device_gives(world: Worlds, n: int) -> None:
    cases = [(name, NARROW) for name in MODELS]
    ranks = world(n).run(on_channels, cases)
    for rank, results in enumerate(ranks):
        for (name, _), (result, _) in zip(cases, results, strict=True):
            check(result.worst, f"{name} on rank {rank}")
            assert not result.gathered, f"{name}: {result.gathered}"


def test_norms_between_two_convolutions_are_held_in_parts(world: Worlds) -> None:
    (resnet, parts), (separable, more) = world(2).run(on_channels, [("resnet", NARROW), ("separable", NARROW)])[0]
    assert {"blocks.0.conv1.weight", "blocks.0.bn1.weight", "blocks.0.bn1.bias", "blocks.0.conv2.weight"} <= set(parts)
    assert {"0.weight", "1.weight", "3.weight", "3.bias", "4.weight", "6.weight"} <= set(more), "also depthwise ones"
    assert not separable.moves


def test_tiles_and_channels_together(world: Worlds) -> None:
    for name in ("unet", "resnet"):
        for rank, result in enumerate(world(4).run(on_tiles_and_channels, name, NARROW)):
            check(result.worst, f"{name} on rank {rank}")
            assert not result.gathered


def test_the_interior_is_computed_while_the_halo_travels(world: Worlds) -> None:
    plain: list[list[Result]] = world(2).run(on_tiles, [("unet", UNEVEN)], (2, 1))
    for rank, (result, joined) in enumerate(world(2).run(overlapped, "unet", UNEVEN)):
        check(result.worst, f"rank {rank}")
        assert joined >= 8
        halo = sorted(b for _, message, b in result.heard if message.startswith("halo"))
        assert halo == sorted(b for _, message, b in plain[rank][0].heard if message.startswith("halo"))


def test_statistics_span_samples_and_tiles(world: Worlds) -> None:
    for name, norms in (("resnet", 7), ("convnet", 2)):
        for rank, (worst, spanned) in enumerate(world(4).run(with_samples_too, name, NARROW)):
            check(worst, f"{name} on rank {rank}")
            assert spanned == norms


def test_a_stand_in_counts_nothing(world: Worlds) -> None:
    for rank, worst in enumerate(world(2).run(with_a_stand_in, NARROW)):
        check(worst, f"rank {rank}")
