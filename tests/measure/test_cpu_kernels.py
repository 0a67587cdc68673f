"""What a CPU rank measures: operators under their names, shapes within their bounds, clocks of ranks that share cores."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drumline.cluster import Curve, Device
from drumline.cost.clouds import work_of
from drumline.job import Job
from drumline.measure import cpu_shapes, cpu_streams
from drumline.measure.idle import measure_fewer
from drumline.measure.journal import Journal
from drumline.measure.pulse import OWN, SIZES, looks, speed
from drumline.measure.shared import Clock, crowding, own_clock
from drumline.trace import trace

CPU = torch.device("cpu")


def test_ranks_that_share_a_core_are_timed_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for its turn does not take longer; all of them together take as often as they share."""
    given = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: 0.001 * next(given))  # one millisecond for every action

    def wait() -> None:
        time.sleep(0.002)

    assert Clock(1.0)(wait).seconds > 0.0019
    assert Clock(4.0)(wait).seconds == pytest.approx(0.004)
    assert own_clock(4.0)() < own_clock(1.0)()


def test_crowding_counts_threads_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert [crowding(n, 1) for n in (1, 2, 3, 4)] == [1.0, 1.0, 1.5, 2.0]
    assert crowding(1, 2) == 1.0


def test_operators_have_points_under_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_streams, "SIZES", (2**10, 2**13))
    monkeypatch.setattr(cpu_streams, "FRESH", 2**12)
    monkeypatch.setattr("drumline.measure.shared.BUDGET", 0.0)
    points = cpu_streams.measure_cpu_streams(Clock(), Journal(None, CPU))
    names = {p.kernel for p in points}
    assert {"add", "pointwise", "bernoulli_", "gelu_backward", "native_group_norm", "pool_backward", "fresh"} <= names
    assert {"transpose", "strided", "update", "gather_backward", "upsample_bilinear2d_backward"} <= names
    assert "clone" in names  # the plain one; what changes the order is under its kind
    assert all(p.size > 0 and p.timing.seconds > 0 for p in points)


def test_bytes_are_counted_as_a_trace_counts_them() -> None:
    job = Job(
        model=lambda: nn.Sequential(nn.GELU(), nn.Linear(8, 8)), loss=lambda y, t: (y - t).square().mean(),
        optimizer=torch.optim.SGD, data=lambda: [(torch.zeros(8), torch.zeros(8))], batch_size=16,
    )  # fmt: skip
    traced = next(op for x in trace(job).layers for op in x.ops if op.name == "gelu")
    with cpu_streams.Counted() as counted:
        F.gelu(torch.zeros(16, 8))
    assert (counted.name, counted.kind) == ("gelu", "special")
    assert counted.bytes == traced.bytes.at(16)


def test_shapes_are_bounded_and_the_same_in_every_run() -> None:
    products = cpu_shapes.product_shapes()
    assert products == cpu_shapes.product_shapes() and len(products) == len(set(products)) > 100
    assert all(work_of("matmul", s) <= cpu_shapes.MOST for s in products)
    filters = cpu_shapes.convolution_shapes()
    assert len(filters) == len(set(filters)) > 60


def test_every_case_runs_and_is_of_its_shape() -> None:
    for kind, (_, cases) in cpu_shapes._KINDS.items():
        seen = set()
        for kernel, shape, action in cases():
            if kernel in seen or math.prod(shape) > 1e9:
                continue
            action()
            seen.add(kernel)
            assert work_of(kernel, shape) > 0
        assert kind in seen and f"{kind}_backward" in seen | {"matmul_backward"}


def test_the_speed_of_the_moment_is_told_by_the_same_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves of products are of many shapes; the pulse has its own."""
    rates = looks(CPU, 1)[0]
    assert all(rate > 0 for rate in rates.values())
    monkeypatch.setattr("drumline.measure.pulse.looks", lambda device, rounds: [rates] * rounds)
    own = tuple(Curve(OWN[k], "fp32", (SIZES[k],), (rates[k] / 2,)) for k in SIZES)
    wrong = tuple(Curve(k, "fp32", (SIZES[k],), (rates[k] * 100,)) for k in SIZES)
    device = Device("d", "cpu", 1e9, 1e10, {"fp32": 1e11}, 1e-5, curve=(*wrong, *own))
    assert speed(device, CPU, rounds=2) == pytest.approx(2.0)


def fewer() -> dict[str, float]:
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    return measure_fewer(dist.group.WORLD)


def test_ranks_are_measured_with_others_idle(world) -> None:  # type: ignore[no-untyped-def]  # a fixture
    first, second = world(2).run(fewer)
    assert first.keys() == {"1", "2"} and first["2"] == pytest.approx(1.0)
    assert first == second and 0.05 < first["1"] < 3.0
