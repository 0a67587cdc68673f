"""Models with injected faults on some ranks, which `verify` must detect and locate."""

from __future__ import annotations

from typing import Any
from unittest import mock

import small_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.plans import Plan
from drumline.runtime.verification.verify import verify

_REFERENCE = {"running": False}
"""The reference also runs on the first rank; a fault of that rank must not be in both."""


def faulty(rank: int) -> bool:
    """Whether this process is faulty now."""
    return dist.get_world_size() > 1 and dist.get_rank() == rank and not _REFERENCE["running"]


class _Scaled(torch.autograd.Function):
    """The identity with a gradient 1% too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 1.01


class Faulty(nn.Linear):
    """A linear layer with one fault on one rank."""

    def __init__(self, fault: str, rank: int) -> None:
        super().__init__(6, 6)
        self.fault, self.rank = fault, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = faulty(self.rank) and torch.is_grad_enabled()
        if bad and self.fault == "backward":
            x = _Scaled.apply(x)
        y = super().forward(x)
        if bad and self.fault == "forward":
            y = y + 1e-6
        if bad and self.fault == "tiny":
            y = y * (1 + 1e-8)
        if bad and self.fault == "weight":
            y = F.linear(x, _Scaled.apply(self.weight), self.bias)
        return y


class Model(nn.Module):
    """Three layers; the middle one has the fault."""

    def __init__(self, fault: str = "", rank: int = 1) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), Faulty(fault, rank), nn.Linear(6, 3)
        self.block = small_jobs.Residual(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(torch.tanh(self.middle(torch.tanh(self.first(x))))))


class WrongRate(torch.optim.SGD):
    """Its update is 1% too large under a plan."""

    def step(self, closure: Any = None) -> Any:
        rate = self.param_groups[0]["lr"]
        if dist.get_world_size() > 1 and not _REFERENCE["running"]:
            self.param_groups[0]["lr"] = 1.01 * rate
        result = super().step(closure)
        self.param_groups[0]["lr"] = rate
        return result


def check(fault: str, rank: int, plan: str, clip: float | None = None) -> Any:
    """On every rank: verify the model with the fault."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return (WrongRate if fault == "update" else torch.optim.SGD)(parameters, lr=0.1)

    job = dl.Job(
        model=lambda: Model(fault, rank),
        loss=F.cross_entropy,
        optimizer=sgd,
        clip=clip,
        batch_size=7,
        data=lambda: small_jobs.Samples("vector"),
    )
    return _verify(job, plan)


def check_norm(plan: str, spanning: bool) -> Any:
    """On every rank: verify a network with BatchNorm, with or without synchronized statistics."""
    job = small_jobs.make("cnn")
    if spanning:
        return _verify(job, plan)
    with mock.patch("drumline.runtime.core.rank_state.sync_batchnorms", lambda model, group: []):
        return _verify(job, plan)


def check_lost_micro(plan: str) -> Any:
    """On every rank: verify while the second micro-batch of the last rank is not counted."""
    from drumline.runtime.engine import Engine

    plain = Engine.loss_of

    def lossy(self: Any, micro: Any) -> Any:
        total, weight, own = plain(self, micro)
        return (total * 0 if faulty(dist.get_world_size() - 1) else total), weight, own

    with mock.patch.object(Engine, "loss_of", lossy):
        return _verify(small_jobs.make("mlp"), plan)


def _verify(job: dl.Job, plan: str) -> Any:
    from drumline.runtime.verification import verify as module

    plain = module.run_one_device

    def marked(*arguments: Any, **named: Any) -> Any:
        _REFERENCE["running"] = True
        try:
            return plain(*arguments, **named)
        finally:
            _REFERENCE["running"] = False

    with mock.patch.object(module, "run_one_device", marked):
        return verify(job, Plan.parse(plan), steps=2)
