"""Gated language models by formula: Llama, Qwen3 and Gemma 2, and mixtures of experts of the same form."""

from __future__ import annotations

from dataclasses import dataclass

from ..profile import Profile
from .assemble import LayerDraft
from .mixture import MixtureSize, latent_projections, mixture
from .parts import LayerPart, activation, add, attention, copy, cross_entropy, embedding, linear, multiply, norm
from .transformer import language_model, residual_bytes


@dataclass(frozen=True, slots=True)
class GatedSize:
    """Sizes of a gated language model; those of its mixtures, if it has any."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than `heads` if groups of queries share them."""
    inner: int
    """Width of the feed-forward part of layers without experts."""
    vocabulary: int
    sequence: int = 4096
    """Default tokens per sample."""
    batch: int = 1024
    """Default samples per step."""
    head_width: int = 0
    """0: hidden / heads."""
    tied: bool = False
    mixture: MixtureSize | None = None
    dense_layers: int = 0
    """Layers without experts, counted first."""
    latent: bool = False
    """Whether keys and values are expanded from a latent width, as in DeepSeek-V2 and V3."""

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_width or self.hidden // self.heads


LLAMA = {
    "1b": GatedSize(16, 2048, 32, 8, 8192, 128256, 8192, 512, tied=True),
    "3b": GatedSize(28, 3072, 24, 8, 8192, 128256, 8192, 512, tied=True),
    "7b": GatedSize(32, 4096, 32, 32, 11008, 32000),
    "8b": GatedSize(32, 4096, 32, 8, 14336, 128256, 8192, 512),
    "13b": GatedSize(40, 5120, 40, 40, 13824, 32000),
    "70b": GatedSize(80, 8192, 64, 8, 28672, 128256, 8192, 1024),
    "405b": GatedSize(126, 16384, 128, 8, 53248, 128256, 8192, 2048),
}
LLAMA4 = {
    "scout": GatedSize(48, 5120, 40, 8, 16384, 202048, 8192, 1024, mixture=MixtureSize(16, 1, 8192, 1)),
    "maverick": GatedSize(
        48, 5120, 40, 8, 16384, 202048, 8192, 1024, mixture=MixtureSize(128, 1, 8192, 1), dense_layers=24
    ),
}
QWEN3 = {
    "0.6b": GatedSize(28, 1024, 16, 8, 3072, 151936, head_width=128, tied=True),
    "1.7b": GatedSize(28, 2048, 16, 8, 6144, 151936, tied=True),
    "4b": GatedSize(36, 2560, 32, 8, 9728, 151936, head_width=128, tied=True),
    "8b": GatedSize(36, 4096, 32, 8, 12288, 151936),
    "14b": GatedSize(40, 5120, 40, 8, 17408, 151936),
    "32b": GatedSize(64, 5120, 64, 8, 25600, 151936, head_width=128),
    "30b-a3b": GatedSize(48, 2048, 32, 4, 0, 151936, head_width=128, mixture=MixtureSize(128, 8, 768)),
    "235b-a22b": GatedSize(94, 4096, 64, 4, 0, 151936, head_width=128, mixture=MixtureSize(128, 8, 1536)),
}
GEMMA = {
    "2b": GatedSize(26, 2304, 8, 4, 9216, 256000, 8192, 512, head_width=256, tied=True),
    "9b": GatedSize(42, 3584, 16, 8, 14336, 256000, 8192, 512, head_width=256, tied=True),
    "27b": GatedSize(46, 4608, 32, 16, 36864, 256000, 8192, 512, head_width=128, tied=True),
}
MIXTRAL = {
    "8x7b": GatedSize(32, 4096, 32, 8, 0, 32000, mixture=MixtureSize(8, 2, 14336)),
    "8x22b": GatedSize(56, 6144, 48, 8, 0, 32768, mixture=MixtureSize(8, 2, 16384)),
}
DEEPSEEK = {
    "v2": GatedSize(
        60, 5120, 128, 128, 12288, 102400, batch=2304, mixture=MixtureSize(160, 6, 1536, 2), dense_layers=1, latent=True
    ),
    "v3": GatedSize(
        61, 7168, 128, 128, 18432, 129280, batch=4096, mixture=MixtureSize(256, 8, 2048, 1), dense_layers=3, latent=True
    ),
}
GPT_OSS = {
    "20b": GatedSize(24, 2880, 64, 8, 0, 201088, head_width=64, mixture=MixtureSize(32, 4, 2880)),
    "120b": GatedSize(36, 2880, 64, 8, 0, 201088, head_width=64, mixture=MixtureSize(128, 4, 2880)),
}


def gated(name: str, z: GatedSize, batch_size: int | None, sequence: int | None) -> Profile:
    """Rotary positions, root-mean-square norms, gated SiLU or experts, no biases, a head of its own unless tied."""
    s, h, v = sequence or z.sequence, z.hidden, z.vocabulary
    head = (norm(s, h, root_mean_square=True), linear(s, h, v, bias=False, tied=z.tied), cross_entropy(s, v))
    row = residual_bytes(s, h)
    dense = z.layers if z.mixture is None else z.dense_layers
    blocks = []
    if dense:
        blocks.append(LayerDraft("blocks.0", "Block", _block(z, s, None), row, carried=row, repeats=dense))
    if z.mixture:
        parts = _block(z, s, z.mixture)
        repeats = z.layers - dense
        blocks.append(
            LayerDraft(f"blocks.{dense}", "Block", parts, row, carried=row, repeats=repeats, experts=z.mixture.of(h))
        )
    drafts = (
        LayerDraft("embedding", "Embedding", (embedding(s, v, h, tied=z.tied),), row),
        *blocks,
        LayerDraft("head", "Head", head, 0),
    )
    notes = ["a rotation by position is counted as one pass"]
    if z.mixture:
        notes.append("experts are assumed to get equally many tokens")
    batch = batch_size or z.batch
    return language_model(name, drafts, batch=batch, sequence=s, vocabulary=v, note="; ".join(notes))


def _block(z: GatedSize, s: int, experts: MixtureSize | None) -> tuple[LayerPart, ...]:
    """Attention with grouped or latent keys and values, then a SiLU gate or a mixture of experts, without biases."""
    h, f = z.hidden, z.inner
    ffn: tuple[LayerPart, ...] = ()
    if experts is None:
        ffn = (
            linear(s, h, f, bias=False),
            linear(s, h, f, bias=False, keep=False).parallel_branch,
            activation("silu", s * f),
            multiply(s * f),
            linear(s, f, h, bias=False),
        )
    else:
        ffn = mixture(s, h, experts)
    return (
        norm(s, h, root_mean_square=True),
        *(latent_projections(s, h, z.heads) if z.latent else _projections(z, s)),
        add(s * h),
        norm(s, h, root_mean_square=True),
        *ffn,
        add(s * h),
    )


def _projections(z: GatedSize, s: int) -> tuple[LayerPart, ...]:
    h, q, kv = z.hidden, z.heads * z.width, z.kv_heads * z.width
    key = linear(s, h, kv, bias=False, keep=False).parallel_branch
    return (
        linear(s, h, q, bias=False),
        key,
        key,
        copy("rotary", s * q),
        copy("rotary", s * kv).parallel_branch,
        attention(s, q, kv, z.heads),
        linear(s, q, h, bias=False),
    )
