"""TERM and USR1 on a joined rank outside of its training: in the same process, and under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from launched import environment, torchrun, train

from drumline.comm import rank_status as status_module
from drumline.comm.rank_status import RankStatus
from drumline.launchers.early_signals import EarlySignalHandler, PreemptedEarly, handling_early_signals


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> RankStatus:
    """The status of this process, as it begins."""
    made = RankStatus()
    monkeypatch.setattr(status_module, "_this_rank", made)
    return made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_waits_ends_with_0_and_other_verbs_with_128_and_the_number(
    status: RankStatus, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    for trains, code in ((True, 0), (False, 128 + number)):
        with pytest.raises(SystemExit) as ended, handling_early_signals(trains=trains, sets_up=lambda: False):
            os.kill(os.getpid(), number)
            time.sleep(5)
        assert ended.value.code == code and isinstance(ended.value, PreemptedEarly) == trains
    assert signal.getsignal(number) is before


def test_a_rank_that_sets_its_training_up_leaves_the_signal_to_it(status: RankStatus) -> None:
    with handling_early_signals(trains=True, sets_up=lambda: True):
        handler = signal.getsignal(signal.SIGTERM)
        assert isinstance(handler, EarlySignalHandler) and not handler.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert handler.asked


def test_after_the_training_a_signal_asks_for_nothing(status: RankStatus) -> None:
    status.place("ended")
    for trains in (True, False):
        with handling_early_signals(trains=trains, sets_up=lambda: False):
            handler = signal.getsignal(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert isinstance(handler, EarlySignalHandler) and not handler.asked


def start(folder: Path, rank: int) -> tuple[subprocess.Popen[str], dict[int, psutil.Process]]:
    """A training under torchrun in which making the model takes long, once that rank makes it; its processes."""
    agent = subprocess.Popen(
        [*torchrun(2), *train("dp=2", "run", "--resume", "auto", "--steps", "20")],
        cwd=folder,
        env=environment(JOINED_JOB_MODEL="3", JOINED_JOB_SLEEP="0.01"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 90
    while not (folder / f"making-{rank}").exists():
        assert agent.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    return agent, {int(p.environ()["RANK"]): p for p in psutil.Process(agent.pid).children()}


def end(agent: subprocess.Popen[str], processes: dict[int, psutil.Process]) -> tuple[str, str]:
    """What it printed; every process is gone."""
    out, err = agent.communicate(timeout=90)
    assert agent.returncode == 0, err
    assert "Traceback" not in err, err
    psutil.wait_procs(list(processes.values()), timeout=10)
    assert not any(p.is_running() for p in processes.values())
    return out, err


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(0, 1), (0,), (1,)])
def test_a_job_that_is_stopped_while_it_plans_ends_with_0(tmp_path: Path, asked: tuple[int, ...]) -> None:
    """Rank 0 makes the model to plan it, and rank 1 waits."""
    segments = set(os.listdir("/dev/shm"))
    agent, processes = start(tmp_path, 0)
    for rank in asked:
        processes[rank].send_signal(signal.SIGTERM)
    out, err = end(agent, processes)
    assert out == "" and err.count("preempted before the first step: there is nothing to save") == 1
    assert not list(tmp_path.glob("run/checkpoints/step-*")) and set(os.listdir("/dev/shm")) == segments


@pytest.mark.slow
def test_a_job_that_is_stopped_while_it_sets_up_saves_its_first_step(tmp_path: Path) -> None:
    """Rank 1 makes the model only for the training."""
    agent, processes = start(tmp_path, 1)
    processes[1].send_signal(signal.SIGTERM)
    out, err = end(agent, processes)
    assert "preempted: continue with --resume auto" in err
    assert len(json.loads(out)["losses"]) == 1
    assert len(list(tmp_path.glob("run/checkpoints/step-*"))) == 1
