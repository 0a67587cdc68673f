"""Fine-tuning with LoRA: a frozen GPT-2 of Hugging Face, and two small matrices at each of its projections.

The model is made from a configuration, so nothing is downloaded; with `GPT2LMHeadModel.from_pretrained("gpt2")` instead
it starts from published weights. Only the small matrices are trained, and only they have gradients and states.

    drumline verify examples/lora.py --plan dp=2,zero=3 --steps 2

    passed: dp=2,zero=3 computes what one device computes

The first losses: 4.823, 4.756, 4.612
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import drumline as dl

CONTEXT, RANK, SCALE = 32, 4, 2.0
TEXT = "Drumline keeps your ranks in step: measure, profile, plan, verify, train, report. " * 40


class LoRA(nn.Module):
    """A frozen projection, plus the product of two small matrices; it begins as the projection alone."""

    def __init__(self, base: Conv1D) -> None:
        super().__init__()
        self.base = base
        inputs, outputs = base.weight.shape
        self.down = nn.Parameter(torch.randn(inputs, RANK) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(RANK, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + SCALE * (x @ self.down) @ self.up


class Tuned(nn.Module):
    """The model with adapters at `c_attn` and `c_proj` of every attention."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=128,
            n_positions=CONTEXT,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        self.lm = GPT2LMHeadModel(config)
        self.lm.requires_grad_(False)
        for block in self.lm.transformer.h:
            block.attn.c_attn, block.attn.c_proj = LoRA(block.attn.c_attn), LoRA(block.attn.c_proj)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm(input_ids=tokens).logits


class Windows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of characters, each with its next characters as the target."""

    def __init__(self) -> None:
        self.tokens = torch.tensor(list(TEXT.encode("ascii")))

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.tokens[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def job() -> dl.Job:
    """Trained on batches of 16 windows."""
    return dl.Job(
        model=Tuned,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=Windows,
        batch_size=16,
        steps=30,
    )
