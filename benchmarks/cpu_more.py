"""Ten more jobs for predictions on a CPU, of other kinds and widths; the price was looked at with them, too.

Ranks load them by name: `cpu_more.py:gru`.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from cpu_jobs import Samples, job_of
from torch import nn

from drumline.core.job import Job

NAMES = ("gru", "vgg", "encoder", "autoencoder", "both_ways", "apart", "mixer", "cardinal", "decoder", "tagger")


class Gated(nn.Module):
    """One layer of a GRU; the mean over time is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(48, 192, batch_first=True), nn.Linear(192, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0].mean(1))


def _filters(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def _vgg() -> nn.Module:
    blocks = [_filters(3, 24), _filters(24, 48), _filters(48, 96), _filters(96, 96)]
    top = [nn.Linear(96 * 9, 400), nn.ReLU(), nn.Dropout(0.3), nn.Linear(400, 20)]
    return nn.Sequential(*blocks, nn.Flatten(), *top)


class Encoder(nn.Module):
    """torch's own transformer layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 192)
        layer = nn.TransformerEncoderLayer(192, 6, 600, dropout=0.1, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(192, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x)))


class Words(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random sentences with a label for every word."""

    def __init__(self, n: int) -> None:
        self._x = torch.randint(2000, (n, 80), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[i], self._x[i]


class BothWays(nn.Module):
    """An LSTM that reads forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(40, 144, batch_first=True, bidirectional=True), nn.Linear(288, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0].amax(1))


class Apart(nn.Module):
    """A convolution of each channel by itself, and one of all channels at each place, with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.point, self.norm = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.hardswish(self.norm(self.point(self.depth(x))))


class Mixed(nn.Module):
    """Linear layers over tokens and over features in turns."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.SiLU(), nn.Linear(2 * tokens, tokens))
        self.over_width = nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_width(self.norm2(x))


class Mixer(nn.Module):
    """Three of them; the mean over tokens is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Mixed(72, 224) for _ in range(3))), nn.Linear(224, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean(1))


class Cardinal(nn.Module):
    """Narrow, in groups, and wide again, with a residual connection."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        inner = out // 2
        self.narrow = nn.Conv2d(channels, inner, 1, bias=False)
        self.groups = nn.Conv2d(inner, inner, 3, stride, 1, groups=6, bias=False)
        self.wide, self.norm = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.leaky_relu(self.groups(F.leaky_relu(self.narrow(x))))
        return F.leaky_relu(self.norm(self.wide(y)) + self.short(x))


class Shared(nn.Module):
    """Attention with fewer keys than queries, and a product of two layers, each after an RMSNorm."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, s, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).view(b, s, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width)
        x = x + self.out(y)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Three of them; the last token is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Shared(320, 5, 1, 832) for _ in range(3))), nn.Linear(320, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)[:, -1])


class Tagger(nn.Module):
    """Two layers of an LSTM with dropout between them, and a hidden layer for every step; their mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(100, 176, num_layers=2, batch_first=True, dropout=0.2)
        self.hidden, self.head = nn.Linear(176, 350), nn.Linear(350, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.elu(self.hidden(self.lstm(x)[0])).mean(1))


def _autoencoder() -> nn.Module:
    widths = (900, 700, 300, 60, 300, 700, 900)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.Tanh()]
    return nn.Sequential(*layers[:-2], nn.Linear(900, 25))


def _apart() -> nn.Module:
    blocks = [Apart(56) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 56, 4, 4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(56, 11))


def _cardinal() -> nn.Module:
    blocks = [Cardinal(36, 72, 2), Cardinal(72, 72, 1), Cardinal(72, 144, 2), Cardinal(144, 144, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 36, 5, 2, 2), nn.LeakyReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(144, 14)
    )


def _each_word(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def gru() -> Job:
    """Series of 40 vectors."""
    return job_of(Gated, 24, lambda n: Samples(n, (40, 48), 12))


def vgg() -> Job:
    """Plain convolutions and pooling on pictures of 48 x 48, with dropout."""
    return job_of(_vgg, 24, lambda n: Samples(n, (3, 48, 48), 20))


def encoder() -> Job:
    """Sentences of 80 words."""
    return job_of(Encoder, 12, Words, _each_word)


def autoencoder() -> Job:
    """Linear layers, narrow in the middle."""
    return job_of(_autoencoder, 512, lambda n: Samples(n, (900,), 25))


def both_ways() -> Job:
    """Series of 28 vectors."""
    return job_of(BothWays, 40, lambda n: Samples(n, (28, 40), 9))


def apart() -> Job:
    """Pictures of 96 x 96."""
    return job_of(_apart, 16, lambda n: Samples(n, (3, 96, 96), 11))


def mixer() -> Job:
    """72 tokens a sample."""
    return job_of(Mixer, 16, lambda n: Samples(n, (72, 224), 15))


def cardinal() -> Job:
    """Pictures of 80 x 80."""
    return job_of(_cardinal, 20, lambda n: Samples(n, (3, 80, 80), 14))


def decoder() -> Job:
    """56 vectors a sample."""
    return job_of(Decoder, 20, lambda n: Samples(n, (56, 320), 30))


def tagger() -> Job:
    """Series of 36 vectors."""
    return job_of(Tagger, 28, lambda n: Samples(n, (36, 100), 18))
