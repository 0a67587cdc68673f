"""Theory of waiting: order statistics of step times, shared ports, closed queues."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from drumline.clusters.step_times import lognormal
from drumline.core.errors import InputError
from drumline.theory.closed_queue import cycle_seconds
from drumline.theory.order_statistics import (
    expected_largest,
    expected_order_statistic,
    largest_quantiles,
    typical_arrivals,
)
from drumline.theory.shared_port import shared_port_ends


def sampled(means: list[float], cv: float, m: int, steps: int = 1, count: int = 20_000) -> float:
    chance, (mu, sigma) = random.Random(0), lognormal(cv)

    def one(mean: float) -> float:
        return mean * statistics.fmean(math.exp(chance.gauss(mu, sigma)) for _ in range(steps))

    return statistics.fmean(sorted(map(one, means))[m - 1] for _ in range(count))


@pytest.mark.parametrize(
    ("means", "cv", "m"),
    [([1.0] * 4, 0.1, 4), ([1.0] * 8, 0.5, 8), ([1.0] * 8, 0.3, 6), ([1.0, 1.0, 1.0, 4.0], 0.3, 3), ([1, 1.2], 1, 2)],
)
def test_order_statistics_match_samples(means: list[float], cv: float, m: int) -> None:
    assert expected_order_statistic(means, cv, m) == pytest.approx(sampled(means, cv, m), rel=0.02)


def test_the_mean_of_several_steps_varies_less() -> None:
    assert expected_largest([1.0] * 8, 0.3, steps=8) == pytest.approx(sampled([1.0] * 8, 0.3, 8, 8, 3000), rel=0.02)


def test_without_variation_the_slowest_decides() -> None:
    assert expected_largest([1.0, 3.0, 2.0], 0.0) == 3.0
    assert expected_order_statistic([1.0, 3.0, 2.0], 0.0, 2) == 2.0
    assert expected_largest([2.0], 0.7) == pytest.approx(2.0)
    # of 1,000 ranks: the closed form of a normal distribution is near for small variation
    assert expected_largest([1.0] * 1000, 0.01) == pytest.approx(1 + 0.01 * 3.2414, rel=2e-3)


def test_quantiles_of_the_largest_have_its_mean() -> None:
    for means, cv in (((1.0,) * 8, 0.1), ((1.0, 1.0, 1.5), 0.3), ((1.0,) * 1000, 0.2)):
        quantiles = largest_quantiles(means, cv, 64)
        assert list(quantiles) == sorted(quantiles)
        assert sum(quantiles) / 64 == pytest.approx(expected_largest(means, cv), rel=0.01)
    assert largest_quantiles((1.0, 2.0), 0.0, 3) == (2.0, 2.0, 2.0)


def test_typical_arrivals_spread_around_the_means() -> None:
    even = typical_arrivals((1.0,) * 5, 0.2)
    assert list(even) == sorted(even) and statistics.fmean(even) == pytest.approx(1.0, rel=0.02)
    assert typical_arrivals((4.0, 1.0, 1.0), 0.0) == (1.0, 1.0, 4.0)
    mixed = typical_arrivals((1.0, 1.0, 1.0, 4.0), 0.05)
    assert mixed[2] < 1.2 and mixed[3] == pytest.approx(4.0, rel=0.1)


def test_bad_order_statistics_are_refused() -> None:
    for means, cv, m in (([1.0], 0.1, 2), ([0.0], 0.1, 1), ([1.0], -1, 1)):
        with pytest.raises(InputError):
            expected_order_statistic(means, cv, m)


def test_messages_share_a_port_equally() -> None:
    assert shared_port_ends([0, 0, 0, 0], 1.0) == [4.0] * 4
    assert shared_port_ends([0, 0.5], 1.0) == [1.5, 2.0]
    assert shared_port_ends([0, 10], 1.0) == [1.0, 11.0]
    assert shared_port_ends([0, 0, 0], 1.0, own=5.0) == [5.0] * 3, "the senders are slower than the port"
    assert shared_port_ends([0, 1], 0.0, own=2.0) == [2.0, 3.0]


def test_a_single_worker_never_waits() -> None:
    assert cycle_seconds([1], [3.0], [1.0, 0.5]) == pytest.approx([4.5])


def test_busy_stations_bound_the_rate() -> None:
    (cycle,) = cycle_seconds([16], [1.0], [1.0, 0.1])
    assert 16 / cycle == pytest.approx(1.0, rel=0.01), "one task per second of the slowest station"
    fast, slow = cycle_seconds([3, 1], [1.0, 4.0], [0.001])
    assert fast == pytest.approx(1.001, rel=1e-3) and slow == pytest.approx(4.001, rel=1e-3)
