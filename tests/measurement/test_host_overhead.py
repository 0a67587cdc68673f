"""Host overhead of a GPU, measured in turns and probed again; here with a CPU in the GPU's place."""

from __future__ import annotations

import statistics
from functools import partial

import pytest
import torch

from drumline.clusters import DeviceSpec
from drumline.costs.kernel_time import BACKWARD_CALL, HOST_CALL
from drumline.costs.tuning import BACKWARD_CAST_CALLS, CAST_CALLS
from drumline.costs.what_if import SPEED_PROBE
from drumline.measurement import host_overhead
from drumline.measurement.host_overhead import HostOverheadSteps, HostProbe, host_slowdown
from drumline.measurement.in_step_slowdown import AttentionBlock, RecurrentBlock, block_job

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(host_overhead, "_job", lambda: block_job(partial(AttentionBlock, 16, 2), (4, 16), 2, 2))
    monkeypatch.setattr(host_overhead, "_recurrent", lambda: block_job(partial(RecurrentBlock, 8, 2), (4, 8), 2, 1))


def device_of(**start: float) -> DeviceSpec:
    return DeviceSpec("toy", "cuda", 1e9, 1e12, {"fp32": 1e12}, 2e-5, host_overhead=start)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_overheads_are_compared_within_turns() -> None:
    measured = HostOverheadSteps(CPU)
    seconds = host_overhead._Seconds
    measured._turns = [
        {
            "plain": seconds(s, 2 * s, 0.5 * s),
            "full": seconds(2 * s, 4 * s),
            "selective": seconds(4 * s, 4 * s),
            "recurrent": seconds(0.256 * s, 0.512 * s),
        }
        for s in (1.0, 1.0, 8.0)  # the host was slow for a while, for all kinds
    ]
    measured._turn = lambda: measured._turns[0]  # type: ignore[method-assign]  # the next ones are as the first
    overhead = measured.measure()
    assert len(measured._probes) == 2 * host_overhead.TURNS, "steps in a row in every turn"
    assert overhead[SPEED_PROBE] == statistics.median(measured._probes)
    assert overhead["forward"] * measured._count["forward"] == pytest.approx(1.0)
    assert (
        overhead[HOST_CALL] * measured._entries == pytest.approx(1.0)
        and overhead[HOST_CALL] < overhead["forward"] / 1.5
    )
    assert (overhead["recurrent"], overhead["recurrent_backward"]) == pytest.approx((1e-3, 2e-3))  # a step of one layer
    assert overhead["cast"] == CAST_CALLS * overhead[HOST_CALL]
    assert overhead["cast_backward"] == BACKWARD_CAST_CALLS * overhead[BACKWARD_CALL]
    assert overhead["recompute"] * 2 * host_overhead.LAYERS == pytest.approx(2.0)
    assert overhead["selective_recompute"] * 2 * measured._inside == pytest.approx(3.0)


def test_part_of_a_probed_slowdown_remains_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_overhead._Small, "passes", lambda step: host_overhead._Seconds(0.01, 0.03))
    assert host_slowdown(device_of(**{SPEED_PROBE: 0.04}), CPU) == 1.0
    assert host_slowdown(device_of(**{SPEED_PROBE: 0.02}), CPU) == pytest.approx(2.0**host_overhead.PERSISTENCE)


def test_what_many_probes_have_in_common_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_overhead._Small, "passes", lambda step: host_overhead._Seconds(0.01, 0.03))
    probe, measured = HostProbe(CPU), device_of(**{SPEED_PROBE: 0.02})
    expected = [probe.slowdown(measured, 1) for _ in range(30)]
    assert expected == sorted(expected, key=float) and expected[0] == pytest.approx(2.0**host_overhead.PERSISTENCE)
    assert expected[-1] == pytest.approx(2.0, rel=0.02)
    monkeypatch.setattr(host_overhead._Small, "passes", lambda step: host_overhead._Seconds(0.01, 0.01))
    after_one_fast = probe.slowdown(measured, 1)
    assert after_one_fast is not None and 1.9 < after_one_fast < expected[-1], "one probe among many counts little"


def test_the_probe_before_a_run_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    slowdown = host_slowdown(device_of(**{SPEED_PROBE: 1e-3}), CPU)
    assert slowdown is not None and slowdown > 0 and torch.equal(torch.get_rng_state(), before)
    twice = host_slowdown(device_of(**{SPEED_PROBE: 1e-9}), CPU)
    assert twice is not None and twice > 1e2 * slowdown
    assert host_slowdown(device_of(forward=1e-5), CPU) is None, "nothing to compare with"

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("the model fills the GPU")

    monkeypatch.setattr(host_overhead, "_Small", full)
    assert host_slowdown(device_of(**{SPEED_PROBE: 1e-3}), CPU) is None
