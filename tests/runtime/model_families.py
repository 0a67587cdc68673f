"""Tiny models of many families of the transformers library, from configurations alone: nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from drumline.core.job import Job
from drumline.plans import Plan
from drumline.runtime.verification.verify import Verification, verify

WORDS, LENGTH, CLASSES, SAMPLES = 64, 8, 8, 24

_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_LLAMA = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BERT = {**_SHAPE, "max_position_embeddings": 32}
_NARROW = {**_BERT, "embedding_size": 16}
_WIDE = {**_BERT, "embedding_size": 32}
_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
}
_EXPERTS = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_PATCHES = {**_SHAPE, "image_size": 16, "patch_size": 4}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
_CONVNEXT = {"image_size": 16, "patch_size": 2, "num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}

CAUSAL: dict[str, dict[str, Any]] = {
    "opt": {**_SHAPE, "ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
    "gpt_bigcode": _GPT,
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 32,
        "window_size": 4,
    },
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    **dict.fromkeys(
        [
            "starcoder2",
            "cohere",
            "cohere2",
            "olmo",
            "olmo2",
            "olmo3",
            "stablelm",
            "granite",
            "nemotron",
            "glm",
            "glm4",
            "qwen3",
            "smollm3",
            "exaone4",
            "helium",
            "ernie4_5",
            "arcee",
            "seed_oss",
            "hunyuan_v1_dense",
            "apertus",
            "gemma2",
            "nanochat",
            "vaultgemma",
        ],
        _LLAMA,
    ),
    "phimoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "olmoe": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "minimax": {**_LLAMA, "num_local_experts": 4},
    "dots1": {
        **_LLAMA,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 16},
    "recurrent_gemma": {**_LLAMA, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "biogpt": {**_BERT, "layerdrop": 0.0},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 32},
}
MASKED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("albert", "electra", "roformer"), _NARROW),
    **dict.fromkeys(("deberta", "deberta-v2"), _DEBERTA),
    **dict.fromkeys(("mpnet", "xlm-roberta"), _BERT),
    **dict.fromkeys(("convbert", "squeezebert"), _WIDE),
    "fnet": {k: v for k, v in _BERT.items() if k != "num_attention_heads"},
    "mobilebert": {**_NARROW, "intermediate_size": 32, "intra_bottleneck_size": 16},
    "modernbert": {**_SHAPE, "pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 8},
}
PAIRS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("pegasus", "mbart"), _BART),
    "marian": {**_BART, "pad_token_id": 0, "decoder_start_token_id": 0},
    "mt5": {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64},
}
IMAGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("swin", "swinv2"), _SWIN),
    **dict.fromkeys(("convnext", "convnextv2"), _CONVNEXT),
    **dict.fromkeys(("deit", "beit"), _PATCHES),
    "dinov2": {**_PATCHES, "mlp_ratio": 2},
    "resnet": {**_STAGES, "embedding_size": 8, "layer_type": "basic"},
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 8},
    "bit": {**_STAGES, "embedding_size": 8, "num_groups": 1},
    "mobilenet_v2": {"image_size": 64, "depth_multiplier": 0.35},
    "mobilevit": {"image_size": 32, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16]},
    "poolformer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "segformer": {
        **_STAGES,
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    },
    "focalnet": {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
        "hidden_sizes": [16, 32],
    },
}
FAMILIES = {
    name: (kind, settings)
    for kind, table in (("causal", CAUSAL), ("masked", MASKED), ("pairs", PAIRS), ("images", IMAGES))
    for name, settings in table.items()
}
PLANS = ("dp=2,zero=3", "tp=2", "pp=2,micro=2")
REFUSED = {("segformer", "tp=2"): "every rank has whole heads"}
"""Cells that are refused, and the rule."""


def cells() -> Iterator[tuple[str, str]]:
    """All families under all plans."""
    for name in FAMILIES:
        for plan in PLANS:
            yield name, plan


class Samples(Dataset[Any]):
    """What a family is trained on: words, pairs of sentences, or images."""

    def __init__(self, kind: str, side: int) -> None:
        g = torch.Generator().manual_seed(1)
        self._kind = kind
        self._words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=g)
        self._images = torch.randn(SAMPLES, 3, side, side, generator=g)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        if self._kind == "images":
            return {"pixel_values": self._images[i]}, i % CLASSES
        given = {"input_ids": self._words[i]}
        if self._kind == "pairs":
            given["decoder_input_ids"] = self._words[(i + 1) % SAMPLES]
        return given, self._words[(7 * i + 3) % SAMPLES]


def build(name: str) -> nn.Module:
    """A model of the family."""
    import transformers

    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # DeBERTa scripts some functions
    kind, settings = FAMILIES[name]
    size = {"num_labels": CLASSES} if kind == "images" else {"vocab_size": WORDS}
    config = transformers.AutoConfig.for_model(name, **settings, **size)
    config.use_cache, config.architectures = False, []
    made: nn.Module = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "pairs": transformers.AutoModelForSeq2SeqLM,
        "images": transformers.AutoModelForImageClassification,
    }[kind].from_config(config)
    return made


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the logits."""
    return F.cross_entropy(output.logits.reshape(-1, output.logits.size(-1)), target.reshape(-1))


def run(name: str, plan: str) -> Verification | None:
    """On every rank: verify a family under a plan; small layers are units, as large ones are."""
    kind, settings = FAMILIES[name]
    job = Job(
        model=lambda: build(name),
        loss=loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        data=lambda: Samples(kind, settings.get("image_size", 16)),
        batch_size=6,
        steps=2,
    )
    # FSDP2 warns of layers that return views; nothing changes them in place
    with mock.patch("drumline.tracing.layers.LEAST_UNIT", 40), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        return verify(job, Plan.parse(plan), steps=2)
