"""Running statistics and other buffers under plans with a coordinator: sent if they change, and never lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_server_faults import weights

from drumline.loop.checkpoints import CheckpointOptions
from drumline.loop.restarts import FaultOptions
from drumline.loop.train import train
from drumline.reports import Run

JOB = """
import torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        return 5 + torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64), i % 3

class Masked(nn.Module):
    def __init__(self, elements):
        super().__init__()
        self.register_buffer("mask", torch.ones(elements), persistent=False)
        self.inner = nn.Linear(6, 3).double()
    def forward(self, x): return self.inner(x) * self.mask[0]

def norm():
    last = nn.BatchNorm1d(8, affine=False, momentum=None)  # averages over all steps: their number counts, too
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), last, nn.Linear(8, 3)).double()

def made(model, steps):
    return dl.Job(model=model, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        data=Data, batch_size=8, steps=steps)

def norms(): return made(norm, 30)
def mask(): return made(lambda: Masked(18 << 20), 3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "j.py").write_text(JOB)
    return tmp_path


def trained(folder: Path, name: str, plan: str, *, steps: int = 30, chaos: str = "", resume: str | None = None) -> Run:
    """A run with norms; `resume` names an earlier one."""
    return train(
        f"{folder / 'j.py'}:norms",
        plan,
        cluster="dgx-h100",
        steps=steps,
        output=folder / name,
        checkpoints=CheckpointOptions(every=5, resume=None if resume is None else str(folder / resume / "checkpoints")),
        faults=FaultOptions(chaos=chaos),
    )


def test_running_statistics_survive_a_resume_and_a_lost_worker(folder: Path) -> None:
    whole = weights(trained(folder, "whole", "dp=1,sync=server"))
    assert whole["buffer/0.running_mean@0"].min() > 4 and whole["buffer/2.num_batches_tracked@0"] == 30
    trained(folder, "half", "dp=1,sync=server", steps=15)
    resumed = weights(trained(folder, "resumed", "dp=1,sync=server", resume="half"))
    replaced = weights(trained(folder, "replaced", "dp=1,sync=server", chaos="kill:0@12"))
    server = weights(trained(folder, "server", "dp=1,sync=server", chaos="kill:1@12/optimizer"))
    for which, other in enumerate((resumed, replaced, server)):
        wrong = [n for n, t in whole.items() if n.startswith(("buffer/", "model/")) and not torch.equal(t, other[n])]
        assert not wrong, f"{wrong} of {which}"
    alone = weights(trained(folder, "alone", "dp=1"))
    assert all(torch.allclose(t, alone[n], rtol=1e-12) for n, t in whole.items() if n.startswith("buffer/"))


def test_workers_that_come_later_begin_with_the_servers_statistics(folder: Path) -> None:
    trained(folder, "first", "dp=1,sync=async")
    more = weights(trained(folder, "more", "dp=2,sync=async", steps=34, resume="first", chaos="kill:1@31"))
    assert more["buffer/0.running_mean@0"].min() > 4, "a worker that began with zeros would halve them"


@pytest.mark.parametrize("plan", ["dp=1,sync=async", "dp=2,sync=server,servers=2"])
def test_a_large_mask_is_not_sent(folder: Path, plan: str) -> None:
    command = [sys.executable, "-m", "drumline", "train", "j.py:mask", "--plan", plan, "--cluster", "dgx-h100"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "waits for a parameter server" not in run.stdout + run.stderr
