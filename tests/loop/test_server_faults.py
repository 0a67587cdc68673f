"""Workers and parameter servers that fail: training goes on, and every gradient is accounted for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from drumline.core.errors import InputError, RankFailed
from drumline.loop.checkpoints import CheckpointOptions
from drumline.loop.join import join
from drumline.loop.restarts import FaultOptions
from drumline.loop.train import train
from drumline.loop.training_events import GradientCounts
from drumline.reports import Run, StepRecord
from drumline.runtime.asynchronous.invitation import Invitation

JOB = """
import os, pathlib, time, torch
from torch import nn
import drumline as dl
from drumline.comm.rank_status import rank_status

class Data(torch.utils.data.Dataset):
    def __init__(self, nap): self.nap = nap
    def __len__(self): return 40
    def __getitem__(self, i):
        time.sleep(self.nap)
        return torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64), i % 3

class Held(Data):
    # holds worker 1 at step 3 until a successor of worker 0 is about to connect
    def __init__(self, nap):
        super().__init__(nap)
        self.file, self.rank = pathlib.Path(__file__).with_name("replaced"), os.environ.get("RANK")
        if self.rank == "0" and os.environ["DRUMLINE_REPLACED"] != "0":
            self.file.touch()
    def __getitem__(self, i):
        if self.rank == "1" and rank_status().read().step == 2:
            for _ in range(1200):
                if self.file.exists():
                    time.sleep(1.0)  # it connects, and waits for a task
                    break
                time.sleep(0.05)
        return super().__getitem__(i)

def made(nap, steps, data=Data):
    return dl.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)).double(),
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), clip=0.5,
        data=lambda: data(nap), batch_size=8, steps=steps)

def job(): return made(0.005, 30)
def held(): return made(0.0, 30, Held)
def slow(): return made(0.01, 10000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "j.py").write_text(JOB)
    return tmp_path


def trained(folder: Path, name: str, plan: str, chaos: str = "", job: str = "job") -> Run:
    """A run of thirty steps with injected faults."""
    run = train(
        f"{folder / 'j.py'}:{job}",
        plan,
        cluster="dgx-h100",
        output=folder / name,
        checkpoints=CheckpointOptions(every=5),
        faults=FaultOptions(chaos=chaos),
    )
    assert [s.step for s in run.steps] == list(range(30))
    assert bool(run.faults) == bool(chaos)
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    """The last checkpoint's tensors."""
    assert run.folder is not None
    newest = max((run.folder / "checkpoints").glob("step-*"))
    tensors = {}
    for path in newest.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [key for key in file.keys() if not key.startswith("random")]  # noqa: SIM118  # it is no dict
            tensors |= {key: file.get_tensor(key) for key in names}
    return tensors


def test_a_killed_worker_and_a_killed_server_change_nothing_of_a_synchronous_run(folder: Path) -> None:
    whole = trained(folder, "whole", "dp=2,sync=server")
    worker = trained(folder, "worker", "dp=2,sync=server", "kill:1@7")
    server = trained(folder, "server", "dp=2,sync=server", "kill:2@12/optimizer")
    for run in (worker, server):
        assert run.losses == whole.losses
        theirs = weights(run)
        assert all(torch.equal(t, theirs[k]) for k, t in weights(whole).items())
    assert worker.faults == ("rank 1 was ended by signal SIGKILL",)
    assert worker.gradients == {"applied": 60, "dropped": 0, "lost": 1, "repeated": 0}
    assert server.gradients["applied"] == 60 and 0 < server.gradients["repeated"] <= 12


@pytest.mark.parametrize(("plan", "step"), [("dp=2,sync=server", 3), ("dp=2,sync=stale:2", 5)])
def test_a_worker_killed_while_it_waits_is_replaced(folder: Path, plan: str, step: int) -> None:
    run = trained(folder, "run", plan, f"kill:0@{step}/waiting", "held")
    assert (folder / "replaced").exists()
    assert run.faults == ("rank 0 was ended by signal SIGKILL",)
    assert run.gradients == {"applied": 60, "dropped": 0, "lost": 0, "repeated": 0}


def test_asynchronous_workers_go_on_without_one_that_is_killed(folder: Path) -> None:
    run = trained(folder, "run", "dp=2,sync=async", "kill:0@9")
    assert run.gradients == {"applied": 30, "dropped": 0, "lost": 1, "repeated": 0}
    assert {s.worker for s in run.steps} == {0, 1}
    assert all(len(s.staleness) == 1 for s in run.steps)


def test_an_asynchronous_run_goes_on_from_the_last_checkpoint_of_a_killed_server(folder: Path) -> None:
    run = trained(folder, "run", "dp=2,sync=async,servers=2", "kill:3@14/optimizer")
    assert run.gradients["applied"] == 30 and 0 < run.gradients["repeated"] <= 14


def test_workers_that_fail_the_same_way_again_end_the_run(folder: Path) -> None:
    with pytest.raises(RankFailed, match="injected into rank"):
        trained(folder, "run", "dp=2,sync=async", "raise:0@0/backward!,raise:1@0/backward!")


def test_a_signal_saves_and_the_run_resumes(folder: Path) -> None:
    command = [sys.executable, "-m", "drumline", "train", "j.py:slow", "--cluster", "dgx-h100", "--output", "run"]
    process = subprocess.Popen([*command, "--plan", "dp=2,sync=stale:2"], cwd=folder, stdout=subprocess.DEVNULL)
    steps = folder / "run" / "steps.jsonl"
    while not steps.exists() or steps.read_text().count("\n") < 5:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    done = len(steps.read_text().splitlines())
    assert done < 10000
    again = [*command, "--plan", "dp=3,sync=async", "--resume", "auto", "--steps", str(done + 5), "--json"]
    result = subprocess.run(again, cwd=folder, capture_output=True, text=True, check=True)
    assert len(json.loads(result.stdout)["losses"]) == done + 5


def test_a_worker_joins_a_training_that_runs(folder: Path) -> None:
    command = [sys.executable, "-m", "drumline"]
    options = ["--cluster", "dgx-h100", "--output", "run", "--plan", "dp=1,sync=async", "--json"]
    with subprocess.Popen(
        [*command, "train", "j.py:slow", *options], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as training:
        invitation = folder / "run" / "workers.json"
        _wait_for(invitation.exists, training)
        assert invitation.stat().st_mode & 0o777 == 0o600
        with subprocess.Popen(
            [*command, "join", "run", "--json"], cwd=folder, stdout=subprocess.PIPE, text=True
        ) as joining:
            _wait_for(lambda: set(_workers(folder)) > {0}, training)
            training.send_signal(signal.SIGTERM)
            result, joined = training.communicate(timeout=60)[0], joining.communicate(timeout=60)[0]
    counted, workers = json.loads(joined)["counted"], _workers(folder)
    assert 0 < counted == len(workers) - workers.count(0)
    assert json.loads(result)["gradients"]["applied"] == len(workers)
    refused = subprocess.run([*command, "join", "run"], cwd=folder, capture_output=True, text=True)
    assert refused.returncode == 2 and "no training in run takes more workers" in refused.stderr


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None
        time.sleep(0.05)


def _workers(folder: Path) -> list[int]:
    """The worker of every update so far."""
    text = (folder / "run" / "steps.jsonl").read_text()
    return [json.loads(line)["worker"] for line in text[: text.rfind("\n") + 1].splitlines()]


def test_a_failed_run_takes_no_more_workers(folder: Path) -> None:
    """The file with the servers' tokens goes with the run; one that was left behind is no reason to wait."""
    with pytest.raises(RankFailed, match="injected into rank"):
        trained(folder, "run", "dp=1,sync=async", "raise:0@3/backward!")
    assert not (folder / "run" / "workers.json").exists()
    job = f"{folder / 'j.py'}:job"
    Invitation(job, "dp=1,sync=async", ("unix:/nowhere/calls#00",)).write(folder / "run")
    with pytest.raises(InputError, match="has ended: its parameter servers do not answer"):
        join(folder / "run")


def test_gradients_are_counted_where_a_server_fails_right_after_a_save() -> None:
    counts = GradientCounts()
    for step, (server, lost) in enumerate([("a", 0), ("a", 2), ("b", 0), ("b", 1), ("c", 3)]):
        record = StepRecord(step, 1.0, 1.0, 1.0, 1, staleness=(0,))
        counts.add(record, {"server": server, "dropped": 0, "lost": lost}, ())
    assert counts.totals == {"applied": 5, "dropped": 0, "lost": 6, "repeated": 0}
