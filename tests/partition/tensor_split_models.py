"""Small models of many architectures, and their parity under tensor parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import drumline.partition.rules  # noqa: F401  # registers them
from drumline.partition.capture import CapturedGraph, capture
from drumline.partition.capture_conditions import captured_within
from drumline.partition.program import GraphProgram, ParameterHolder, register_tensor, splits_of
from drumline.partition.sharding.redistribution import Axis, part_of
from drumline.partition.sharding_pass import ShardingPass
from drumline.partition.tensor_splits import choose_tensor_splits
from drumline.runtime.verification.modes import Float64Mode
from drumline.tracing.fake import fake_mode

WORDS = 64
_SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE = {**_SIZES, "intermediate_size": 64}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_GPT2 = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": WORDS,
    "n_positions": 16,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
_CALM = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_T5 = {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8, "vocab_size": WORDS, "dropout_rate": 0}

ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _WIDE),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "phi": ("PhiForCausalLM", "PhiConfig", _WIDE),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**_SIZES, "multi_query": False}),
    "bert": ("BertForMaskedLM", "BertConfig", {**_WIDE, **_CALM}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**_WIDE, **_CALM}),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": WORDS,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "dropout": 0,
            "attention_dropout": 0,
        },
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "head_dim": 8}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0,
            "attention_dropout": 0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            **_CALM,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": WORDS,
        },
    ),
}


class Encoder(nn.Module):
    """torch's transformer layers."""

    def __init__(self, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, heads, 64, dropout=0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(32, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(input_ids)))  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Two blocks with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.up, self.down = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, WORDS)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.first(pixel_values)
        x = x + self.down(F.relu(self.up(x), inplace=True))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """A model with small random biases, in float64."""
    torch.manual_seed(0)
    if name in ("encoder", "convolutions"):
        model: nn.Module = Encoder() if name == "encoder" else Convolutions()
    else:
        import transformers

        of, config, settings = ARCHITECTURES[name]
        made = getattr(transformers, config)(**settings)
        made._attn_implementation, made.use_cache = attention, False
        model = getattr(transformers, of)(made)
    for p in model.parameters():
        if p.dim() == 1:
            p.data.add_(torch.randn_like(p) * 0.1)
    return model.double().train()


def batch(name: str) -> list[torch.Tensor]:
    """Inputs and targets."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (2, 8), generator=g)
    if name in ("vit", "convolutions"):
        return [torch.randn(2, 3, 16, 16, generator=g, dtype=torch.float64), ids[:, 0]]
    return [ids, ids.flip(0)]


def loss(model: nn.Module, leaves: list[Any]) -> torch.Tensor:
    """Cross-entropy of the logits."""
    if leaves[0].is_floating_point():
        out = model(pixel_values=leaves[0])
    elif any("decoder" in n for n, _ in model.named_children()):
        out = model(input_ids=leaves[0], decoder_input_ids=leaves[0])
    else:
        out = model(input_ids=leaves[0])
    logits = getattr(out, "logits", out)
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), leaves[1].reshape(-1))


def captured_of(model: nn.Module, leaves: list[torch.Tensor], run: Callable[..., Any] = loss) -> CapturedGraph:
    """The captured graph of a model and its loss."""
    mode = fake_mode()
    return capture(copy.deepcopy(model), run, [mode.from_tensor(t) for t in leaves], mode)


def parity(name: str, attention: str) -> list[str]:
    """On every rank: differences from the unsplit model, of the loss and of the gradients.

    As in `verify`, layers that compute in float32 by themselves (the norms of Gemma 3) compute in float64: one float32
    rounding that falls the other way is larger than what is looked for.
    """
    with captured_within(Float64Mode), Float64Mode():
        return _differences(name, attention)


def _differences(name: str, attention: str) -> list[str]:
    model, leaves = build(name, attention), batch(name)
    want = loss(model, leaves)
    want.backward()
    captured = captured_of(model, leaves)
    axis = Axis("tp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    graph = ShardingPass(captured.graph, axis, captured.mode, choose_tensor_splits(captured, axis.size).splits).run()
    whole, root, splits = dict(model.named_parameters()), ParameterHolder(), {}
    for node in (n for n in graph.nodes if n.op == "placeholder" and n.meta["role"] != "batch"):
        key = node.meta["name"]
        if node.meta["role"] == "buffer":
            register_tensor(root, key, model.get_buffer(key).clone())
            continue
        splits[key] = splits_of(node).get("tp")
        register_tensor(root, key, nn.Parameter(_own_part(whole[key].detach(), splits[key], axis.index).clone()))
    (made,) = GraphProgram(graph, captured.constants, root)(*leaves)
    made.backward()
    wrong = [] if abs(made.item() - want.item()) < 1e-12 else [f"loss {made.item()} instead of {want.item()}"]
    for key, p in root.named_parameters():
        gradient = whole[key].grad
        if gradient is None:
            continue
        far = float((p.grad - _own_part(gradient, splits[key], axis.index)).abs().max())  # type: ignore[operator]
        wrong += [f"{key}: off by {far:.1e}"] if far > 1e-11 else []
    return wrong


def _own_part(x: torch.Tensor, split: Any, index: int) -> torch.Tensor:
    return x if split is None else part_of(x, split, index)
