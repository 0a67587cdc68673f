"""Models as in popular libraries: weights read outside their layer, layer drop, grouped matmuls, scripted functions."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import hf_jobs
import small_jobs
import torch
import torch.nn.functional as F
from torch import nn

from drumline.plans import Plan
from drumline.runtime.verification.verify import Verification, verify

WORDS = hf_jobs.WORDS


class Reading(nn.Module):
    """The head multiplies by the embedding's weight, and a table without a forward is read."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks, self.norm = nn.Sequential(small_jobs.Residual(8), small_jobs.Residual(8)), nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.norm(self.table.weight)[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


class Dropping(nn.Module):
    """Draws for every layer whether to skip it, whatever the rate."""

    def __init__(self, layerdrop: float = 0.0) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.layers, self.head = nn.ModuleList(small_jobs.Residual(6) for _ in range(3)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = layer(x)
        return self.head(x)


class Grouped(nn.Module):
    """Rows are sorted by expert and multiplied in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.head = nn.Linear(6, 8), nn.Linear(8, 3, bias=False), nn.Linear(8, 3)
        self.experts = nn.Parameter(torch.randn(3, 8, 8) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        share, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, 3).sum(0).cumsum(0).to(torch.int32)
        y = F.grouped_mm(x[order], self.experts, offs=ends)
        return self.head(x + share[:, None] * torch.zeros_like(y).index_copy(0, order, y))


def _scale(size: int, factor: int) -> torch.Tensor:
    """A square root in float32, as DeBERTa scripts it."""
    return torch.sqrt(torch.tensor(size, dtype=torch.float) * factor)


def _span(x: torch.Tensor, most: int) -> torch.Tensor:
    """A number made of a shape, as a tensor, as DeBERTa scripts it."""
    return torch.tensor(min(x.size(-1), most))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch would not have people write it any more, and models have it
    scripted_scale, scripted_span = torch.jit.script(_scale), torch.jit.script(_span)


class Scripted(nn.Module):
    """Divides by what a scripted function computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = small_jobs.Residual(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x) / scripted_scale(x.shape[-1], 3))


class Spanned(nn.Module):
    """Slices by a number that a scripted function makes of a shape, and masks by the smallest number of a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = small_jobs.Residual(6), nn.Linear(6, 3)
        self.table = nn.Parameter(torch.linspace(0, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = scripted_span(x, 4)
        x = self.block(x) + self.table[8 - n : 8 + n].sum()
        least = torch.full((), torch.finfo(x.dtype).min, device=x.device)  # of the default dtype, as in XGLM
        return self.head(torch.where(x > -1, x, torch.max(x * 0.1, least)) * torch.tensor([0.1]))


def doubles() -> list[tuple[torch.Tensor, int]]:
    """Samples made of Python floats, as float32: in float64 they would be others."""
    return [(torch.tensor([0.1 * i, 0.7, 0.3, 1 / (i + 1), 0.0, 1.0], dtype=torch.float32), i % 3) for i in range(17)]


class Sound(nn.Module):
    """Two convolutions along a sequence, with biases, before a head: the second sums over split channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 8, 3, stride=2, padding=1)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.conv2(F.gelu(self.conv1(x.transpose(1, 2)))))
        return self.head(self.norm(y.transpose(1, 2)).mean(1))


class Copies(nn.Module):
    """torch's own transformer, whose constructor copies its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(6, 2, 1, 1, 8, 0.1, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, None], x[:, None].flip(2))[:, 0])


class Moments(nn.Module):
    """A module with two outputs of one kernel, of which the model uses one."""

    class Both(nn.Module):
        """The variance and the mean of a linear map."""

        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.var_mean(self.map(x), -1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = Moments.Both(), nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.both(x)[0])


def mixtral() -> nn.Module:
    """Mixtral from transformers: with grouped matmuls and a key-value cache."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=12,
            num_local_experts=4,
            max_position_embeddings=16,
        )
    )


def llama() -> nn.Module:
    """Llama from transformers: with a key-value cache, and norms in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=12,
            max_position_embeddings=16,
            use_cache=True,
        )
    )


def bart() -> nn.Module:
    """BART, which draws for every layer whether it is dropped."""
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=WORDS,
            d_model=8,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=12,
            decoder_ffn_dim=12,
            max_position_embeddings=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


_JOBS: dict[Any, dict[str, Any]] = {
    Reading: {"kind": "tokens", "loss": small_jobs.tokens_loss},
    Sound: {"kind": "series"},
    mixtral: {"data": lambda: hf_jobs.Sentences(17), "loss": hf_jobs.loss},
    llama: {"data": lambda: hf_jobs.Sentences(17), "loss": hf_jobs.loss},
    bart: {"data": lambda: hf_jobs.Pairs(17), "loss": hf_jobs.loss},
}


def run(model: Any, plan: str, steps: int = 3) -> Verification | None:
    """On every rank: verify a model under a plan; small layers are units, as large ones are."""
    job = small_jobs.make("mlp", model=model, clip=None, **_JOBS.get(model, {}))
    with mock.patch("drumline.tracing.layers.LEAST_UNIT", 40):
        return verify(job, Plan.parse(plan), steps=steps)


def run_doubles(plan: str) -> Verification | None:
    """The same of a model whose data is made of doubles."""
    return verify(small_jobs.make("mlp", data=doubles), Plan.parse(plan), steps=3)


def run_dropping(plan: str) -> Verification | None:
    """The same of a model that does drop layers."""
    return verify(small_jobs.make("mlp", model=lambda: Dropping(0.5)), Plan.parse(plan), steps=1)


def run_single(plan: str) -> Verification | None:
    """A BatchNorm over vectors, where the last micro-batch of the third batch has one sample."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    return verify(small_jobs.make("mlp", model=model), Plan.parse(plan), steps=3)
