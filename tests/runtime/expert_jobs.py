"""Jobs with mixtures of experts, and the functions that ranks run in the tests of `ep`: sent by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import hf_jobs
import small_jobs
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.core.errors import GaveUp
from drumline.plans import Plan
from drumline.runtime.guards.nonfinite import diagnose
from drumline.runtime.verification.verify import Verification, verify

WIDTH, EXPERTS = 6, 4


class Expert(nn.Module):
    """Up, a gate, down."""

    def __init__(self, hidden: int = 5, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)
        self.up.bias.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Block(nn.Module):
    """A mixture with a router that chooses two experts a token, and a residual connection."""

    def __init__(self, experts: list[Expert], closed: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(experts)), dl.Experts(experts)
        self.router.bias.data[list(closed)] = -1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weight, index = self.router(h).softmax(-1).topk(2)
        return x + self.experts(h, index, weight)


class Mixture(nn.Module):
    """Words in, logits out, through two mixtures; the head is the embedding. One layer is not used, one is frozen."""

    def __init__(self, make: Any = Expert, *, closed: tuple[int, ...] = (), count: int = EXPERTS) -> None:
        super().__init__()
        self.word = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block([make() for _ in range(count)], closed) for _ in range(2))
        self.frozen, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.word.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.word(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Uneven(nn.Module):
    """Experts of different sizes behind a BatchNorm, for series."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH)
        self.block = Block([Expert(3 + i) for i in range(EXPERTS)])
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.tanh(self.norm(self.stem(x).flatten(0, 1))).view(*x.shape[:2], WIDTH)
        return self.out(self.block(tokens).mean(1))


class WithBuffer(Expert):
    """An expert with more state than parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))


class WithNorm(Expert):
    """An expert whose tokens affect each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)


class Listed(nn.Module):
    """Experts that cannot be recognized."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.experts, self.head = (
            nn.Embedding(11, WIDTH),
            nn.ModuleList(Expert() for _ in range(2)),
            nn.Linear(WIDTH, 11),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.word(tokens)
        return self.head(x + sum(e(x) for e in self.experts))


class Both(Mixture):
    """Known experts and others."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Listed()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.other(tokens)


def mixtral() -> nn.Module:
    """Mixtral from a tiny configuration. Its norms and its router compute in float32 whatever comes; here in float64 too."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter

    config = MixtralConfig(
        vocab_size=hf_jobs.WORDS,
        hidden_size=hf_jobs.WIDTH,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=hf_jobs.LENGTH,
        use_cache=False,
        experts_implementation="eager",
    )
    model = MixtralForCausalLM(config)
    assert model.config._experts_implementation == "eager"
    for module in model.modules():
        if isinstance(module, MixtralRMSNorm):
            module.forward = functools.partial(hf_jobs._norm, module)  # type: ignore[method-assign]
        if isinstance(module, MixtralTopKRouter):
            module.forward = functools.partial(_route, module)  # type: ignore[method-assign]
    return model


def _route(module: Any, x: torch.Tensor) -> Any:
    if x.dtype != torch.float64:
        return type(module).forward(module, x)
    logits = F.linear(x.reshape(-1, module.hidden_dim), module.weight)
    weight, index = logits.softmax(-1).topk(module.top_k)
    return logits, weight / weight.sum(-1, keepdim=True), index


JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": ("gpt", {"model": Mixture}),
    "masked": ("masked", {"model": Mixture, "optimizer": small_jobs.adam}),
    "idle": ("gpt", {"model": functools.partial(Mixture, closed=(1, 3)), "clip": None}),
    "frozen": ("gpt", {"model": functools.partial(Mixture, functools.partial(Expert, frozen=True))}),
    "uneven": ("lstm", {"model": Uneven, "clip": 0.3}),
    "mixtral": ("llama", {"model": mixtral}),
    "buffer": ("gpt", {"model": functools.partial(Mixture, WithBuffer)}),
    "norm": ("gpt", {"model": functools.partial(Mixture, WithNorm)}),
    "six": ("gpt", {"model": functools.partial(Mixture, count=6)}),
    "listed": ("gpt", {"model": Listed}),
    "both": ("gpt", {"model": Both}),
    "none": ("gpt", {}),
}


def make(name: str, **changes: Any) -> dl.Job:
    """A job by its name."""
    base, own = JOBS[name]
    return small_jobs.make(base, **{**own, **changes})


def verified(cells: list[tuple[str, str]], steps: int = 4) -> list[Verification | None]:
    """Verify jobs under plans, one after the other."""
    return [verify(make(name), Plan.parse(plan), steps=steps) for name, plan in cells]


def trained(name: str, plan: str, steps: int) -> dict[str, Any]:
    """The losses, norms before clipping and weights; elements of parameters and state on this rank."""
    engine = dl.initialize(make(name), plan, dtype=torch.float64)
    norms = []
    losses = []
    for batch in engine.data(steps):
        losses.append(engine.step(batch))
        norms.append(engine.grad_norm)
    elements = sum(p.numel() for p in engine.model.parameters())
    states = [engine.optimizer.state.get(p.value, {}) for p in engine.pieces]
    state = sum(s["exp_avg"].numel() for s in states if s)
    return {
        "losses": losses,
        "norms": norms,
        "weights": engine.whole_parameters(),
        "elements": elements,
        "state": state,
        "evaluated": engine.evaluate()["loss"],
        "names": list(engine.parameter_specs),
    }


def saved(name: str, plan: str, folder: str, steps: int) -> list[float]:
    """Train, save, and train on."""
    engine = dl.initialize(make(name), plan, dtype=torch.float64)
    for batch in engine.data(steps):
        engine.step(batch)
    engine.save(folder)
    engine.finish_saves()
    return [engine.step(batch) for batch in engine.data(steps)]


def loaded(name: str, plan: str, folder: str, steps: int) -> list[float]:
    """Load, and train on."""
    engine = dl.initialize(make(name), plan, dtype=torch.float64)
    engine.load(Path(folder))
    return [engine.step(batch) for batch in engine.data(steps)]


def refused(name: str, plan: str) -> None:
    """Create an engine that must be refused."""
    dl.initialize(make(name), plan)


def left(name: str, plan: str) -> dict[str, str]:
    """A part of the model that stays whole."""
    return dict(dl.initialize(make(name), plan).left_whole)


def voted(plan: str, rank: int, which: str) -> str:
    """Flip a bit of one rank's copy of a parameter; returns the error."""
    engine = dl.initialize(make("mixture"), plan, guards=dl.Guards(vote=1))
    engine.step(next(engine.data(1)))
    if engine.rank == rank:
        with torch.no_grad():
            next(p for name, p in engine.model.named_parameters() if name == which).view(-1)[0] += 1.0
    try:
        engine.step(next(engine.data(1)))
    except GaveUp as e:
        return str(e)
    return "went on"


def originating_ranks(plan: str, rank: int, which: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Make an expert's weight NaN; returns the ranks and parameters that are named."""
    engine = dl.initialize(make("mixture"), plan)
    batch = next(engine.data(1))
    if engine.rank == rank:
        with torch.no_grad():
            next(p for name, p in engine.model.named_parameters() if name == which).view(-1)[0] = float("nan")
    loss, _ = engine.gradients_of(batch)
    result = diagnose(engine, batch, loss, engine.grad_norm)
    return result.ranks, result.names


def wrong(plan: str) -> Verification | None:
    """Verify a plan in which owners lose the gradients of other ranks' tokens."""
    from unittest import mock

    from drumline.partition.experts import dispatch

    def lost(ctx: Any, gradient: torch.Tensor) -> Any:
        back = dispatch._all_to_all(gradient, ctx.receives, ctx.sends, ctx.axis)
        return back * 0.5, None, None, None, None

    with mock.patch.object(dispatch._Exchange, "backward", staticmethod(lost)):
        return verify(make("idle"), Plan.parse(plan), steps=2)


def noise(plan: str) -> float:
    """The noise scale of the gradients."""
    from drumline.runtime.learning_rates.gradient_noise import noise_scale

    return noise_scale(dl.initialize(make("idle"), plan, dtype=torch.float64), batches=2, parts=2).scale


def own_loop(plan: str, sizes: list[int]) -> list[float]:
    """Batches of the caller's own: `sizes[rank]` samples of this rank, cut from one list of all."""
    engine = dl.initialize(make("mixture"), plan, dtype=torch.float64)
    start = sum(sizes[: engine.rank])
    samples = [small_jobs.Samples("tokens")[start + i] for i in range(sizes[engine.rank])]
    return [engine.step(torch.utils.data.default_collate(samples)) for _ in range(3)]


def weights_loaded(name: str, plan: str, path: str) -> dict[str, torch.Tensor]:
    """The weights alone, of a checkpoint or a file."""
    engine = dl.initialize(make(name, seed=8), plan, dtype=torch.float64)
    engine.load_weights(path)
    return engine.whole_parameters()
