"""The order in which shapes are measured where time may not suffice for all."""

from __future__ import annotations

import dataclasses
import itertools
import math

from drumline.measure.clock import Timing
from drumline.measure.gpu import recurrent_together
from drumline.measure.shapes import Spot, both, spread_out

SHAPES = list(itertools.product((48, 192, 512), (128, 196, 512, 1024, 4096), (64, 128)))


def farthest(chosen: list[tuple[int, ...]]) -> float:
    """How far a shape may be from the nearest that was chosen, in logarithms."""
    return max(min(math.dist(map(math.log, s), map(math.log, c)) for c in chosen) for s in SHAPES)


def test_every_beginning_covers_all() -> None:
    order = spread_out(SHAPES)
    assert sorted(order) == sorted(SHAPES)
    assert order == spread_out(SHAPES)
    assert order[0] == (192, 512, 64) or order[0] == (192, 512, 128)
    assert farthest(order[:8]) < 0.6 * farthest(SHAPES[:8])


def test_a_shape_that_was_timed_in_two_places_is_told_once() -> None:
    one, other = Timing(1.0, 0.1), Timing(4.0, 0.2)
    spots = [Spot("recurrent", (8.0,), one), Spot("conv", (8.0,), one), Spot("recurrent", (8.0,), other)]
    assert both(spots) == [Spot("recurrent", (8.0,), Timing(2.0, 0.2)), Spot("conv", (8.0,), one)]


def test_recurrent_layers_of_types_that_run_alike_are_told_once() -> None:
    spot = Spot("recurrent", (8.0,), Timing(1.0, 0.1))
    other, conv = dataclasses.replace(spot, timing=Timing(4.0, 0.2)), dataclasses.replace(spot, kernel="conv")
    spots = {"fp32": [conv, spot], "tf32": [conv, other], "bf16": [spot], "fp16": []}
    together = dataclasses.replace(spot, timing=Timing(2.0, 0.2))
    assert recurrent_together(spots) == {"fp32": [conv, together], "tf32": [conv], "bf16": [spot], "fp16": []}
