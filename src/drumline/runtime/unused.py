"""Whether every trained parameter gets a gradient: DDP must be told, or it waits for one that never comes."""

from __future__ import annotations

import warnings

import torch

from ..core.errors import DrumlineError
from ..core.job import Job
from ..tracing.fake import call, fake_batch, fake_mode, fake_model, first_sample
from .given import Absent


def unused_parameters(job: Job) -> bool:
    """True when a fake step leaves a parameter without a gradient, or cannot be run (then anything may happen)."""
    if isinstance(job.loss, Absent):  # the loop has it, and we cannot see it
        return True
    mode = fake_mode()
    try:
        sample = first_sample(job)
        model, _ = fake_model(job, mode)
        value, target = fake_batch(job, mode, sample=sample, n=2)
        with mode, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is worth a warning warns again in the real run
            loss = job.loss(call(model, value), target)
            loss = loss[0] if isinstance(loss, tuple | list) else loss
            loss.backward()
    except DrumlineError:
        raise
    except Exception:
        return True
    return any(p.requires_grad and p.grad is None for p in model.parameters())
