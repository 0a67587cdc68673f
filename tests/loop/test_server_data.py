"""Loading under plans with a coordinator: ahead by the job's workers, and in the log where it is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.loop.train import train

JOB = """
import os, pathlib, time, torch
from torch import nn
import drumline as dl

class Data(torch.utils.data.Dataset):
    def __init__(self): self.rank, self.own = os.environ.get("RANK"), os.getpid()
    def __len__(self): return 64
    def __getitem__(self, i):
        with open(pathlib.Path(__file__).with_name("loads"), "a") as file:
            file.write("worker" if os.getpid() == self.own else "process")
            file.write(chr(10))
        time.sleep(0.02 if self.rank == "1" else 0.002)
        return torch.randn(6), i % 3

def made(workers):
    return dl.Job(model=lambda: nn.Linear(6, 3), loss=nn.functional.cross_entropy, data=Data, batch_size=4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01), steps=60, workers=workers)

def none(): return made(0)
def one(): return made(1)
"""


@pytest.mark.parametrize("plan", ["dp=1,sync=async", "dp=2,sync=async", "dp=1,sync=server"])
def test_whole_batches_are_loaded_by_the_jobs_workers(tmp_path: Path, plan: str) -> None:
    (tmp_path / "j.py").write_text(JOB)
    train(f"{tmp_path / 'j.py'}:one", plan, cluster="dgx-h100", output=tmp_path / "run")
    loads = (tmp_path / "loads").read_text().split()[-200:]
    assert loads.count("process") > 150, f"{loads.count('worker')} samples were loaded by workers themselves"


@pytest.mark.parametrize("plan", ["dp=2,sync=async", "dp=2,sync=stale:4"])
def test_the_slowest_worker_and_its_phase_are_in_the_log(tmp_path: Path, plan: str) -> None:
    (tmp_path / "j.py").write_text(JOB)
    run = train(f"{tmp_path / 'j.py'}:none", plan, cluster="dgx-h100", output=tmp_path / "run")
    last = run.steps[-1]
    assert (last.slowest_rank, last.slowest_phase) == (1, "data") and last.slowest_factor > 1.5
    assert last.data_share > 0
    oldest = max(s for step in run.steps for s in step.staleness)
    assert oldest > 0 and (plan == "dp=2,sync=async" or oldest <= 4), "the fast worker runs ahead, and not too far"
