"""Alpha-beta fits and timing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.clusters import LogPTimes
from drumline.measurement.links import alpha_beta, logp_times
from drumline.measurement.timing import time_action


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


def test_the_latency_is_what_both_overheads_leave() -> None:
    points = [(8.0, 10e-6), (4096.0, 12e-6)]
    assert logp_times(points, 2e-6, 3e-6) == LogPTimes(L=pytest.approx(6e-6), o=2e-6, g=3e-6)
    slow = logp_times(points, 8e-6, 3e-6)  # the call took longer than half of the way: nothing is left
    assert slow.L == 0 and slow.o == 5e-6


def test_timing_repeats_and_reports_the_spread() -> None:
    calls = []
    timing = time_action(lambda: calls.append(1), budget=0.01)
    assert len(calls) > 8 and timing.seconds > 0 and timing.spread >= 0


def test_cost_beyond_messages() -> None:
    from drumline.clusters import CollectiveTable
    from drumline.measurement.machine import _beyond_messages
    from drumline.measurement.synchronisation import SynchronisationCost

    tables = tuple(
        CollectiveTable(name, "gloo", 2, (8.0, 1e6), (1e-3, 1e-3))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    )
    cost = SynchronisationCost(
        independent=0.010, replicated=0.013, mid_step_message=0.001, sharded_unit=0.005, blocks=3, block_bytes=1e5
    )
    slowdown, unit = _beyond_messages(cost, tables)
    assert slowdown == pytest.approx(1.2) and unit == pytest.approx(0.002)
    assert _beyond_messages(cost, ()) == (1.0, 0.0)
    fast = SynchronisationCost(
        independent=0.010, replicated=0.005, mid_step_message=0.001, sharded_unit=0.0, blocks=3, block_bytes=1e5
    )
    assert _beyond_messages(fast, tables) == (1.0, 0.0)
