"""`drumline train` with checkpoints: it resumes under any plan, and saves before it ends on a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import nn

from drumline.cli.export import export
from drumline.core.errors import InputError
from drumline.loop.checkpoints import CheckpointOptions
from drumline.loop.train import train as train_job

JOB = """
import time, torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __init__(self, nap=0.0): self.nap = nap
    def __len__(self): return 40
    def __getitem__(self, i):
        time.sleep(self.nap)
        return torch.randn(6, generator=torch.Generator().manual_seed(i)), i % 3

def made(nap, steps):
    return dl.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3)),
        loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        data=lambda: Data(nap), batch_size=8, steps=steps)

def job(): return made(0.0, 6)
def slow(): return made(0.02, 10000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "j.py").write_text(JOB)
    return tmp_path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "drumline", *map(str, arguments)]


def train(folder: Path, *arguments: object, plan: str = "dp=2", run: str = "run", code: int = 0) -> Any:
    line = command("train", "j.py", "--plan", plan, "--cluster", "dgx-h100", "-o", run, *arguments)
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done


def losses(folder: Path, run: str = "run") -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / run / "steps.jsonl").read_text().splitlines()]


def checkpoints(folder: Path, run: str = "run") -> list[str]:
    return sorted(p.name for p in (folder / run / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_save_resume_export(folder: Path) -> None:
    train(folder, "--steps", 8, run="straight")
    straight = losses(folder, "straight")
    first = train(folder, "--steps", 5, "--save-every", 2, "--resume", "auto")
    assert "no checkpoint to resume from: the run starts at step 0" in first.stdout
    assert checkpoints(folder) == ["step-00000004", "step-00000005"] and losses(folder) == straight[:5]
    second = train(folder, "--steps", 8, "--resume", "auto", "--save-every", 2, "--keep", 3)
    assert "step-00000005, step 5, saved under dp=2" in second.stdout
    assert losses(folder) == straight  # bit for bit; what was there is kept
    elapsed = [json.loads(line)["elapsed"] for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]
    assert elapsed == sorted(elapsed) and elapsed[5] > elapsed[4] > 0, "a resumed run goes on counting its seconds"
    assert "(Young/Daly): --save-every" in second.stdout
    done = subprocess.run(
        command("export", "run", "-o", "out", "--json"), cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and list(json.loads(done.stdout)["files"]) == ["model.safetensors"], done.stderr
    plain = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    plain.load_state_dict(safetensors.torch.load_file(folder / "out" / "model.safetensors"), strict=True)


REFUSED = [
    (CheckpointOptions(2, 1), "keep >= 2"),
    (CheckpointOptions(-1), "--save-every -1"),
    (CheckpointOptions(resume="nowhere"), "no checkpoint nowhere"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_bad_options_are_refused_before_the_start(folder: Path, options: CheckpointOptions, text: str) -> None:
    with pytest.raises(InputError, match=text):
        train_job(folder / "j.py", "dp=2", cluster="dgx-h100", output=folder / "run", checkpoints=options)
    assert not (folder / "run").exists()


def test_export_refuses(tmp_path: Path) -> None:
    for arguments, text in (
        ({"checkpoint": "nowhere"}, "no checkpoint nowhere"),
        ({"tied": "twice"}, "once or each"),
        ({"largest": "big"}, "--max-shard-size big"),
    ):
        given = {"checkpoint": ".", "output": str(tmp_path / "out"), "largest": "5GB", "tied": "once", "as_json": False}
        with pytest.raises(InputError, match=text):
            export(**{**given, **arguments})


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preemption(folder: Path, number: signal.Signals) -> None:
    """The step is finished, the checkpoint complete, the exit code 0; the next run resumes from it."""
    line = command("train", "j.py:slow", "--plan", "dp=2", "--cluster", "dgx-h100", "-o", "run", "--save-every", 1000)
    process = subprocess.Popen(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 90
        while not (folder / "run" / "steps.jsonl").exists() or len(losses(folder)) < 2:
            assert process.poll() is None and time.monotonic() < end, process.communicate()
            time.sleep(0.05)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, out + err
    assert "preempted: continue with --resume auto" in err
    [name] = checkpoints(folder)
    steps = int(name[5:])
    assert len(losses(folder)) == steps >= 2
    assert not (folder / "run" / "checkpoints" / "STOP").exists()
    again = train(folder, "--resume", "auto", "--steps", steps + 1, plan="dp=1")
    assert f"step {steps}" in again.stdout
