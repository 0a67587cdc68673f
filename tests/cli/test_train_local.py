"""`drumline train` and `verify` under plans whose replicas step by themselves: saves, stops and faults at averages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command import here
from test_train_checkpoints import checkpoints, command, folder, losses, train

from drumline.loop.checkpoints import CheckpointOptions
from drumline.loop.restarts import FaultOptions
from drumline.loop.train import train as train_job

__all__ = ["folder"]  # the fixture

LOCAL = "dp=2,sync=local:4,outer=nesterov"


def trained(
    folder: Path, run: str, steps: int, every: int = 0, resume: str | None = None, chaos: str = ""
) -> list[float]:
    """Train; the losses in the run folder."""
    result = train_job(
        folder / "j.py",
        LOCAL,
        steps=steps,
        cluster="dgx-h100",
        output=folder / run,
        checkpoints=CheckpointOptions(every=every, resume=resume),
        faults=FaultOptions(chaos=chaos),
    )
    assert bool(result.faults) == bool(chaos)
    return losses(folder, run)


def test_a_run_that_was_resumed_or_disturbed_is_the_same(folder: Path) -> None:
    straight = trained(folder, "straight", 12)
    assert len(straight) == 12 and all(loss > 0 for loss in straight)
    # steps 3 and 6 are between averages: the next averages are saved
    assert trained(folder, "run", 8, every=3) == straight[:8]
    assert checkpoints(folder) == ["step-00000004", "step-00000008"]
    assert trained(folder, "run", 12, resume=str(folder / "run" / "checkpoints")) == straight  # bit for bit
    assert trained(folder, "killed", 12, every=4, chaos="kill:1@6") == straight


@pytest.mark.slow
def test_train(folder: Path) -> None:
    done = train(folder, "--steps", 6, plan=LOCAL)
    assert len(losses(folder)) == 6 and "step 6/6" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "every"), [("dp=2,sync=local:4", 4), ("dp=2,sync=gossip:random", 10)])
def test_preemption_at_a_meeting(folder: Path, plan: str, every: int) -> None:
    """Asked to stop between two meetings, the run saves at the next one; the next run, under any plan, resumes there."""
    line = command("train", "j.py:slow", "--plan", plan, "--cluster", "dgx-h100", "-o", "run", "--save-every", 1000)
    process = subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 90
        while not (folder / "run" / "steps.jsonl").exists() or len(losses(folder)) < 2:
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, out + err
    [name] = checkpoints(folder)
    steps = int(name[5:])
    assert steps % every == 0 and len(losses(folder)) == steps
    again = train(folder, "--resume", "auto", "--steps", steps + 1, plan="dp=1")
    assert f"step {steps}" in again.stdout


@pytest.mark.slow
def test_verify(folder: Path) -> None:
    line = command("verify", "j.py", "--plan", LOCAL, "--steps", 6)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference: 2 replicas in one process, averaged as sync=local:4 is defined" in done.stdout
    assert f"passed: {LOCAL} is within the bounds of an approximate plan" in done.stdout
    assert "differs from one device's" in done.stdout
    result = json.loads(
        subprocess.run([*line, "--json"], cwd=folder, capture_output=True, text=True, timeout=120).stdout
    )
    assert result["passed"] and result["errors"]["float64"] <= 1e-10


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ("dp=2,sync=local:0", "sync is allreduce, server"),
        ("dp=2,zero=3,sync=local:4", "the nearest plan that runs: dp=2,sync=local:4"),
        ("dp=2,sync=local:4,across=6", "the nearest plan that runs: dp=2,sync=local:4,across=8"),
        ("dp=2,sync=local:4,outer=nesterov:0.7:1.5", "a momentum below 1"),
        ("dp=2,sync=gossip:ring", "gossip or gossip:random"),
        ("dp=2,sync=gossip,precision=fp16", "dp=2,precision=bf16,sync=gossip"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "verify"])
def test_bad_input_ends_with_2(folder: Path, verb: str, plan: str, text: str) -> None:
    more = ["--cluster", "dgx-h100"] if verb == "train" else []
    done = here(verb, "j.py", "--plan", plan, *more, cwd=folder)
    assert done.returncode == 2 and text in " ".join(done.stderr.split()), done.stderr
    assert not (folder / "runs").exists()
