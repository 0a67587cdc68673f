"""One trace of a batch of prime size: amounts per sample, and fixed ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.models import Affine
from drumline.tracing import trace
from drumline.tracing.traced_batch import PRIMES, TracedBatch, affine, choose_batch


def test_amounts_are_fixed_or_per_sample() -> None:
    batch = TracedBatch(prime=251, multiple=1, job_size=64)
    assert batch.amount(40.0, 10) == complex(40, 0)
    assert batch.amount(4.0 * 251 * 7, 251 * 7) == complex(0, 28)
    assert batch.at_job_size(batch.amount(3.0 * 251**2, 251**2)) == pytest.approx(3 * 64**2)  # grows with the square
    assert batch.amount(0.0, 0) == 0
    assert affine(complex(-1, 2)) == Affine(0.0, 2.0)


def test_the_prime_divides_no_other_size() -> None:
    assert choose_batch([3, 251 * 2, 0], 8, 1).prime == PRIMES[1]
    assert choose_batch([3], 8, 8).size == 8 * 251


class Pairs(nn.Module):
    """Needs an even batch, and compares all samples with all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.layer(x).view(2, -1, 8)
        assert 2 * len(a) == len(x)
        return a @ b.t()


def test_a_batch_that_must_be_even_and_is_squared() -> None:
    job = dl.Job(
        model=Pairs,
        loss=lambda logits, _: F.cross_entropy(logits, torch.arange(len(logits))),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=lambda: [(torch.zeros(16), 0)] * 4,
        batch_size=32,
    )
    profile = trace(job)
    model = next(x for x in profile.layers if x.kind == "Pairs")
    products = sum(op.flops.at(32) * op.count for op in model.ops if op.kind == "matmul" and op.phase == "forward")
    assert products == pytest.approx(2 * 16 * 16 * 8)
