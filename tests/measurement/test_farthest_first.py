"""The order in which shapes are measured if time may run out."""

from __future__ import annotations

import itertools
import math

from drumline.measurement.gpu_shapes import farthest_first

SHAPES = list(itertools.product((48, 192, 512), (128, 196, 512, 1024, 4096), (64, 128)))


def farthest(chosen: list[tuple[int, ...]]) -> float:
    """Largest distance of a shape from the nearest chosen one, in logarithms."""
    return max(min(math.dist(map(math.log, s), map(math.log, c)) for c in chosen) for s in SHAPES)


def test_prefixes_cover_the_range() -> None:
    order = farthest_first(SHAPES)
    assert sorted(order) == sorted(SHAPES)
    assert order == farthest_first(SHAPES)
    assert order[0] == (192, 512, 64) or order[0] == (192, 512, 128)
    assert farthest(order[:8]) < 0.6 * farthest(SHAPES[:8])
