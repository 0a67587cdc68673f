"""The watch over local ranks: how long silence is allowed, and whom it names. Statuses are written by this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from drumline.comm.hang_limit import START, WARM
from drumline.comm.rank_status import BETWEEN, RankStatus
from drumline.launchers import hang_watch
from drumline.launchers.hang_watch import HangWatch, status_path

LOOK = 0.5
"""Seconds between two looks of the launcher."""


class Ranks:
    """Two ranks and their watch, with a clock of their own."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        timeout: float | None = None,
        *,
        only_waits: bool = False,
    ) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.status = [RankStatus(status_path(folder, rank)) for rank in range(2)]
        self.watch = HangWatch(timeout, only_waits=only_waits)
        self.watch.begin(folder, {0: os.getpid(), 1: os.getpid()})

    def steps(self, count: int, seconds: float) -> None:
        for number in range(count):
            for status in self.status:
                status.step(number)
            assert not self.pass_time(seconds)

    def pass_time(self, seconds: float) -> bool:
        """Let time pass while the launcher looks; whether it saw a hang."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + LOOK)
            if self.watch.check() is not None:
                return True
        return False

    def silent_for(self, seconds: float) -> bool:
        """Whether that much silence is a hang."""
        for status in self.status:
            status.phase("forward")
        return self.pass_time(seconds)


@pytest.mark.parametrize(("step", "limit"), [(0.1, 10.0), (4.0, 20.0)])
def test_the_limit_is_learnt_while_a_rank_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float, limit: float
) -> None:
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.steps(WARM + 4, step)
    ranks.status[0].collective_started("all_reduce float32 (8)", "train.py:3")
    assert not ranks.silent_for(limit - 1) and ranks.silent_for(limit + 1)


def test_ranks_that_compute_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All compile another shape, or load data: none waits for another."""
    ranks = Ranks(tmp_path, monkeypatch)
    assert not ranks.silent_for(4 * START) and ranks.silent_for(7 * START)  # before the first step
    ranks.steps(WARM + 4, 0.1)
    assert not ranks.silent_for(START - 1) and ranks.silent_for(START + 1)


def test_a_rank_behind_is_waited_for_where_no_call_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NCCL: one rank loads data, the other has begun its forward."""
    ranks = Ranks(tmp_path, monkeypatch)
    for number in range(WARM + 4):
        for status in ranks.status:
            status.step(number)
            status.phase("data")
        assert not ranks.pass_time(0.1)
    assert not ranks.silent_for(START - 1)
    ranks.status[0].phase("forward")
    assert not ranks.silent_for(9) and ranks.silent_for(11)


def test_before_the_steps_are_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.steps(2, 0.1)
    ranks.status[0].collective_started("all_reduce float32 (8)")
    assert not ranks.silent_for(START - 1) and ranks.silent_for(START + 1)


def test_the_users_own_code_between_steps_is_no_warm_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 evaluates after its step while the others wait in the next one; that is no slow step, either."""
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.steps(WARM + 4, 0.1)
    first, other = ranks.status
    first.place(BETWEEN)
    other.step(WARM + 4)
    other.collective_started("all_reduce float32 (8)", "train.py:3")
    assert not ranks.silent_for(START - 1)
    first.batch_wanted()
    other.collective_ended()
    for number in range(WARM + 5, WARM + 8):
        for status in ranks.status:
            status.step(number)
        assert not ranks.pass_time(0.1)
    other.collective_started("all_reduce float32 (8)", "train.py:3")
    assert not ranks.silent_for(9) and ranks.silent_for(11)
    first.place(BETWEEN)
    assert ranks.silent_for(START + 1)


def test_programs_that_are_no_training_are_judged_only_while_a_rank_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, monkeypatch, only_waits=True)
    assert not ranks.silent_for(7 * START)
    monkeypatch.setattr(hang_watch, "process_state", lambda pid: "T")  # in a debugger
    assert not ranks.silent_for(START)
    ranks.status[0].collective_started("all_reduce float32 (8)", "train.py:3")
    assert not ranks.silent_for(START - 1) and ranks.silent_for(START + 1)
    monkeypatch.setenv("DRUMLINE_TIMEOUT", "1000")  # ranks are asked to wait longer for each other
    longer = Ranks(tmp_path, monkeypatch, only_waits=True)
    longer.status[0].collective_started("all_reduce float32 (8)", "train.py:3")
    assert not longer.silent_for(999) and longer.silent_for(1001)


def test_the_users_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, monkeypatch, 2.0)
    ranks.steps(WARM + 4, 0.1)
    assert not ranks.silent_for(1.9) and ranks.silent_for(2.1)


def test_a_stopped_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.steps(WARM + 4, 0.1)
    monkeypatch.setattr(hang_watch, "process_state", lambda pid: "T")
    assert ranks.watch.check() is None
    ranks.now += LOOK
    assert ranks.pass_time(11)
    report = ranks.watch.check()
    assert report is not None and report.suspects == (0, 1) and "stopped" in report.text


def test_a_launcher_that_was_away_measures_silence_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal was paused: ranks that send records had to wait for the launcher, and no step was slow."""
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.steps(WARM + 4, 0.1)
    ranks.status[0].collective_started("all_reduce float32 (8)", "train.py:3")
    limit = ranks.watch.limit
    ranks.now += 3 * limit
    assert ranks.watch.check() is None and not ranks.pass_time(limit - LOOK)
    assert ranks.pass_time(2 * LOOK)  # but after that it is a hang
    for status in ranks.status:
        status.step(WARM + 4)
    ranks.watch.check()
    ranks.now += 60
    for status in ranks.status:
        status.step(WARM + 5)
    assert ranks.watch.check() is None
    assert ranks.watch.limit < 60


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher continues first, and sees its ranks still stopped."""
    ranks = Ranks(tmp_path, monkeypatch)
    ranks.steps(WARM + 4, 0.1)
    ranks.status[0].collective_started("all_reduce float32 (8)", "train.py:3")
    states = ["T"]
    monkeypatch.setattr(hang_watch, "process_state", lambda pid: states[-1])
    ranks.watch.check()
    ranks.now += 3600
    assert ranks.watch.check() is None
    states.append("S")
    assert ranks.watch.check() is None and not ranks.silent_for(ranks.watch.limit - 1)
