"""Traces of common kinds of models, also of those with a part that depends on values."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.clusters import load
from drumline.core.errors import TraceError
from drumline.costs.memory import peak_memory
from drumline.planner import search
from drumline.plans import Plan
from drumline.tracing import trace


def job(model: Any, sample: Any, *, loss: Any = F.mse_loss, batch: int = 16) -> dl.Job:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    return dl.Job(model=model, loss=loss, optimizer=adam, data=lambda: [sample] * 32, batch_size=batch)


# -- modules


class Skips(nn.Module):
    """A U-Net of one level: the encoder's output skips to the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.relu(self.down(x))
        return self.head(torch.cat([seen, self.up(torch.relu(self.deep(F.max_pool2d(seen, 2))))], 1))


class Residual(nn.Module):
    """A ResNet block: convolutions, BatchNorms, dropout, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        return (y + self.body(y)).mean((2, 3))


class Cube(torch.autograd.Function):
    """x^3, with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradients[0]


class Custom(nn.Module):
    """Uses a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Cube.apply(self.layer(x))


class Several(nn.Module):
    """Two inputs, two outputs, one of them in a dictionary; two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        hidden = torch.tanh(self.layer(x + self.words(word)))
        return self.head(hidden), {"hidden": hidden}


class Mixture(nn.Module):
    """A mixture of experts after a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(8, 4), nn.Linear(8, 8)
        self.experts = dl.Experts(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, index = self.router(x).softmax(-1).topk(2)
        return self.head(self.experts(x, index, weight))


class Series(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def several_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[0], target) + output[1]["hidden"].square().mean()


IMAGE, VECTOR = torch.zeros(3, 16, 16), torch.zeros(8)
MODULES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "skips": (Skips, (IMAGE, IMAGE), F.mse_loss),
    "resnet": (Residual, (IMAGE, VECTOR), F.mse_loss),
    "custom": (Custom, (VECTOR, VECTOR), F.mse_loss),
    "several": (Several, ((VECTOR, torch.tensor(1)), torch.tensor(1)), several_loss),
    "mixture": (Mixture, (VECTOR, VECTOR), F.mse_loss),
    "lstm": (Series, (torch.zeros(5, 4), VECTOR), F.mse_loss),
}


@pytest.mark.parametrize("name", MODULES)
def test_kinds_of_modules_are_traced(name: str) -> None:
    """Check parameters, work in both directions, and memory that grows with the samples."""
    make, sample, loss = MODULES[name]
    profile = trace(job(make, sample, loss=loss))
    assert profile.parameters == sum(p.numel() for p in make().parameters())
    assert profile.flops("backward").at(16) > profile.flops("forward").at(16) > 0
    assert peak_memory(profile, Plan(), 16).activations > peak_memory(profile, Plan(), 4).activations
    assert any("uniform load" in note for note in profile.notes) == (name == "mixture")
    assert len(profile.notes) == (name == "mixture")


# -- parts that ask for values


class Chooser(nn.Module):
    """Runs another layer when its input is large, which depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"chosen": self.large(x) if bool((x > 1).any()) else self.small(x)}


class PartlyReadsValues(nn.Module):
    """One of its modules reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.chooser, self.last = nn.Linear(8, 8), Chooser(), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.chooser(self.first(x))["chosen"])


class ReadsValues(nn.Module):
    """The model itself reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(x.sum())


def test_a_module_that_reads_values_is_skipped_and_named() -> None:
    profile = trace(job(PartlyReadsValues, (VECTOR, VECTOR)))
    assert profile.parameters == sum(p.numel() for p in PartlyReadsValues().parameters())
    (note,) = profile.notes
    assert note.startswith("chooser (Chooser) depends on values and was not traced")
    layers = {x.name: x for x in profile.layers}
    assert layers["last"].flops("forward").at(16) == 2 * 16 * 12 * 8  # behind it, with the right shapes
    assert layers["first"].flops("backward").at(16) > 0  # and before it: the gradient comes through
    assert layers["chooser"].flops("forward").at(16) == 0


def test_a_model_that_reads_values_is_refused() -> None:
    with pytest.raises(TraceError, match="ReadsValues cannot be traced"):
        trace(job(ReadsValues, (VECTOR, VECTOR)))


# -- models of another library


TOKENS = torch.zeros(64, dtype=torch.long)
PIXELS = torch.zeros(3, 224, 224)
SMALL = {"num_hidden_layers": 2}


def words_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def class_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"], target)


WORDS = ({"input_ids": TOKENS}, TOKENS)
PAIRS = ({"input_ids": TOKENS, "decoder_input_ids": TOKENS}, TOKENS)
PICTURE = ({"pixel_values": PIXELS}, torch.tensor(1))
MODELS: dict[str, tuple[str, str, dict[str, Any], Any, Any]] = {
    "bert": ("BertConfig", "BertForMaskedLM", SMALL, WORDS, words_loss),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 2}, WORDS, words_loss),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL, WORDS, words_loss),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"num_layers": 2}, PAIRS, words_loss),
    "vit": ("ViTConfig", "ViTForImageClassification", SMALL, PICTURE, class_loss),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SMALL, WORDS, words_loss),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {"n_layers": 2}, WORDS, words_loss),
    "opt": ("OPTConfig", "OPTForCausalLM", SMALL, WORDS, words_loss),
    "mistral": ("MistralConfig", "MistralForCausalLM", SMALL, WORDS, words_loss),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SMALL, WORDS, words_loss),
}


def of_transformers(name: str, **changes: Any) -> dl.Job:
    import transformers

    config, model, own, sample, loss = MODELS[name]

    def make() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**{**own, **changes}))  # type: ignore[no-any-return]

    return job(make, sample, loss=loss)


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install drumline[hf]"
)


@needs_transformers
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if i < 5 else [pytest.mark.slow]) for i, n in enumerate(MODELS)]
)
def test_transformers_models_are_traced_and_planned_without_allocation(name: str) -> None:
    import transformers

    own = of_transformers(name)
    with torch.device("meta"):
        numbers = sum(p.numel() for p in own.model().parameters())
    assert transformers and numbers > 1e6
    before = psutil.Process().memory_info().rss
    profile = trace(own)
    answer, _ = search(profile, load("dgx-h100"), brief=True)
    assert profile.parameters == numbers and not profile.notes
    assert answer.candidates[0].fits
    grown = psutil.Process().memory_info().rss - before
    assert grown < max(4 * numbers, 300 * 2**20), f"{grown / 2**20:.0f} MiB"


@needs_transformers
@pytest.mark.slow
def test_seven_billion_parameters_need_no_memory() -> None:
    own = of_transformers("llama", num_hidden_layers=32)
    before = psutil.Process().memory_info().rss
    profile = trace(own)
    answer, _ = search(profile, load("dgx-h100"), brief=True)
    grown = psutil.Process().memory_info().rss - before
    assert profile.parameters == pytest.approx(6.74e9, rel=0.01) and not profile.notes
    assert answer.candidates[0].fits
    assert grown < 2**30, f"{grown / 2**20:.0f} MiB"
