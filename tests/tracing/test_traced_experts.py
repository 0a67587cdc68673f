"""A traced mixture of experts: its layers list their experts, and the planner offers `ep` for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.clusters import load
from drumline.costs import cost_model
from drumline.models.profile import Profile
from drumline.planner.space import candidates
from drumline.plans import Plan
from drumline.tracing import trace


class Block(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.experts = dl.Experts(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weight, index = self.router(y).softmax(-1).topk(2)
        return x + self.experts(y, index, weight)


def job() -> dl.Job:
    data = torch.utils.data.TensorDataset(torch.randn(64, 6, 32), torch.randn(64, 6, 32))
    return dl.Job(
        model=lambda: nn.Sequential(Block(32, 8), Block(32, 8)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        loss=nn.functional.mse_loss,
        data=lambda: data,
        batch_size=64,
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    return trace(job())


def test_layers_list_their_experts(profile: Profile) -> None:
    listed = [x.experts for x in profile.layers if x.experts]
    assert sum(e.parameters for e in listed) == 2 * 8 * (2 * 4 * 32 * 32 + 5 * 32)
    assert {(e.count, e.active) for e in listed} == {(8, 2)}


def test_ep_is_offered_and_priced(profile: Profile) -> None:
    cluster = load("dgx-h100").with_devices(8)
    plans = list(candidates(profile, cluster, Plan()))
    assert {p.ep for p in plans if p.dp == 8} >= {1, 2, 4, 8} and not any(p.splits_model for p in plans)
    model = cost_model(profile, cluster, "fp32")
    alone, shared = (model.memory(Plan(dp=8, ep=ep)).parameters for ep in (1, 8))
    assert shared < 0.25 * alone
