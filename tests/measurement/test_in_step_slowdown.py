"""Small steps relative to their kernels alone: overhead per operator, and slowdown factors."""

from __future__ import annotations

import itertools
import time

import pytest

from drumline.clusters import DeviceSpec
from drumline.measurement import in_step_slowdown
from drumline.measurement.in_step_slowdown import CONV, LIGHT, PHASES, SmallSteps, _Priced

ALONE = DeviceSpec("d", "cpu", 1e9, 1e10, {"fp32": 1e11}, 1e-6)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> SmallSteps:
    """Steps that are not really run."""
    monkeypatch.setattr(in_step_slowdown._Step, "_once", lambda step, now: (1.0, 1.0, 1.0))
    return SmallSteps(1.0)


def _set_times(steps: SmallSteps, each: dict[str, float], factor: float, update: float, tensor: float) -> None:
    """As if each operator had an overhead, and kernels were slower by a factor, convolutions by twice that."""
    for kind, small in steps._steps.items():
        for step in small:
            step.times[:] = [(1.0, 1.0, 1.0)]
            priced = _Priced(step, ALONE)
            slower = 1.0 if kind == LIGHT else 2 * factor if kind == CONV else factor
            took = [slower * k + n * each[w] for k, n, w in zip(priced.kernels, priced.operators, PHASES, strict=True)]
            step.times[:] = [(*took, update * priced.moved + priced.profile.tensors * tensor)] * 3


def test_overhead_is_separated_from_slowdown(steps: SmallSteps) -> None:
    _set_times(steps, {"forward": 4e-5, "backward": 2e-5}, 1.25, 1.5, 1e-5)
    overhead = steps.compare(ALONE)
    assert overhead.host_overhead == pytest.approx(
        {"update": 1e-5, "operator_forward": 4e-5, "operator_backward": 2e-5}
    )
    factors = {"compute_forward": 1.25, "compute_backward": 1.25, "conv_forward": 2.5, "conv_backward": 2.5}
    assert overhead.slowdown == pytest.approx({**factors, "update": 1.5})


def test_results_have_lower_bounds(steps: SmallSteps) -> None:
    _set_times(steps, {"forward": 0.0, "backward": 0.0}, 0.01, 0.1, 0.0)
    (light,) = steps._steps[LIGHT]
    light.times[:] = [(forward / 2, backward, update / 2) for forward, backward, update in light.times]
    overhead = steps.compare(ALONE)
    assert all(seconds >= 0 for seconds in overhead.host_overhead.values()) and overhead.slowdown["update"] == 1.0
    assert all(factor >= in_step_slowdown.MIN_SLOWDOWN for factor in overhead.slowdown.values())


def test_steps_are_taken_twice_and_the_second_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count(1)
    monkeypatch.setattr(in_step_slowdown._Step, "_once", lambda step, now: (float(next(calls)),) * 3)
    steps = SmallSteps(1.0)
    many = len(steps._all())
    assert next(calls) == 2 * many + 1 and not any(step.times for step in steps._all())
    steps.take()
    assert [step.times for step in steps._all()] == [[(2.0 * many + 1 + 2 * i + 2,) * 3] for i in range(many)]


def test_steps_run() -> None:
    steps = SmallSteps(1.0)
    assert all(seconds > 0 for step in steps._all() for seconds in step(time.perf_counter))
