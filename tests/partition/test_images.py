"""Image models on tiles and by channels: loss, gradients and buffers equal those of the whole image on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from image_functions import (
    SAMPLES,
    STEPS,
    Result,
    on_channels,
    on_tiles,
    on_tiles_and_channels,
    overlapped,
)
from image_nets import MODELS, PIXELS
from image_statistics import with_a_stand_in, with_samples_too
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


QUICK = {
    ((2, 1), "vgg"),
    ((2, 1), "convnet"),
    ((1, 2), "separable"),
    ((3, 1), "unet"),
    ((2, 2), "segments"),
    ((2, 2), "resnet"),
}
GRID = [
    pytest.param(
        tiles, name, marks=() if (tiles, name) in QUICK else pytest.mark.slow, id=f"{name}-{tiles[0]}x{tiles[1]}"
    )
    for tiles in ((2, 1), (3, 1), (1, 2), (2, 2))
    for name in MODELS
]


@pytest.mark.parametrize(("tiles", "name"), GRID)
def test_tiles_match_the_whole_image(world: Worlds, tiles: tuple[int, int], name: str) -> None:
    cases = [(name, UNEVEN), (name, NARROW)]
    for rank, results in enumerate(world(tiles[0] * tiles[1]).run(on_tiles, cases, tiles)):
        for (_, size), result in zip(cases, results, strict=True):
            check(result.worst, f"{name} of {size} on rank {rank} of {tiles}")
            assert not result.gathered, f"{name}: {result.gathered}"
            if name in PIXELS:
                assert not result.moves, f"{name}: whole tensors in {result.moves}"


def test_a_rank_may_run_out_of_rows(world: Worlds) -> None:
    cases = [("resnet", (9, 33)), ("vgg", (9, 16)), ("unet", (8, 8))]
    ranks = world(3).run(on_tiles, cases, (3, 1))
    assert all(sum(results[i].hollow for results in ranks) for i in range(len(cases))), "some rank has no rows"
    for rank, results in enumerate(ranks):
        for (name, size), result in zip(cases, results, strict=True):
            check(result.worst, f"{name} of {size} on rank {rank}")


def test_only_the_halo_is_sent(world: Worlds) -> None:
    results = world(2).run(on_tiles, [("convnet", (32, 24))], (2, 1))
    # 5 x 5 over 3 channels: both send two rows. The pool of stride 2: one row of 8 channels goes down. 3 x 3 without
    # padding over 8 channels of half the width: both send one row.
    there = [2 * 3 * 24 + 1 * 8 * 24 + 1 * 8 * 12, 2 * 3 * 24 + 1 * 8 * 12]
    # The gradients of the rows that came go back; nobody wants those of the image.
    back = [1 * 8 * 12, 1 * 8 * 24 + 1 * 8 * 12]
    for rank, (result,) in enumerate(results):
        assert _bytes(result, "halo") == STEPS * SAMPLES * 8 * there[rank]
        assert _bytes(result, "halo back") == STEPS * SAMPLES * 8 * back[rank]


def test_windows_send_the_bytes_of_the_formula(world: Worlds) -> None:
    for (result,) in world(4).run(on_tiles, [("unet", UNEVEN)], (2, 2)):
        assert _bytes(result, "halo") == STEPS * result.expected > 0


def _bytes(result: Result, message: str) -> int:
    return sum(b for _, m, b in result.recorded if m == message)


def test_channels_match_one_device(world: Worlds) -> None:
    cases = [(name, NARROW) for name in MODELS]
    for rank, results in enumerate(world(2).run(on_channels, cases)):
        for (name, _), (result, _) in zip(cases, results, strict=True):
            check(result.worst, f"{name} on rank {rank}")
            assert not result.gathered, f"{name}: {result.gathered}"


def test_norms_between_two_convolutions_are_split(world: Worlds) -> None:
    (_, parts), (separable, more) = world(2).run(on_channels, [("resnet", NARROW), ("separable", NARROW)])[0]
    assert {"blocks.0.conv1.weight", "blocks.0.bn1.weight", "blocks.0.bn1.bias", "blocks.0.conv2.weight"} <= set(parts)
    assert {"0.weight", "1.weight", "3.weight", "3.bias", "4.weight", "6.weight"} <= set(more), "also depthwise ones"
    assert not separable.moves


def test_tiles_and_channels_together(world: Worlds) -> None:
    for name in ("unet", "resnet"):
        for rank, result in enumerate(world(4).run(on_tiles_and_channels, name, NARROW)):
            check(result.worst, f"{name} on rank {rank}")
            assert not result.gathered


def test_the_interior_is_computed_during_the_exchange(world: Worlds) -> None:
    plain: list[list[Result]] = world(2).run(on_tiles, [("unet", UNEVEN)], (2, 1))
    for rank, (result, joined) in enumerate(world(2).run(overlapped, "unet", UNEVEN)):
        check(result.worst, f"rank {rank}")
        assert joined >= 8
        halo = sorted(b for _, message, b in result.recorded if message.startswith("halo"))
        assert halo == sorted(b for _, message, b in plain[rank][0].recorded if message.startswith("halo"))


def test_statistics_span_samples_and_tiles(world: Worlds) -> None:
    for name, norms in (("resnet", 8), ("convnet", 2)):
        for rank, (worst, spanned) in enumerate(world(4).run(with_samples_too, name, NARROW)):
            check(worst, f"{name} on rank {rank}")
            assert spanned == norms


def test_a_stand_in_sample_does_not_count(world: Worlds) -> None:
    for rank, worst in enumerate(world(2).run(with_a_stand_in, NARROW)):
        check(worst, f"rank {rank}")
