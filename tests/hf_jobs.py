"""Three models of the transformers library, from tiny configurations: nothing is downloaded. The import takes seconds, so
it waits until one of them is built.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, LENGTH, WIDTH = 19, 6, 8
PAD = 0


def missing() -> str:
    """Why these jobs cannot run here, or nothing."""
    return "" if importlib.util.find_spec("transformers") else "transformers is not installed: pip install drumline[hf]"


def bert() -> nn.Module:
    """BERT for masked words; the head's weight is the embedding's."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=LENGTH,
            pad_token_id=PAD,
        )
    )


def llama(heads: int = 2, keys: int = 1) -> nn.Module:
    """Llama with grouped queries: some heads share one key."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=keys,
            intermediate_size=12,
            max_position_embeddings=LENGTH,
            use_cache=False,
            tie_word_embeddings=False,
        )
    )
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = functools.partial(_norm, module)  # type: ignore[method-assign]
    return model


def t5() -> nn.Module:
    """T5: an encoder and a decoder with one table of words, and biases by relative position."""
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=4,
            d_ff=12,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            relative_attention_num_buckets=4,
            relative_attention_max_distance=8,
            dropout_rate=0.1,
            use_cache=False,
            pad_token_id=PAD,
            decoder_start_token_id=PAD,
            feed_forward_proj="gated-gelu",
        )
    )
    for module in model.modules():
        if isinstance(module, T5LayerNorm):
            module.forward = functools.partial(_norm, module)  # type: ignore[method-assign]
    return model


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Llama's norm computes in float32 whatever comes; in float64 that would hide what float64 is to show."""
    if x.dtype != torch.float64:
        return type(module).forward(module, x)
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def loss(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, weight) over the words that count; the output is a mapping with the logits in it."""
    total = F.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return total, (target != -100).sum()


class Pairs(torch.utils.data.Dataset[Any]):
    """A sentence, its translation so far, and what comes next there."""

    def __init__(self, n: int) -> None:
        self.sentences = Sentences(n)

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, i: int) -> Any:
        given, target = self.sentences[i]
        words = torch.cat([torch.zeros(1, dtype=torch.long), target[:-1].clamp(min=PAD)])
        return {**given, "decoder_input_ids": words}, target


class Sentences(torch.utils.data.Dataset[Any]):
    """Sentences of different lengths, padded at their end."""

    def __init__(self, n: int) -> None:
        g = torch.Generator().manual_seed(7)
        self.n = n
        self.tokens = torch.randint(1, WORDS, (n, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (n, 1), generator=g)
        self.mask = (torch.arange(LENGTH) < lengths).long()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.n:
            raise IndexError(i)
        mask = self.mask[i]
        tokens = torch.where(mask > 0, self.tokens[i, :-1], PAD)
        target = torch.where(mask > 0, self.tokens[i, 1:], -100)
        return {"input_ids": tokens, "attention_mask": mask}, target
