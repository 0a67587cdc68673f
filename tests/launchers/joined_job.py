"""A small job for ranks of other launchers. It counts how often it was made, and can end one of its ranks."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import drumline as dl

KILL = "JOINED_JOB_KILL"
"""RANK:SAMPLES[:TIMES]: the rank ends by SIGKILL after that many samples, in the first starts."""

SLEEP = "JOINED_JOB_SLEEP"
"""Seconds that a sample takes."""

MODEL = "JOINED_JOB_MODEL"
"""Seconds that the model takes to be made; meanwhile there is a file with the number of the rank."""


def model() -> nn.Module:
    if seconds := float(os.environ.get(MODEL, "0")):
        Path(f"making-{os.environ.get('RANK', '0')}").touch()
        time.sleep(seconds)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Samples(Dataset[Any]):
    """Random samples; counts those that it has given."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.data = TensorDataset(
            torch.randn(96, 8, generator=generator), torch.randint(0, 3, (96,), generator=generator)
        )
        self.given = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        self.given += 1
        time.sleep(float(os.environ.get(SLEEP, "0")))
        rank, _, rest = os.environ.get(KILL, "").partition(":")
        if rank and rank == os.environ.get("RANK", os.environ.get("SLURM_PROCID")):
            samples, _, times = rest.partition(":")
            if self.given > int(samples) and _one_more(int(times or 1)):
                os.kill(os.getpid(), signal.SIGKILL)
        return self.data[i]


def _one_more(times: int) -> bool:
    """Whether this is one of the first kills, counted in files."""
    done = len(list(Path().glob("killed-*")))
    if done < times:
        tempfile.mkstemp(prefix="killed-", dir=".")
    return done < times


def job() -> dl.Job:
    return dl.Job(model=model, loss=F.cross_entropy, optimizer=optimizer, data=Samples, batch_size=12, steps=20)


def failing() -> dl.Job:
    """A job whose data fail on rank 1."""

    def data() -> Samples:
        if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            raise ValueError("no data here")
        return Samples()

    return dl.Job(model=model, loss=F.cross_entropy, optimizer=optimizer, data=data, batch_size=12, steps=20)
