"""A training under a launcher that does not watch its ranks: rank 1 stops in the middle of a step.

torchrun --nproc-per-node 2 hanging_rank.py sleep|stop|busy|forward BACKEND
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl

HOW, BACKEND = sys.argv[1:3]


def hang() -> None:
    """Stop for good: asleep, stopped by a signal, or in a C function that holds the interpreter lock."""
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif HOW == "busy":
        ctypes.PyDLL(None).sleep(600)
    else:
        time.sleep(600)


def main() -> None:
    """Train; the fault comes in step 6."""
    torch.manual_seed(0)  # ranks with different data are refused
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
    job = dl.Job(
        model=lambda: nn.Linear(4, 4),
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        data=lambda: data,
        batch_size=8,
    )
    engine = dl.initialize(job, f"dp=2,backend={BACKEND}")
    for batch in engine.data(200):
        if batch.step == 6 and engine.rank == 1:
            if HOW == "forward":
                engine.module.register_forward_pre_hook(lambda *_: hang())
            else:
                hang()
        engine.step(batch)
        time.sleep(0.05)


main()
