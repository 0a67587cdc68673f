"""A traced language model costs the same as the zoo model of its shape; own operators cost what they move."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.clusters import load
from drumline.costs import OperatorCostModel, cost_model
from drumline.costs.fitted import FittedCostModel
from drumline.costs.fitted.transformer import transformer_of
from drumline.models import Profile, zoo
from drumline.planner import search
from drumline.planner.reserve import reserve_bytes
from drumline.plans import Plan
from drumline.tracing import trace

EIGHT = load("dgx-h100").with_devices(8)
WIDTH, HEADS, BLOCKS, WORDS, LENGTH, BATCH = 768, 12, 12, 50257, 1024, 64


def by_hand(x: torch.Tensor) -> torch.Tensor:
    """GELU as some write it: one operator after the other."""
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    """Attention and a feed-forward part, norms before them."""

    def __init__(self, gelu: Any, *, keys: int = HEADS, causal: bool = True) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.parts = [WIDTH, keys * (WIDTH // HEADS), keys * (WIDTH // HEADS)]
        self.qkv, self.out = nn.Linear(WIDTH, sum(self.parts)), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gelu, self.causal, self.shared = gelu, causal, HEADS // keys

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, _ = x.shape
        q, k, v = (
            p.view(n, t, -1, WIDTH // HEADS).transpose(1, 2) for p in self.qkv(self.before(x)).split(self.parts, -1)
        )
        k, v = (p.repeat_interleave(self.shared, 1) if self.shared > 1 else p for p in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, WIDTH))
        return x + self.down(self.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """The zoo's gpt:125m as a module."""

    def __init__(self, gelu: Any = F.gelu, **kinds: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(gelu, **kinds) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.cache
def traced(**kinds: Any) -> Profile:
    row = torch.zeros(LENGTH, dtype=torch.long)
    job = dl.Job(
        model=lambda: GPT(**kinds),
        loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        batch_size=BATCH,
        optimizer=lambda p: torch.optim.AdamW(p, fused=True),
        data=lambda: [(row, row)] * BATCH,
    )
    return trace(job, precision="bf16", device="cuda")


def seconds(profile: Profile, plan: str) -> float:
    model = cost_model(profile, EIGHT, "bf16")
    assert isinstance(model, FittedCostModel)
    return model.estimate(Plan.parse(f"{plan},precision=bf16")).step_seconds


@pytest.mark.parametrize(
    "plan",
    [
        "dp=8",
        "dp=8,zero=3",
        "dp=1",
        "dp=2,tp=4",
        "dp=4,pp=2,micro=4",
        "dp=8,micro=8",
        "dp=8,recompute=full",
        "dp=8,zero=1,micro=2",
    ],
)
def test_a_trace_costs_the_same_as_the_formula(plan: str) -> None:
    formula = zoo.profile("gpt:125m", batch_size=BATCH, sequence=LENGTH)
    assert seconds(traced(), plan) == pytest.approx(seconds(formula, plan), rel=0.06)


def test_model_sizes_are_recognised() -> None:
    model = transformer_of(traced())
    assert model is not None
    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "gated", "vocabulary", "tied", "sequence", "causal")
    assert tuple(int(getattr(model, k)[0]) for k in keys) == (
        BLOCKS,
        WIDTH,
        HEADS,
        HEADS,
        4 * WIDTH,
        0,
        WORDS,
        1,
        LENGTH,
        1,
    )


def test_repeated_keys_are_counted_by_their_projection() -> None:
    grouped, whole = transformer_of(traced(keys=4, causal=False)), transformer_of(traced())
    assert grouped is not None and whole is not None
    assert (grouped.kv_heads[0], grouped.causal[0]) == (4, 0)
    assert grouped.layer_weights[0] < whole.layer_weights[0]


def test_own_operators_cost_what_they_move() -> None:
    plain, slow = seconds(traced(), "dp=8"), seconds(traced(gelu=by_hand), "dp=8")
    assert slow > 1.3 * plain


def test_the_answer_names_the_cost_model() -> None:
    answer, estimates = search(traced(), EIGHT, precision="bf16", brief=True)
    best = estimates[str(answer.best.plan)]
    assert "fitted on" in answer.scored_by and "model: traced" in best.origin and best.error < 0.5
    alone = cost_model(traced(), EIGHT, "bf16").estimate(answer.best.plan)
    assert best == replace(alone, reserve_bytes=reserve_bytes(None, EIGHT))
    assert not any("tp=8" in str(c.plan) for c in answer.candidates)  # 12 heads


def test_other_cases_use_the_operator_model() -> None:
    assert isinstance(
        cost_model(traced(), load("mi300x").with_devices(8), "bf16"), OperatorCostModel
    )  # no published runs
    assert isinstance(
        cost_model(replace(traced(), layers=traced().layers[:-2]), EIGHT, "bf16"), OperatorCostModel
    )  # without its head
