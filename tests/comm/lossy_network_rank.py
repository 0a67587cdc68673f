"""A rank that trains over the network; it creates the file MARKER in step 6, and prints a digest of its weights.

lossy_network_rank.py MARKER
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.comm.environment import disconnect

STEPS = 30


def main() -> None:
    """Train, with messages of 600 KB in each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 384), torch.randn(8, 384))
    job = dl.Job(
        model=lambda: nn.Linear(384, 384),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        data=lambda: data,
        batch_size=8,
    )
    engine = dl.initialize(job, "dp=2,backend=gloo")
    for batch in engine.data(STEPS):
        if batch.step == 6:
            Path(sys.argv[1]).touch()
        engine.step(batch)
    weights = b"".join(p.detach().numpy().tobytes() for p in engine.module.parameters())
    print(hashlib.sha256(weights).hexdigest())
    disconnect()


main()
