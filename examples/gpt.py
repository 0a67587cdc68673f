"""A small byte-level GPT, trained on the source of Python's standard library: text that every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 128, 4, 4
MODULES = ("argparse.py", "ast.py", "dataclasses.py", "difflib.py", "inspect.py", "pathlib.py", "tarfile.py")


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, a distribution over the next byte out. The embedding and the head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.apply(self._init)
        self.head.weight = self.token.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of bytes, each with its next bytes as the target."""

    def __init__(self, modules: tuple[str, ...] = MODULES) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join((folder / name).read_bytes() for name in modules)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // CONTEXT

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.bytes[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Share of bytes predicted correctly."""
    return {"accuracy": (logits.argmax(-1) == targets).float().mean()}


def job() -> dl.Job:
    """Trained on batches of 32 windows."""
    return dl.Job(
        model=GPT,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=Text,
        validation=lambda: Text(("textwrap.py",)),
        batch_size=32,
        steps=60,
        clip=1.0,
        evaluate=accuracy,
    )
