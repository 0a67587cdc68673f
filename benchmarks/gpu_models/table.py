"""The models with their size, precision and plan. Libraries are imported when a model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl

from . import own

LENGTH, WORDS = 1024, 32768
SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """One model to predict and to run."""

    name: str
    make: Callable[[], nn.Module]
    sample: Callable[[int], tuple[Any, Any]]
    """A batch of n samples, on the CPU."""
    batch: int
    plan: str
    """In the plan notation; a pure bf16 model has its type from `make`."""
    library: str = ""
    """What it is from."""
    dtype: torch.dtype | None = None
    """The type of its parameters and inputs, if it is not fp32."""

    def job(self, batch: int | None = None) -> dl.Job:
        """The job, with its own batch size or another."""
        x, y = self.sample(2)
        data = [(_pick(x, 0), _pick(y, 0))] * SAMPLES
        return dl.Job(
            model=lambda: self.make().to(self.dtype) if self.dtype else self.make(),
            data=lambda: data,
            batch_size=batch or self.batch,
            loss=_loss,
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-5),
            clip=1.0,
        )


def _pick(value: Any, i: int) -> Any:
    return value[i]


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    if logits.dim() == 3:
        logits, target = logits.flatten(0, 1), target.flatten()
    return F.cross_entropy(logits, target)


def tokens(words: int, length: int) -> Callable[[int], tuple[Any, Any]]:
    """Batches of random tokens, and the next ones as targets."""

    def sample(n: int) -> tuple[Any, Any]:
        both = torch.randint(words, (n, length + 1), generator=torch.Generator().manual_seed(0))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    return sample


def images(n: int) -> tuple[Any, Any]:
    """Random images of 224 x 224, and their classes."""
    return torch.randn(n, 3, 224, 224), torch.randint(1000, (n,))


def vectors(n: int) -> tuple[Any, Any]:
    """Random vectors, and their classes."""
    return torch.randn(n, 1024), torch.randint(1000, (n,))


def _vision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return make


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0, attn_implementation="sdpa")
    model: nn.Module = BertForMaskedLM(config)
    return model


def gpt(width: int, blocks: int) -> Callable[[], nn.Module]:
    """A GPT of that size."""
    return lambda: own.GPT(width, blocks, WORDS, LENGTH)


TABLE = (
    Entry("GPT 768x12", gpt(768, 12), tokens(WORDS, LENGTH), 16, "dp=1,precision=bf16"),
    Entry("GPT 1024x24, recomputed", gpt(1024, 24), tokens(WORDS, LENGTH), 16, "dp=1,precision=bf16,recompute=full"),
    Entry("GPT 768x12, selective", gpt(768, 12), tokens(WORDS, LENGTH), 8, "dp=1,precision=tf32,recompute=selective"),
    Entry("GPT 2048x24", gpt(2048, 24), tokens(WORDS, LENGTH), 8, "dp=1,precision=fp32", dtype=torch.bfloat16),
    Entry("ResNet-50", _vision("resnet50"), images, 128, "dp=1,precision=bf16", library="torchvision"),
    Entry("VGG-16", _vision("vgg16"), images, 64, "dp=1,precision=tf32", library="torchvision"),
    Entry("ConvNeXt tiny", _vision("convnext_tiny"), images, 64, "dp=1,precision=bf16", library="torchvision"),
    Entry("ViT base", lambda: own.ViT(768, 12), images, 128, "dp=1,precision=bf16"),
    Entry("BERT base", _bert, tokens(30522, 512), 32, "dp=1,precision=bf16", library="transformers"),
    Entry("LSTM 1024x4", lambda: own.Recurrent(1024, 4, 10000), tokens(10000, 256), 64, "dp=1,precision=tf32"),
    Entry("MLP 8192x6", lambda: own.wide(8192, 6), vectors, 4096, "dp=1,precision=tf32"),
)
