"""One training loop for one device, many devices, many nodes, and a varying number of ranks.

    python examples/own_loop.py checkpoints 4          # one device
    drumline run -n 2 examples/own_loop.py checkpoints 4   # resumes with two ranks
    torchrun --standalone --nproc-per-node 3 examples/own_loop.py checkpoints 4   # and with three

The second argument is the number of steps. Every start resumes from the newest checkpoint, written by any number of
ranks. A third argument is a plan, such as dp=2,zero=3; without one every rank is a replica.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl


def job() -> dl.Job:
    """Classify points by their quadrant."""
    points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    return dl.Job(
        model=lambda: nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4)),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=lambda: [(x, int(x[0] > 0) + 2 * int(x[1] > 0)) for x in points],
        batch_size=50,
    )


def main() -> None:
    """Resume, train, save."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    engine = dl.initialize(job(), sys.argv[3] if len(sys.argv) > 3 else None)
    if folder.exists():
        engine.load(folder)
    for batch in engine.data(steps):
        loss = engine.step(batch)
        if engine.rank == 0:
            print(f"step {engine.steps}, {engine.ranks} ranks: loss {loss:.6f}", flush=True)
    engine.save(folder)
    engine.finish_saves()


if __name__ == "__main__":
    main()
