"""Packed data under killed ranks: whoever goes on, with how many ranks and workers, reads the batches of the steps left."""

from __future__ import annotations

import json
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
from drumline.datasets.stream import split_range

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
             optimizer=partial(torch.optim.SGD, lr=0.1), batch_size=8, steps=10,
             data=lambda: Logged(os.environ["PACK"], shuffle=os.environ["SHUFFLE"]), workers=int(os.environ["WORKERS"]))
"""
SAMPLES, BATCH = 40, 8


def train(
    folder: Path, run: str, *, dp: int, options: list[str], workers: int = 0, shuffle: str = "samples"
) -> subprocess.CompletedProcess[str]:
    """Train on the pack in this folder; what each process reads goes to `ledger-RUN`."""
    (folder / "job.py").write_text(JOB)
    ledger = folder / f"ledger-{run}"
    ledger.mkdir()
    plan = ["--plan", f"dp={dp}", "--ranks", str(dp), "--save-every", "1", "--cluster", "dgx-a100", "-o", run]
    return subprocess.run(
        [sys.executable, "-m", "drumline", "train", "job.py", *plan, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "LEDGER": str(ledger),
            "PACK": str(folder / "pack"),
            "SHUFFLE": shuffle,
            "WORKERS": str(workers),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", ["samples", "shards"])
def test_every_sample_once_when_other_ranks_and_workers_go_on(tmp_path: Path, shuffle: str) -> None:
    numbers = torch.arange(float(SAMPLES))[:, None].expand(-1, 4)
    dl.pack(torch.utils.data.TensorDataset(numbers, torch.arange(SAMPLES) % 2), tmp_path / "pack", shard_size="10KB")
    killed = train(tmp_path, "a", dp=2, options=["--chaos", "kill:1@6", "--restarts", "0"], workers=2, shuffle=shuffle)
    assert killed.returncode == 5, killed.stderr
    done = train(tmp_path, "b", dp=3, options=["--resume", "a"], workers=1, shuffle=shuffle)
    assert done.returncode == 0, done.stderr
    applied = {
        run: [json.loads(r)["step"] for r in (tmp_path / run / "steps.jsonl").read_text().splitlines()] for run in "ab"
    }
    first = applied["b"][0]
    assert 1 <= first <= 6 and applied["b"] == list(range(first, 10)) and set(range(first)) <= set(applied["a"])
    stream = Stream(job(batch_size=BATCH), dl.PackedDataset(tmp_path / "pack", shuffle=shuffle))
    for run, dp, steps in (("a", 2, range(first)), ("b", 3, range(first, 10))):
        lines = [r for f in (tmp_path / f"ledger-{run}").iterdir() for r in f.read_text().splitlines()]
        read = {tuple(map(int, line.split())) for line in lines}
        for step in steps:
            batch = stream.samples(step)
            assert all(tuple(batch[i] for i in part) in read for part in split_range(BATCH, dp)), (run, step)
    for epoch in (range(5), range(5, 10)):
        assert sorted(i for step in epoch for i in stream.samples(step)) == list(range(SAMPLES))


@pytest.mark.slow
def test_every_sample_once_through_a_kill(tmp_path: Path) -> None:
    numbers = torch.arange(float(SAMPLES))[:, None].expand(-1, 4)
    dl.pack(torch.utils.data.TensorDataset(numbers, torch.arange(SAMPLES) % 2), tmp_path / "pack", shard_size="10KB")
    done = train(tmp_path, "run", dp=2, options=["--chaos", "kill:1@5"])
    assert done.returncode == 0, done.stderr
    stream = Stream(job(batch_size=BATCH), dl.PackedDataset(tmp_path / "pack"))
    parts = {step: [frozenset(p) for p in _halves(stream.samples(step))] for step in range(10)}
    where = {part: (step, rank) for step, halves in parts.items() for rank, part in enumerate(halves)}
    steps = defaultdict(list)
    for path in (tmp_path / "ledger-run").iterdir():
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
