"""Models with tiled layers, the same step with and without tiles, and the functions that ranks run."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import small_jobs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from drumline.runtime.memory.tiling import tile, tiles_of
from drumline.runtime.state.pieces import ParameterPart
from drumline.tracing.fake import call_model

WORDS = 40
Step = Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]


class Story(nn.Module):
    """An LSTM between an embedding (with padding) and a head of its own; the head has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(13, 6, padding_idx=4), nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(tokens))[0])


class Speaker(nn.Module):
    """As Hugging Face's models: inputs by name, a dict with the loss in it; embedding and head tied, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(12, 5), small_jobs.Residual(5)
        self.head = nn.Linear(5, 12)
        self.head.weight = self.words.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.block(self.words(input_ids)))
        result = {"logits": logits}
        if labels is not None:
            shifted = (
                logits.float()[..., :-1, :].contiguous() if logits.dtype == torch.bfloat16 else logits[..., :-1, :]
            )
            shifted = shifted.contiguous().view(-1, logits.size(-1))
            result["loss"] = F.cross_entropy(shifted, labels[..., 1:].reshape(-1), ignore_index=-100)
        return result


class Frozen(nn.Module):
    """The first layer and the head are frozen, except the head's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 8)
        self.first.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Reader(nn.Module):
    """Reads the weights of its layers itself: a tied head without a module, and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        return F.linear(x, self.words.weight, self.up.bias) + self.up(x) * self.up.weight.square().sum()


class Encoder(nn.Module):
    """torch's transformer: its attention reads its output projection, its fast path the linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
        self.words, self.encoder = nn.Embedding(10, 6), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(6, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(tokens), src_key_padding_mask=tokens == 3))


class GPT(small_jobs.GPT):
    """Its vocabulary is the largest thing in it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(words=WORDS, dropout=dropout)


class Forgetful(GPT):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.4)


class Checkpointed(GPT):
    """The last block and the head are computed again in the backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(self.positions)
        x = self.blocks[0](x)
        return checkpoint(lambda h: self.head(self.norm(self.blocks[1](h))), x, use_reentrant=False)


def _flat(output: torch.Tensor) -> torch.Tensor:
    return output.flatten(0, -2)


def mean(model: nn.Module, value: Any, target: torch.Tensor) -> torch.Tensor:
    """Over tokens, some of which are ignored."""
    return F.cross_entropy(_flat(call_model(model, value)), target.flatten(), ignore_index=2)


def smooth(model: nn.Module, value: Any, target: torch.Tensor) -> torch.Tensor:
    """Label smoothing."""
    return nn.CrossEntropyLoss(label_smoothing=0.3, ignore_index=2)(_flat(call_model(model, value)), target.flatten())


def weighted(model: nn.Module, value: Any, target: torch.Tensor) -> torch.Tensor:
    """Classes that count more than others."""
    logits = _flat(call_model(model, value))
    weight = torch.linspace(0.5, 2.0, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(logits, target.flatten(), weight)


def summed(model: nn.Module, value: Any, target: torch.Tensor) -> torch.Tensor:
    """(sum, weight) of the first positions, as a job may return it."""
    total = F.cross_entropy(
        call_model(model, value)[:, :-1].reshape(-1, WORDS), target[:, :-1].reshape(-1), reduction="sum"
    )
    return (total, target[:, :-1].numel())[0]


def each(model: nn.Module, value: Any, target: torch.Tensor) -> torch.Tensor:
    """One loss a token, weighed by hand, of chosen tokens."""
    logits = call_model(model, value)
    chosen = target != 5
    losses = F.cross_entropy(logits[chosen], target[chosen], reduction="none")
    return (losses * torch.linspace(0, 1, len(losses), dtype=losses.dtype)).sum()


def whole(model: nn.Module, value: Any, target: torch.Tensor) -> torch.Tensor:
    """Something else than cross-entropy."""
    return (call_model(model, value).log_softmax(-1) ** 2).mean()


def inside(model: nn.Module, value: Any, target: torch.Tensor) -> torch.Tensor:
    """The model's own loss, and a little of its logits."""
    return model(**value, labels=target)["loss"]


def _tokens(words: int) -> Callable[[], tuple[Any, torch.Tensor]]:
    def make() -> tuple[Any, torch.Tensor]:
        g = torch.Generator().manual_seed(1)
        return torch.randint(words, (4, 5), generator=g), torch.randint(words, (4, 5), generator=g)

    return make


def _named() -> tuple[Any, torch.Tensor]:
    value, target = _tokens(12)()
    target[0, 2] = -100
    return {"input_ids": value}, target


def _vectors() -> tuple[Any, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=g, dtype=torch.float64), torch.randint(3, (4,), generator=g)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, torch.Tensor]], Step]] = {
    "mlp": (small_jobs.MLP, _vectors, mean),
    "gpt": (GPT, _tokens(WORDS), mean),
    "gpt smooth": (GPT, _tokens(WORDS), smooth),
    "gpt weighted": (GPT, _tokens(WORDS), weighted),
    "gpt sum": (GPT, _tokens(WORDS), summed),
    "gpt each": (GPT, _tokens(WORDS), each),
    "gpt whole": (GPT, _tokens(WORDS), whole),
    "gpt checkpointed": (Checkpointed, _tokens(WORDS), mean),
    "lstm": (Story, _tokens(13), mean),
    "named": (Speaker, _named, inside),
    "frozen": (Frozen, _vectors, mean),
    "reader": (Reader, _tokens(9), whole),
    "encoder": (Encoder, _tokens(10), smooth),
}


def build(case: str) -> nn.Module:
    """The model of a case, in float64."""
    torch.manual_seed(3)
    return CASES[case][0]().double().train()


def assembled(parts: Mapping[str, ParameterPart], result: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assemble whole tensors under the user's names from those of a model with parts."""
    out: dict[str, torch.Tensor] = {}
    for name, t in result.items():
        part = parts.get(name, ParameterPart(name, tuple(t.shape), 0))
        flat = out.setdefault(part.name, torch.full(part.shape, float("nan"), dtype=t.dtype)).view(-1)
        flat[part.start : part.start + t.numel()] = t.detach().flatten()
    return out


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By name, whole where they are sharded."""
    result = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            result[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return result


def plain(case: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the untouched model."""
    model = build(case)
    value, target = CASES[case][1]()
    loss = CASES[case][2](model, value, target)
    loss.backward()
    return loss.detach(), gradients(model)


def _mine(value: Any) -> Any:
    """A rank's rows."""
    n, r = dist.get_world_size(), dist.get_rank()
    if isinstance(value, dict):
        return {k: _mine(v) for k, v in value.items()}
    return value[r * len(value) // n : (r + 1) * len(value) // n]


def shard(model: nn.Module, *, offload: bool = False, bf16: bool = False) -> None:
    """Every part a unit, then the blocks, then the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    more: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy()}
    if bf16:
        more["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in tiles_of(model):
        fully_shard(part, **more)
        part.set_modules_to_backward_prefetch([part])
    for module in model.modules():
        if isinstance(module, small_jobs.Attention):
            fully_shard(module, **more)
    fully_shard(model, **more)


def _averaged(loss: torch.Tensor, result: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size(), {k: g.clone() for k, g in result.items()}


def on_ranks(case: str, how: str, n: int) -> Any:
    """On every rank, a step on its rows, with parts and (n = 1) without: the mean loss, and the averaged gradients."""
    model = build(case)
    source = dict(copy.deepcopy(model).named_parameters())
    value, target = CASES[case][1]()
    if how == "meta":
        with torch.device("meta"):
            model = CASES[case][0]().double()
    parts = tile(model, n)
    if how in ("ddp", "unused"):
        run: nn.Module = DistributedDataParallel(model, find_unused_parameters=how == "unused")
    else:
        shard(model)
        run = model
    if how == "meta":
        model.to_empty(device="cpu")
        _fill(model, parts, source)
    rounds = []
    for _ in range(2):  # the second is as the first
        loss = CASES[case][2](run, _mine(value), _mine(target))
        loss.backward()
        rounds.append(_averaged(loss, assembled(parts, gradients(model))))
        model.zero_grad()
    return rounds


def _fill(model: nn.Module, parts: Mapping[str, ParameterPart], source: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            part = parts.get(name, ParameterPart(name, tuple(p.shape), 0))
            value = source[part.name].flatten()[part.start : part.start + p.numel()].view(p.shape)
            assert isinstance(p, DTensor)
            rows = -(-p.shape[0] // dist.get_world_size())
            p.to_local().copy_(value[rows * dist.get_rank() :][:rows])
    model.positions = torch.arange(5)  # type: ignore[assignment]  # the plain attribute of the GPT


class Gathered(TorchDispatchMode):
    """Counts the gathered parts before every operator."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counts, self._parts = Counter[int](), tiles_of(model)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[sum(p._get_fsdp_state()._fsdp_param_group.is_unsharded for p in self._parts)] += 1
        return func(*args, **(kwargs or {}))


def gathered(case: str) -> int:
    """Measure the largest number of parts of a model that were gathered at the same time."""
    model = build(case)
    tile(model, 4)
    shard(model)
    value, target = CASES[case][1]()
    CASES[case][2](model, _mine(value), _mine(target)).backward()  # the first forward finds the root
    with Gathered(model) as gathered:
        CASES[case][2](model, _mine(value), _mine(target)).backward()
    return max(gathered.counts)


def in_half(how: str, n: int) -> float:
    """The loss of the GPT under bf16."""
    model = build("gpt").float()
    tile(model, n)
    shard(model, bf16=True) if how == "shard" else None
    value, target = CASES["gpt"][1]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mean(model, value, target)
    loss.backward()
    assert loss.dtype == torch.float32
    return float(loss.detach())
