"""Days of training with failures: the seeded replay, the closed form, and where the time goes."""

from __future__ import annotations

import statistics

import pytest

from drumline.core.errors import InputError
from drumline.simulator.failures import FailureReplay, replay_failures
from drumline.theory.checkpoint_interval import expected_goodput, save_interval

DAY = 86400.0


def replay(seed: int = 0, *, mtbf: float = 3 * 3600, days: float = 30, restart: float = 300.0) -> FailureReplay:
    return replay_failures(days * DAY, mtbf=mtbf, interval=600.0, stall=20.0, restart=restart, seed=seed)


@pytest.mark.parametrize(("mtbf", "restart"), [(3 * 3600.0, 300.0), (3600.0, 1200.0), (1e6, 60.0), (1800.0, 0.0)])
def test_the_mean_agrees_with_the_closed_form(mtbf: float, restart: float) -> None:
    runs = [replay(seed, mtbf=mtbf, restart=restart) for seed in range(40)]
    mean = statistics.mean(r.goodput for r in runs)
    error = statistics.stdev(r.goodput for r in runs) / len(runs) ** 0.5
    assert mean == pytest.approx(runs[0].expected, abs=4 * error + 1e-3)
    # failures are a Poisson process, whatever the ranks do meanwhile
    assert statistics.mean(r.failures for r in runs) == pytest.approx(30 * DAY / mtbf, rel=0.1)


def test_the_time_adds_up_and_seeds_repeat() -> None:
    first = replay(7)
    parts = first.useful + first.repeated + first.saving + first.restarting
    assert parts == pytest.approx(first.seconds) == 30 * DAY and first.failures > 0
    assert first == replay(7) != replay(8)
    assert first.saves * 600.0 <= first.useful


def test_without_failures_only_saves_cost_time() -> None:
    r = replay(mtbf=1e12)
    assert r.failures == 0 and r.repeated == r.restarting == 0
    assert r.goodput == pytest.approx(600 / 620, rel=1e-3) == pytest.approx(r.expected, rel=1e-3)


def test_the_interval_of_young_and_daly_is_the_best() -> None:
    best = save_interval(20.0, 3 * 3600)
    around = [expected_goodput(f * best, 20.0, 300.0, 3 * 3600) for f in (0.5, 0.9, 1.0, 1.1, 2.0)]
    assert max(around) == pytest.approx(around[2], rel=1e-3) and around[0] < around[2] > around[4]


def test_a_checkpoint_counts_when_it_is_stored() -> None:
    """A failure while a save is written loses its interval as well."""

    def stored(write: float, seed: int) -> FailureReplay:
        return replay_failures(30 * DAY, mtbf=3600.0, interval=600.0, stall=20.0, restart=300.0, write=write, seed=seed)

    for write in (0.0, 300.0, 620.0):
        runs = [stored(write, seed) for seed in range(40)]
        mean, error = statistics.mean(r.goodput for r in runs), statistics.stdev(r.goodput for r in runs) / 40**0.5
        assert mean == pytest.approx(runs[0].expected, abs=4 * error + 0.005)
        for r in runs:
            assert r.useful + r.repeated + r.saving + r.restarting == pytest.approx(r.seconds) and r.useful >= 0
    assert stored(0.0, 3) == replay_failures(30 * DAY, mtbf=3600.0, interval=600.0, stall=20.0, restart=300.0, seed=3)
    lost = [sum(stored(write, seed).repeated for seed in range(10)) for write in (0.0, 300.0, 600.0)]
    assert lost == sorted(lost) and lost[2] > 1.5 * lost[0]
    with pytest.raises(AssertionError):
        stored(700.0, 0)


def test_a_cluster_that_fails_all_the_time() -> None:
    r = replay_failures(DAY, mtbf=10.0, interval=600.0, stall=1.0, restart=60.0)
    assert r.goodput == 0 and r.expected < 1e-6
    assert expected_goodput(600.0, 1.0, 1e6, 1.0) == 0.0
    with pytest.raises(InputError, match="at most 5000000 saves and failures"):
        replay_failures(30 * DAY, mtbf=1e-3, interval=600.0, stall=1.0, restart=60.0)
