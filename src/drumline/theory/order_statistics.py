"""Expected order statistics of step times: how long the slowest of p ranks takes, or all but the slowest few.

Step times are independent and lognormal with one coefficient of variation c and a mean for each rank. The mean of k
steps of a rank is treated as lognormal with c / sqrt(k).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from ..clusters.step_times import lognormal
from ..core.errors import InputError

_POINTS = 240
"""Intervals of the integral; even. With as many, E of the largest of 1,000 is right to six digits."""
_TAILS = 8.0
"""Standard deviations of log time beyond the means that the integral covers, and more for many ranks."""


def expected_largest(means: Sequence[float], cv: float, *, steps: int = 1) -> float:
    """E[max over ranks of the mean time of `steps` steps]."""
    return expected_order_statistic(means, cv, len(means), steps=steps)


def expected_order_statistic(means: Sequence[float], cv: float, m: int, *, steps: int = 1) -> float:
    """E[the m-th smallest of the ranks' times]: when m of them have arrived."""
    if not 1 <= m <= len(means) or min(means) <= 0 or cv < 0 or steps < 1:
        raise InputError(
            f"the {m}-th of {len(means)} times, variation {cv:g}, {steps} steps",
            rule="1 <= m <= number of times, times > 0, variation >= 0, steps >= 1",
        )
    if not cv:
        return sorted(means)[m - 1]
    return _integral(tuple(sorted(Counter(means).items())), cv / math.sqrt(steps), len(means) - m)


@lru_cache(maxsize=4096)
def _integral(groups: tuple[tuple[float, int], ...], cv: float, late: int) -> float:
    """The integral of P(more than `late` ranks take longer than x) over x, by Simpson's rule in log x."""
    mu, sigma = lognormal(cv)
    normal = NormalDist(mu, sigma)
    low = math.log(groups[0][0]) + mu - _TAILS * sigma
    high = math.log(groups[-1][0]) + mu + (_TAILS + sigma) * sigma
    h = (high - low) / _POINTS
    total = math.exp(low)  # below, more than `late` ranks surely take longer
    for i in range(_POINTS + 1):
        y = low + i * h
        weight = 1 if i in (0, _POINTS) else 4 if i % 2 else 2
        total += weight * h / 3 * math.exp(y) * _exceed(groups, normal, y, late)
    return total


def _exceed(groups: tuple[tuple[float, int], ...], normal: NormalDist, y: float, late: int) -> float:
    """P(more than `late` ranks take longer than e^y)."""
    chances = [(normal.cdf(y - math.log(mean)), count) for mean, count in groups]
    if late == 0:
        return 1.0 - math.prod(p**count for p, count in chances)
    exactly = [1.0] + [0.0] * late  # P(j of the ranks so far take longer)
    for p, count in chances:
        for _ in range(count):
            exactly = [exactly[j] * p + (exactly[j - 1] * (1 - p) if j else 0.0) for j in range(late + 1)]
    return 1.0 - sum(exactly)


@lru_cache(maxsize=4096)
def largest_quantiles(means: tuple[float, ...], cv: float, count: int) -> tuple[float, ...]:
    """The (j - 1/2) / count quantiles of the largest of the ranks' times, the smallest first."""
    if not cv:
        return (max(means),) * count
    mu, sigma = lognormal(cv)
    normal = NormalDist(mu, sigma)
    kinds = [(math.log(mean), ranks) for mean, ranks in Counter(means).items()]
    low = max(kinds)[0] + mu - _TAILS * sigma
    high = max(kinds)[0] + mu + (_TAILS + sigma) * sigma

    def quantile(q: float) -> float:
        a, b = low, high
        for _ in range(40):
            middle = (a + b) / 2
            a, b = (middle, b) if math.prod(normal.cdf(middle - x) ** n for x, n in kinds) < q else (a, middle)
        return math.exp((a + b) / 2)

    return tuple(quantile((j + 0.5) / count) for j in range(count))


@lru_cache(maxsize=4096)
def typical_arrivals(means: tuple[float, ...], cv: float) -> tuple[float, ...]:
    """When the first, the second, ... of the ranks is done: the (j - 1/2) / p quantiles of all their times."""
    if not cv:
        return tuple(sorted(means))
    mu, sigma = lognormal(cv)
    normal = NormalDist(mu, sigma)
    p = len(means)
    if len(set(means)) == 1:
        return tuple(means[0] * math.exp(normal.inv_cdf((j + 0.5) / p)) for j in range(p))
    groups = sorted(Counter(means).items())

    def quantile(q: float) -> float:
        low, high = math.log(groups[0][0]) + mu - _TAILS * sigma, math.log(groups[-1][0]) + mu + _TAILS * sigma
        for _ in range(40):
            middle = (low + high) / 2
            share = sum(n * normal.cdf(middle - math.log(mean)) for mean, n in groups) / p
            low, high = (middle, high) if share < q else (low, middle)
        return math.exp((low + high) / 2)

    return tuple(quantile((j + 0.5) / p) for j in range(p))
