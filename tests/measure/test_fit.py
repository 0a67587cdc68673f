"""Fits and clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.measure.clock import clock
from drumline.measure.fit import alpha_beta


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_exact_points_are_fitted(alpha: float, beta: float) -> None:
    points = [(m, alpha + beta * m) for m in (8.0, 4096.0, 65536.0, 2.0**20, 2.0**24)]
    a, b, error = alpha_beta(points)
    assert error < 1e-3
    for m, t in points:
        assert a + b * m == pytest.approx(t, rel=1e-2)


def test_noise_never_gives_a_negative_time() -> None:
    alpha, beta, error = alpha_beta([(8.0, 3e-4), (4096.0, 1e-4), (65536.0, 1e-4)])
    assert alpha >= 0 and beta > 0 and error > 0.1


def test_clock_repeats_and_tells_the_spread() -> None:
    calls = []
    timing = clock(lambda: calls.append(1), budget=0.01)
    assert len(calls) > 8 and timing.seconds > 0 and timing.spread >= 0
