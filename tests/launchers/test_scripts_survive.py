"""`drumline run`: restarts, injected faults, hangs, signals, and no process left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drumline.core.errors import RankFailed
from drumline.launchers import hang_watch
from drumline.launchers.scripts import run_script

TRAIN = """
import os, sys, torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): return torch.randn(6, generator=torch.Generator().manual_seed(i)), i % 3

job = dl.Job(model=lambda: nn.Linear(6, 3), loss=nn.functional.cross_entropy,
             optimizer=lambda p: torch.optim.SGD(p, lr=0.1), data=Data, batch_size=8, steps=8)
engine = dl.initialize(job, "dp=2")
if os.path.isdir("checkpoints"):
    engine.load("checkpoints")
for batch in engine.data(8 - engine.position):
    loss = engine.step(batch)
    engine.save("checkpoints")
if engine.rank == 0:
    print(os.environ["TORCHELASTIC_RESTART_COUNT"], loss, flush=True)
"""
WAITS = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
def stop(number, frame):
    time.sleep(0.5)
    pathlib.Path(f"saved-{os.environ['RANK']}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(f"child-{os.environ['RANK']}").write_text(str(child.pid))
time.sleep(60)
"""

WAITS_FOR_ANOTHER = """
import os, sys, time, torch, torch.distributed as dist
from drumline.comm.environment import connect
connect(backend=sys.argv[1])
dist.all_reduce(torch.ones(1))
if sys.argv[2:] == ["compute"]:
    time.sleep(14)
    sys.exit(0)
if os.environ["RANK"] == "1":
    time.sleep(600)
dist.all_reduce(torch.ones(2))
"""


def run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(TRAIN)
    line = [sys.executable, "-m", "drumline", "run", *words, "script.py"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_restarts_and_chaos(tmp_path: Path) -> None:
    for name in ("straight", "disturbed"):
        (tmp_path / name).mkdir()
    count, straight = run(tmp_path / "straight").stdout.split()
    again, disturbed = (done := run(tmp_path / "disturbed", "--restarts", "2", "--chaos", "kill:1@4")).stdout.split()
    assert (count, again) == ("0", "1") and straight == disturbed
    assert "rank 1 ended by signal SIGKILL; starting all ranks again (1 of 2)" in done.stderr


@pytest.mark.slow
def test_without_restarts_and_with_a_hang(tmp_path: Path) -> None:
    assert "rank 1 ended with exit code 9" in run(tmp_path, "--chaos", "exit:1@4", code=5).stderr
    error = run(tmp_path, "--chaos", "hang:1@6", "--hang-timeout", "2s", code=5).stderr
    assert "rank 1" in error and "no progress for 2 s" in error
    assert "--chaos nonsense" in run(tmp_path, "--chaos", "nonsense", code=2).stderr


@pytest.mark.slow
def test_signals_are_passed_on_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    line = [sys.executable, "-m", "drumline", "run", "script.py"]
    launcher = subprocess.Popen(line, cwd=tmp_path, start_new_session=True)
    notes = [tmp_path / "child-0", tmp_path / "child-1"]
    end = time.monotonic() + 60
    while not all(note.exists() and note.read_text() for note in notes):
        assert time.monotonic() < end and launcher.poll() is None
        time.sleep(0.05)
    children = [psutil.Process(int(note.read_text())) for note in notes]
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(20) == 0
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_does_not_come_is_found_without_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """A script that computes longer than ranks wait for each other goes on."""
    script = tmp_path / "script.py"
    script.write_text(WAITS_FOR_ANOTHER)
    monkeypatch.setattr(hang_watch, "START", 12.0)
    monkeypatch.setattr(hang_watch, "default_timeout", lambda: 1.0)
    assert run_script(str(script), [backend, "compute"], ranks=2) == (0, 0)
    with pytest.raises(RankFailed, match="rank 1 is missing: .*\n.*waits in collective 2: all_reduce") as caught:
        run_script(str(script), [backend], ranks=2)
    assert caught.value.exit_code == 5 and "DRUMLINE_TIMEOUT" in caught.value.fix
