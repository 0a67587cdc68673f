"""Fourteen models chosen before any was priced: twelve of torchvision, timm and transformers, and two of our own.

They are of the kinds that were predicted worst when they were first tried: convolutions by groups, wide MLPs with a
small batch, short LSTMs, BERT with a batch of 8. Nothing of the cost model may be fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from . import own
from .table import Entry, _bert, _vision, images, tokens, vectors

BF16, TF32 = "dp=1,precision=bf16", "dp=1,precision=tf32"


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False)
        return model

    return make


def _transformer(kind: str, **values: object) -> Callable[[], nn.Module]:
    """A language model of transformers, from a configuration of the named kind."""

    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

        config = AutoConfig.for_model(kind, **values)
        factory = AutoModelForMaskedLM if kind in ("distilbert", "electra") else AutoModelForCausalLM
        config.use_cache = False
        model: nn.Module = factory.from_config(config, attn_implementation="sdpa")
        return model

    return make


UNSEEN = (
    Entry("MobileNetV3 large", _vision("mobilenet_v3_large"), images, 128, BF16, library="torchvision"),
    Entry("RegNetY 3.2GF", _vision("regnet_y_3_2gf"), images, 64, BF16, library="torchvision"),
    Entry("EfficientNet-B0", _vision("efficientnet_b0"), images, 64, TF32, library="torchvision"),
    Entry("Swin tiny", _vision("swin_t"), images, 64, BF16, library="torchvision"),
    Entry("DeiT small", _timm("deit_small_patch16_224"), images, 128, BF16, library="timm"),
    Entry("Mixer B/16", _timm("mixer_b16_224"), images, 64, BF16, library="timm"),
    Entry("ResNet-RS 50", _timm("resnetrs50"), images, 64, BF16, library="timm"),
    Entry("PoolFormer S24", _timm("poolformer_s24"), images, 64, BF16, library="timm"),
    Entry("DistilBERT", _transformer("distilbert"), tokens(30522, 256), 32, BF16, library="transformers"),
    Entry("BERT base", _bert, tokens(30522, 512), 8, BF16, library="transformers"),
    Entry(
        "GPT-2 medium",
        _transformer("gpt2", n_embd=1024, n_layer=24, n_head=16),
        tokens(50257, 512),
        8,
        BF16,
        library="transformers",
    ),
    Entry(
        "Llama 1024x16",
        _transformer(
            "llama",
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
        ),
        tokens(32000, 1024),
        8,
        BF16,
        library="transformers",
    ),
    Entry("MLP 4096x8", lambda: own.wide(4096, 8), vectors, 256, TF32),
    Entry("LSTM 512x2, short", lambda: own.Recurrent(512, 2, 10000), tokens(10000, 64), 128, TF32),
)
