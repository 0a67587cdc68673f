"""Measurement of a CPU rank: operators by name, bounded shapes, clocks of ranks that share cores, speed probes."""

from __future__ import annotations

import functools
import itertools
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drumline.clusters import DeviceSpec, KernelCurve
from drumline.core.job import Job
from drumline.costs.shape_interpolation import kernel_work
from drumline.measurement import cpu_kernels, cpu_shapes
from drumline.measurement.cgroup import oversubscription
from drumline.measurement.cpu_clock import LEAST, MAX_ATTEMPTS, CpuClock, rank_clock
from drumline.measurement.resume_journal import ResumeJournal
from drumline.measurement.speed_probe import (
    FLUCTUATION,
    PERSISTENCE_AROUND,
    PERSISTENCE_BEFORE,
    PROBE_CURVES,
    PROBE_SIZES,
    PROBES_PER_ROUND,
    SpeedProbe,
    SpeedTracker,
    current_speed,
    expected_speed,
    probe_rounds,
    speed_during_run,
)
from drumline.measurement.timing import RateLimited
from drumline.tracing import trace

CPU = torch.device("cpu")


def test_ranks_that_share_a_core_are_timed_by_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a core does not count; CPU time is multiplied by the threads per core."""
    given = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: 0.001 * next(given))  # one millisecond for every action

    def wait() -> None:
        time.sleep(0.002)

    assert CpuClock(1.0)(wait).seconds > 0.0019
    assert CpuClock(4.0)(wait).seconds == pytest.approx(0.004)
    assert rank_clock(4.0)() < rank_clock(1.0)()


def test_oversubscription_is_threads_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert [oversubscription(n, 1) for n in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
    assert oversubscription(1, 2) == 1.0


def test_rate_limited_calls_and_their_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per second over nine seconds; then up to the minimum number of calls."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    taken: list[float] = []
    limited = RateLimited(lambda: taken.append(now), 1.0)
    for i in range(1, 37):
        now = i / 4
        limited()
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    limited.ensure_calls(7)
    assert len(taken) == 9
    limited.ensure_calls(11)
    assert taken[9:] == [9.0, 9.0]


def test_operators_have_points_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "SIZES", (2**10, 2**13))
    monkeypatch.setattr(cpu_kernels, "UNCACHED_VALUES", 2**12)
    monkeypatch.setattr("drumline.measurement.cpu_clock.BUDGET", 0.0)
    points = cpu_kernels.measure_cpu_elementwise(CpuClock(), ResumeJournal(None, CPU), lambda: None)
    names = {p.kernel for p in points}
    assert {
        "add",
        "pointwise",
        "bernoulli_",
        "gelu_backward",
        "native_group_norm",
        "pool_backward",
        "new_pages",
    } <= names
    assert {"transpose", "strided", "update", "gather_backward", "upsample_bilinear2d_backward"} <= names
    assert "clone" in names  # the plain one; copies that reorder dims go by their kind
    assert all(p.size > 0 and p.timing.seconds > 0 for p in points)


def test_bytes_are_counted_as_in_a_trace() -> None:
    job = Job(
        model=lambda: nn.Sequential(nn.GELU(), nn.Linear(8, 8)),
        loss=lambda y, t: (y - t).square().mean(),
        optimizer=torch.optim.SGD,
        data=lambda: [(torch.zeros(8), torch.zeros(8))],
        batch_size=16,
    )
    traced = next(op for x in trace(job).layers for op in x.ops if op.name == "gelu")
    with cpu_kernels.LargestCall() as counted:
        F.gelu(torch.zeros(16, 8))
    assert (counted.name, counted.kind) == ("gelu", "special")
    assert counted.bytes == traced.bytes.at(16)


def test_shapes_are_bounded_and_the_same_in_every_run() -> None:
    products = cpu_shapes.matmul_shapes()
    assert products == cpu_shapes.matmul_shapes() and len(products) == len(set(products)) > 100
    assert all(kernel_work("matmul", s) <= cpu_shapes.MAX_OPERATIONS for s in products)
    filters = cpu_shapes.convolution_shapes()
    assert len(filters) == len(set(filters)) > 60


def test_cases_run_and_have_their_shape() -> None:
    for kind, (_, cases) in cpu_shapes._KINDS.items():
        seen = set()
        for kernel, shape, action in cases():
            if kernel in seen or math.prod(shape) > 1e9:
                continue
            action()
            seen.add(kernel)
            assert kernel_work(kernel, shape) > 0
        assert kind in seen and f"{kind}_backward" in seen | {"matmul_backward"}


def test_probes_before_a_run_do_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of a measurement follow other work: after a sleep a core would seem slower than it is."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"slept for {seconds} s")

    monkeypatch.setattr("time.sleep", sleep)
    assert len(probe_rounds(CPU, 2)) == 2


def test_a_measurement_records_the_probes_that_a_run_starts_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of probes between the kernels, as many as small steps; not the single probes between two kernels."""
    monkeypatch.setattr(cpu_kernels, "measure_cpu_shapes", lambda clock, report, journal, between: [])
    monkeypatch.setattr(cpu_kernels, "measure_cpu_elementwise", lambda clock, journal, between: [])
    calls = 0

    def probe(self: SpeedProbe) -> dict[str, float]:
        nonlocal calls
        calls += 1
        return {"matmul": 2e-3, "pointwise": 5e-4}

    monkeypatch.setattr(SpeedProbe, "__call__", probe)
    taken: list[None] = []
    kernels = cpu_kernels.measure_cpu(
        CPU, 1.0, lambda stage: None, ResumeJournal(None, CPU), lambda: taken.append(None)
    )
    rates = {p.kernel: p.size / p.timing.seconds for p in kernels.points["fp32"]}
    assert rates == pytest.approx(
        {
            PROBE_CURVES["matmul"]: PROBE_SIZES["matmul"] / 2e-3,
            PROBE_CURVES["pointwise"]: PROBE_SIZES["pointwise"] / 5e-4,
        }
    )
    assert len(taken) == cpu_kernels.LEAST and calls > cpu_kernels.LEAST * PROBES_PER_ROUND


def test_current_speed_uses_the_same_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matmul curve mixes many shapes; the probes have their own curves."""
    seen = probe_rounds(CPU, 1)[0]
    assert all(seconds > 0 for seconds in seen.values())
    monkeypatch.setattr("drumline.measurement.speed_probe.probe_rounds", lambda device, rounds: [seen] * rounds)
    own = tuple(
        KernelCurve(PROBE_CURVES[k], "fp32", (PROBE_SIZES[k],), (PROBE_SIZES[k] / seen[k] / 2,)) for k in PROBE_SIZES
    )
    wrong = tuple(KernelCurve(k, "fp32", (PROBE_SIZES[k],), (PROBE_SIZES[k] / seen[k] * 100,)) for k in PROBE_SIZES)
    device = DeviceSpec("d", "cpu", 1e9, 1e10, {"fp32": 1e11}, 1e-5, curve=(*wrong, *own))
    assert current_speed(device, CPU, rounds=2) == pytest.approx(2.0)


def test_short_lived_changes_are_expected_to_fade() -> None:
    assert expected_speed(1.0, CPU) == 1.0
    assert expected_speed(1.1, CPU) == pytest.approx(1.1**PERSISTENCE_BEFORE) and expected_speed(
        0.9, CPU
    ) == pytest.approx(0.9**PERSISTENCE_BEFORE)
    assert speed_during_run(1.2, 1.0, CPU) == pytest.approx(1.2 ** (0.5 * PERSISTENCE_AROUND))
    assert expected_speed(0.5, CPU) == pytest.approx(
        0.5 * math.exp((1 - PERSISTENCE_BEFORE) * FLUCTUATION)
    )  # the load of another program lasts
    assert expected_speed(1.1, torch.device("cuda")) == 1.1


@pytest.mark.parametrize(
    ("slower", "speed", "times"), [((1.2,), 1 / 1.2, 1), ((4.0, 1.1), 1 / 1.1, 2), ((9.0,), 0.5, 3)]
)
def test_a_machine_that_seems_slow_is_probed_again(
    slower: tuple[float, ...], speed: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = itertools.chain(slower, itertools.repeat(slower[-1]))
    calls: list[int] = []

    def seen(device: torch.device, rounds: int) -> list[dict[str, float]]:
        calls.append(rounds)
        return [dict.fromkeys(PROBE_SIZES, next(given))]

    monkeypatch.setattr("drumline.measurement.speed_probe.probe_rounds", seen)
    curves = tuple(
        KernelCurve(PROBE_CURVES[k], "fp32", (PROBE_SIZES[k],), (PROBE_SIZES[k],)) for k in PROBE_SIZES
    )  # a second each
    device = DeviceSpec("d", "cpu", 1e9, 1e10, {"fp32": 1e11}, 1e-5, curve=curves)
    assert current_speed(device, CPU) == pytest.approx(speed) and len(calls) == times


class Slow(SpeedProbe):
    """A rank whose kernels take given multiples of one second."""

    def __init__(self, *factors: float) -> None:
        self.factors = itertools.chain(factors, itertools.repeat(factors[-1]))

    def __call__(self) -> dict[str, float]:
        return dict.fromkeys(PROBE_SIZES, next(self.factors))


ONE = dict.fromkeys(PROBE_SIZES, 1.0)


def test_timings_on_a_slow_rank_are_scaled_to_its_mean_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: 0.001 * next(given))
    tracker = SpeedTracker(Slow(1.5), ONE)
    assert CpuClock(2.0, tracker)(lambda: None, 2.0**20).seconds == pytest.approx(0.002 / 1.5)
    assert tracker.mean_slowdown("matmul") == pytest.approx(1.5)


def test_disturbed_timings_are_repeated() -> None:
    calls = []
    for factors in ((1.0,), (1.0, 1.0, 1.0, 1.0, 5.0, 1.0), (5.0,)):
        ran: list[int] = []
        clock = CpuClock(1.0, SpeedTracker(Slow(*factors), ONE))
        clock(functools.partial(ran.append, 1), 2.0**20, budget=0.0)
        calls.append((len(ran) - 1) // (LEAST + 1))
    assert calls == [1, 2, MAX_ATTEMPTS]
