"""The typical time of a step: the median where ranks step together, means between meetings where they step by themselves."""

from __future__ import annotations

import pytest

from drumline.runtime.training.measured_steps import MeasuredSteps


def times(seconds: list[float], every: int, ignored: int) -> MeasuredSteps:
    result = MeasuredSteps(ignored)
    for i, value in enumerate(seconds):
        result.add(value, met=(i + 1) % every == 0)
    return result


@pytest.mark.parametrize(
    ("seconds", "every", "ignored", "expected"),
    [
        ([9, 9, 9, 1, 2, 6], 1, 2, 2),  # the median of the steps after the profiled one
        ([9, 9, 9], 1, 2, 9),
        ([9, 9, 9, 9, 1, 1, 1, 5, 1, 1, 1, 9], 4, 2, 2.5),  # 2 and 3 seconds a step
        ([9, 9, 9, 3, 1], 4, 2, 2),  # no complete interval counts
    ],
)
def test_typical_step(seconds: list[float], every: int, ignored: int, expected: float) -> None:
    result = times(seconds, every, ignored)
    assert result.typical == expected and len(result.counted) == max(0, len(seconds) - ignored - 1)
