"""`drumline train` on a disk that is full or read-only: a real one, in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i): return torch.ones(64) * i / 400, i % 2

def job():
    return dl.Job(model=lambda: nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 2)),
                  loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), data=Data,
                  batch_size=4, steps=12)
"""
TRAIN = f"'{sys.executable}' -m drumline train j.py --plan dp=1 --cluster dgx-h100"


def on_disk(folder: Path, options: str, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash where the folder `disk` is a memory disk with these mount options; skip if not allowed."""
    (folder / "disk").mkdir()
    (folder / "j.py").write_text(JOB)
    mount = ["unshare", "--mount", "bash", "-c", f"mount -t tmpfs -o {options} tmpfs disk || exit 99\n{line}"]
    try:
        done = subprocess.run(mount, cwd=folder, capture_output=True, text=True, timeout=250, env=dict(os.environ))
    except FileNotFoundError:
        pytest.skip("this system has no mount namespaces")
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"mounting is not allowed: {done.stderr.strip()[:100]}")
    return done


@pytest.mark.slow
def test_full_disk(tmp_path: Path) -> None:
    """Two checkpoints fit, a third does not: training goes on to its last step, and the second one is intact."""
    done = on_disk(
        tmp_path,
        "size=1800k",
        f"{TRAIN} -o disk/run --save-every 2; echo exit code $?; ls disk/run/checkpoints\n"
        f"{TRAIN} -o resumed --steps 14 --resume disk/run/checkpoints",
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "step 6 was not saved: No space left on device; trying again" in done.stdout
    assert "step 12/12" in done.stdout and "exit code 5" in done.stdout
    assert "step 12 was not saved: No space left on device" in done.stderr
    assert "rule:  earlier checkpoints are unchanged" in done.stderr
    assert "step-00000002\nstep-00000004\n" in done.stdout, "retention never removes the last good one"
    assert done.returncode == 0 and "step-00000004, step 4, saved under dp=1" in done.stdout
    assert (tmp_path / "resumed" / "run.json").exists()


@pytest.mark.slow
def test_full_disk_without_checkpoints(tmp_path: Path) -> None:
    """The record of the run has no room: every step is trained, and the end says what could not be written."""
    done = on_disk(tmp_path, "size=16k", f"{TRAIN} -o disk/run --log-every 1 --steps 40")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "step 40/40" in done.stdout
    assert "cannot be written: No space left on device" in done.stderr


@pytest.mark.slow
def test_read_only_disk(tmp_path: Path) -> None:
    done = on_disk(tmp_path, "size=1m,ro", f"{TRAIN} -o disk/run")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "disk/run cannot be a run folder: Read-only file system" in done.stderr
