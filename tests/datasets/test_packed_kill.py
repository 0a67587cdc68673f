"""Packed data under a killed rank: the restarted run reads exactly the batches that the lost one would have."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from test_stream import job

import drumline as dl
from drumline.datasets import Stream

JOB = """
import os
from functools import partial
import torch
from torch import nn
import drumline as dl

class Logged(dl.PackedDataset):
    def collated(self, indices):
        with open(f"{os.environ['LEDGER']}/{os.getpid()}", "a") as f:
            f.write(" ".join(map(str, indices)) + "\\n")
        return super().collated(indices)

job = dl.Job(model=lambda: nn.Linear(4, 2), loss=nn.functional.cross_entropy,
             optimizer=partial(torch.optim.SGD, lr=0.1), data=lambda: Logged(os.environ["PACK"]), batch_size=8, steps=10)
"""
SAMPLES, BATCH = 40, 8


@pytest.mark.slow
def test_every_sample_once_through_a_kill(tmp_path: Path) -> None:
    numbers = torch.arange(float(SAMPLES))[:, None].expand(-1, 4)
    dl.pack(torch.utils.data.TensorDataset(numbers, torch.arange(SAMPLES) % 2), tmp_path / "pack", shard_size="10KB")
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "ledger").mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "drumline",
            "train",
            "job.py",
            "--plan",
            "dp=2",
            "--ranks",
            "2",
            "--save-every",
            "1",
            "--chaos",
            "kill:1@5",
            "-o",
            "run",
            "--no-corrections",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "LEDGER": str(tmp_path / "ledger"), "PACK": str(tmp_path / "pack")},
    )
    assert done.returncode == 0, done.stderr
    stream = Stream(job(batch_size=BATCH), dl.PackedDataset(tmp_path / "pack"))
    parts = {step: [frozenset(p) for p in _halves(stream.samples(step))] for step in range(10)}
    where = {part: (step, rank) for step, halves in parts.items() for rank, part in enumerate(halves)}
    steps = defaultdict(list)
    for path in (tmp_path / "ledger").iterdir():
        read = [where.get(frozenset(map(int, line.split()))) for line in path.read_text().splitlines()]
        ranks = [r for r in read if r is not None]
        for (step, rank), (later, same) in pairwise(ranks):
            assert (later, same) == (step + 1, rank), "a rank reads one step after the other"
        for step, rank in ranks:
            steps[step, rank].append(path.name)
    assert sorted(steps) == [(step, rank) for step in range(10) for rank in range(2)], "no batch is lost"
    assert any(len(readers) > 1 for readers in steps.values()), "the restarted ranks read some steps again"
    for epoch in (range(5), range(5, 10)):
        assert sorted(i for s in epoch for p in parts[s] for i in p) == list(range(SAMPLES))


def _halves(samples: list[int]) -> list[list[int]]:
    return [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
