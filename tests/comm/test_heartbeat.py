"""Ranks detect a hang themselves where no launcher of ours watches them, and name the missing rank (F2, F6)."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from drumline.comm.hang_limit import FACTOR, SHORTEST, START, WARM
from drumline.comm.heartbeat import HangDetector, Heartbeat, start_heartbeat
from drumline.comm.rank_status import BETWEEN, RankStatus, StatusReading
from drumline.core.errors import InputError

SCRIPT = Path(__file__).with_name("hanging_rank.py")


def reading(step: int, *, calls: int = 1, inside: bool = False, place: str = "training") -> StatusReading:
    return StatusReading(0.0, place, step, "backward", calls, inside, "all_reduce float32 (8)", "job.py:3")


def trained(seconds_a_step: float, steps: int = 8) -> tuple[HangDetector, float]:
    """A detector that has seen some steps of two ranks, and the time after them."""
    detector, now = HangDetector(2), 100.0
    for step in range(steps):
        now += seconds_a_step
        for rank in range(2):
            detector.add(rank, step, 0.0, reading(step), now)
    return detector, now


@pytest.mark.parametrize(("step", "limit"), [(0.5, SHORTEST), (7.0, FACTOR * 7.0)])
def test_the_limit_is_learnt_from_the_slowest_warm_step(step: float, limit: float) -> None:
    for steps, expected in ((8, limit), (WARM, START)):
        detector, now = trained(step, steps)
        assert detector.limit(now) == pytest.approx(expected)


def test_a_missing_rank_is_named_after_the_limit() -> None:
    detector, now = trained(0.5)
    detector.add(0, 50, 0.0, reading(8, calls=5, inside=True), now)
    detector.add(1, 50, 0.0, reading(8, calls=4), now)
    assert detector.judge(now + SHORTEST - 1) is None
    for beat in range(10):  # both still beat, but their status grows old
        detector.add(0, 60 + beat, float(beat + 1), reading(8, calls=5, inside=True), now + beat + 1)
        detector.add(1, 60 + beat, float(beat + 1), reading(8, calls=4), now + beat + 1)
    report = detector.judge(now + SHORTEST + 0.5)
    assert report is not None and report.suspects == (1,) and "rank 1 is missing" in report.text


def test_a_rank_without_a_beat_is_silent() -> None:
    detector, now = trained(0.5)
    for beat in range(12):
        detector.add(0, 60 + beat, float(beat), reading(8, calls=5, inside=True), now + beat)
    report = detector.judge(now + 12)
    assert report is not None and report.suspects == (1,) and "silent" in report.text


def test_a_rank_that_stopped_before_it_reported_a_step_is_found() -> None:
    detector, now = HangDetector(2), 100.0
    detector.add(1, 1, 0.0, reading(-1, place="starting"), now)
    for beat in range(13):
        detector.add(0, beat, float(beat), reading(6, calls=5, inside=True), now + beat)
    report = detector.judge(now + 12)
    assert report is not None and report.suspects == (1,)


def test_progress_of_one_rank_is_no_hang() -> None:
    detector, now = trained(0.5)
    detector.add(0, 50, 0.0, reading(8, calls=5, inside=True), now)
    detector.add(1, 51, 0.0, reading(8, calls=4), now + 20)
    assert detector.judge(now + 25) is None


def test_ranks_that_were_stopped_together_go_on() -> None:
    """The scheduler stopped the job for an hour: no rank was silent, and no step took an hour."""
    detector, now = trained(0.5)
    detector.looks.look(now)
    for rank, calls in ((0, 5), (1, 4)):
        detector.add(rank, 50, 0.0, reading(8, calls=calls, inside=calls == 5), now)
    now += 3600
    detector.looks.look(now)
    detector.add(0, 51, 3600.0, reading(8, calls=5, inside=True), now)
    assert detector.judge(now) is None
    for rank in range(2):
        detector.add(rank, 52, 0.0, reading(9), now + 1)
    assert detector.limit(now + 1) == SHORTEST
    for beat in range(12):
        detector.looks.look(now + 2 + beat)
        for rank, calls in ((0, 5), (1, 4)):
            detector.add(rank, 53 + beat, float(beat), reading(9, calls=calls, inside=calls == 5), now + 2 + beat)
    assert detector.judge(now + 13) is not None


def test_the_users_own_code_between_steps_is_no_warm_step() -> None:
    detector, now = trained(0.5)
    for beat in range(60):
        detector.add(0, 50 + beat, float(beat), reading(7, place="between steps"), now + beat)
        detector.add(1, 50 + beat, float(beat), reading(8, inside=True), now + beat)
        assert detector.judge(now + beat) is None
    for rank in range(2):
        detector.add(rank, 200, 0.0, reading(9), now + 60)
    assert detector.limit(now + 60) == SHORTEST


@pytest.mark.parametrize("place", ["saving", "ending", "starting", "between steps"])
def test_a_long_save_is_no_hang(place: str) -> None:
    detector, now = trained(0.5)
    for beat in range(int(START) + 2):
        for rank in range(2):
            status = reading(8, calls=5, inside=True, place=place)
            detector.add(rank, 50 + beat, float(beat), status, now + beat)
        assert (detector.judge(now + beat) is None) == (beat <= START)


def test_a_store_that_does_not_answer_ends_no_rank_that_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendezvous in a file on a network disk may stall; the ranks do not need it between their calls."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    status = RankStatus()
    heartbeat = Heartbeat(dist.HashStore(), 1, 2, status, 10.0)
    for _ in range(60):
        now += 1.0
        status.collective_started("all_reduce float32 (8)", "job.py:3")
        assert heartbeat.report_without_store(now) == ""
        status.collective_ended()
    status.collective_started("all_reduce float32 (8)", "job.py:3")
    reports = []
    for _ in range(12):
        now += 1.0
        reports.append(heartbeat.report_without_store(now))
    assert reports[:10] == [""] * 10 and "the store does not answer" in reports[-1]


def phase(step: int, phases: int, name: str = "forward") -> StatusReading:
    """A rank of whose calls nothing is known, as over NCCL."""
    return StatusReading(0.0, "training", step, name, 0, False, "", "", phases=phases, phases_before=5)


def silent(first: StatusReading, second: StatusReading, seconds: int, *, fixed: float | None = None) -> tuple[int, ...]:
    """When a detector reports two warm ranks that stay as they are, if it does, and whom it names: (seconds, *ranks)."""
    detector, now = HangDetector(2, fixed), 100.0
    for step in range(8):
        for rank in range(2):
            detector.add(rank, step, 0.0, phase(step, 1), now := now + 0.25)
    for beat in range(seconds):
        for rank, reading in enumerate((first, second)):
            detector.add(rank, 50 + beat, float(beat), reading, now + beat)
        if report := detector.judge(now + beat):
            return (beat, *report.suspects)
    return ()


def test_without_known_calls_a_rank_behind_is_named_after_the_limit() -> None:
    limit = int(SHORTEST) + 1
    assert silent(phase(8, 2), phase(7, 5, "data"), 400) == (limit, 1)
    assert silent(phase(8, 2, "backward"), phase(8, 1), 400) == (limit, 1)
    assert silent(phase(8, 1), phase(8, 2, "backward"), 400, fixed=30) == (31, 0)


def test_ranks_in_the_same_phase_may_compute_for_longer() -> None:
    """As a compiler may run on all of them; at last they are reported, and none is named."""
    assert silent(phase(8, 2), phase(8, 2), 400) == (int(START) + 1,)
    assert silent(phase(8, 2), phase(8, 2), 400, fixed=30) == (31,)


def test_code_of_the_users_between_steps_may_take_long() -> None:
    """On all ranks as long as it likes; on one for which others wait, as long as a save."""
    idle = dataclasses.replace(phase(7, 5, "optimizer"), place=BETWEEN)
    assert silent(idle, idle, 3000) == ()
    assert silent(phase(8, 2), idle, 400) == (int(START) + 1, 1)


@pytest.mark.parametrize("text", ["x", "-1", "nan", "inf"])
def test_a_bad_limit_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="DRUMLINE_HANG_TIMEOUT"):
        start_heartbeat(lambda: None, 0, 2, RankStatus(), {"DRUMLINE_HANG_TIMEOUT": text})


@pytest.mark.slow
@pytest.mark.alone  # the hang must be found within 15 s
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("how", ["sleep", "stop", "busy"])
def test_f2_torchrun_ranks_find_a_hang_within_15_seconds(tmp_path: Path, how: str, backend: str) -> None:
    text = under_torchrun(tmp_path / "output", how, backend)
    assert "no progress for 1" in text, text
    assert ("rank 1 is missing" if how == "sleep" else "rank 1 is silent") in text
    assert "waits in collective" in text and "stacks of rank 0:" in text and "hanging_rank.py" in text


@pytest.mark.slow
@pytest.mark.alone  # the hang must be found within 15 s
@pytest.mark.parametrize("how", ["sleep", "forward"])
def test_f2_a_hang_is_named_by_step_and_phase_where_no_call_is_known(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain gloo stands for NCCL: nothing of its calls is in the status."""
    monkeypatch.setenv("DRUMLINE_CHECK_CALLS", "0")
    text = under_torchrun(tmp_path / "output", how, "gloo")
    assert "no progress for 1" in text, text
    assert "rank 1 is behind: others are in a later step or phase" in text, text
    assert "rank 0: training, step 6, backward" in text, text
    assert f"rank 1: training, {'step 5, data' if how == 'sleep' else 'step 6, forward'}; no collective known" in text
    assert "stacks of rank 0:" in text and "stacks of rank 1:" in text and "hanging_rank.py" in text


def under_torchrun(output: Path, how: str, backend: str) -> str:
    """What the ranks print until rank 0 has ended. Torchrun itself waits 30 s longer for a rank that is stopped."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    end = time.monotonic() + 100
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, str(SCRIPT), how, backend], stdout=file, stderr=file, start_new_session=True
        )
        try:
            while process.poll() is None and "closing signal" not in output.read_text() and time.monotonic() < end:
                time.sleep(0.2)
        finally:
            ranks = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for one in (*ranks, process):  # a rank that is stopped would stay
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    one.kill()
            process.wait()
    return output.read_text()
