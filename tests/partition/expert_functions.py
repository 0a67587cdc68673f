"""Rank functions of the expert-parallel tests: each rank's tokens through its experts, compared with the serial layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drumline.partition.experts import Experts, ShardedExperts, shard_experts
from drumline.partition.sharding.redistribution import Axis

WIDTH = 8


@dataclass(frozen=True)
class Case:
    """One mixture, and the number of tokens of each rank."""

    tokens: tuple[int, ...]
    experts: int = 8
    k: int = 2
    only: tuple[int, ...] | None = None
    """The experts that the router can choose; None: all."""
    frozen: bool = False
    """Whether the tokens need no gradient."""
    recompute: bool = False
    family: str = ""
    """A model family of transformers; "" is a mixture of our own."""
    implementation: str = "eager"
    dtype: torch.dtype = torch.float64


def axis() -> Axis:
    return Axis("ep", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """A router and its experts, ours or those of transformers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.before = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, case.experts)
        self.experts = of_family(case) if case.family else Experts(Expert() for _ in range(case.experts))
        if case.only is not None:
            closed = [e for e in range(case.experts) if e not in case.only]
            self.router.bias.data[closed] = -1e4

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.case.frozen else self.before(x)
        weight, index = self.router(h).softmax(-1).topk(self.case.k)
        if self.case.recompute:
            return x + checkpoint(self.experts, h, index, weight, use_reentrant=False)
        return x + self.experts(h, index, weight)


def of_family(case: Case) -> nn.Module:
    """Experts of a transformers model, with its names and its forward."""
    if case.family == "mixtral":
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Kind

        config: Any = MixtralConfig(hidden_size=WIDTH, intermediate_size=4, num_local_experts=case.experts)
    elif case.family == "qwen3":
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Kind

        config = Qwen3MoeConfig(hidden_size=WIDTH, moe_intermediate_size=4, num_experts=case.experts)
    elif case.family == "deepseek":
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts as Kind

        config = DeepseekV3Config(hidden_size=WIDTH, moe_intermediate_size=4, n_routed_experts=case.experts)
    else:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Kind

        config = GptOssConfig(hidden_size=WIDTH, intermediate_size=4, num_local_experts=case.experts)
    config._experts_implementation = case.implementation
    module: nn.Module = Kind(config)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    return module


def build(case: Case) -> Mixture:
    torch.manual_seed(5)
    return Mixture(case).to(case.dtype)


def serial(case: Case) -> tuple[Mixture, Tensor, Tensor, Tensor]:
    """The mixture after a backward over all tokens; its input, output, and the gradient of the output."""
    model = build(case)
    draw = torch.Generator().manual_seed(6)
    x, dy = (torch.randn(sum(case.tokens), WIDTH, generator=draw, dtype=torch.float64).to(case.dtype) for _ in range(2))
    x.requires_grad_(not case.frozen)
    y = model(x)
    y.backward(dy)
    return model, x, y.detach(), dy


def errors(case: Case) -> dict[str, float]:
    """Differences from the serial layer: this rank's output, its tokens' gradient, every parameter's gradient."""
    whole, x, y, dy = serial(case)
    model = build(case)
    sharded = shard_experts(model, axis())
    rank = dist.get_rank()
    mine = slice(sum(case.tokens[:rank]), sum(case.tokens[: rank + 1]))
    part = x.detach()[mine].requires_grad_(not case.frozen)
    out = model(part)
    out.backward(dy[mine])
    errors_by_name = {"out": max_difference(out.detach(), y[mine])}
    if not case.frozen:
        assert part.grad is not None and x.grad is not None
        errors_by_name["dx"] = max_difference(part.grad, x.grad[mine])
    wanted = dict(whole.named_parameters())
    for name, p in model.named_parameters():
        if case.frozen and name.startswith("before"):
            continue
        want = wanted[name].grad
        assert p.grad is not None and want is not None, f"no gradient of {name}"
        if name in sharded.parts:
            rows = sharded.parts[name]
            assert rows.shape == want.shape
            want = want.flatten()[rows.start : rows.start + p.numel()].view(p.shape)
        else:
            dist.all_reduce(p.grad)
        errors_by_name[name] = max_difference(p.grad, want)
    assert {*errors_by_name, *sharded.absent} >= {n for n in wanted if not (case.frozen and n.startswith("before"))}
    return errors_by_name


def max_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.shape} {b.shape} {a.dtype} {b.dtype}"
    return float((a - b).abs().max()) if a.numel() else 0.0


def all_errors(cases: list[Case]) -> list[dict[str, float]]:
    return [errors(case) for case in cases]


def described(case: Case) -> tuple[ShardedExperts, dict[str, tuple[int, ...]]]:
    model = build(case)
    sharded = shard_experts(model, axis())
    return sharded, {name: tuple(p.shape) for name, p in model.named_parameters()}


def sent_rows(case: Case) -> list[tuple[int, ...]]:
    """Shapes received in every all-to-all of a forward."""
    import contextlib
    from collections.abc import Iterator
    from dataclasses import replace

    recorded: list[tuple[int, ...]] = []

    @contextlib.contextmanager
    def observe(name: str, message: str, tensor: Tensor) -> Iterator[None]:
        recorded.append(tuple(tensor.shape))
        yield

    model = build(case)
    shard_experts(model, replace(axis(), observer=observe))
    with torch.no_grad():
        model(torch.randn(case.tokens[dist.get_rank()], WIDTH, dtype=case.dtype))
    return recorded


def language_model() -> tuple[float, dict[str, float]]:
    """A whole Mixtral, one text per rank: relative differences of the loss and the gradients from the serial ones."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def make() -> nn.Module:
        torch.manual_seed(5)
        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=17,
                hidden_size=8,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                num_local_experts=4,
                max_position_embeddings=16,
                use_cache=False,
            )
        )

    texts = torch.randint(17, (dist.get_world_size(), 9), generator=torch.Generator().manual_seed(1))
    whole = make()
    want = whole(input_ids=texts, labels=texts).loss
    want.backward()
    model = make()
    sharded = shard_experts(model, axis())
    mine = texts[dist.get_rank()].unsqueeze(0)
    loss = model(input_ids=mine, labels=mine).loss / dist.get_world_size()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors_by_name = {}
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    for name, p in model.named_parameters():
        g = gradients[name]
        assert p.grad is not None and g is not None
        if name in sharded.parts:
            start = sharded.parts[name].start
            g = g.flatten()[start : start + p.numel()].view(p.shape)
        else:
            dist.all_reduce(p.grad)
        errors_by_name[name] = max_difference(p.grad, g) / float(gradients[name].abs().max())
    assert len(sharded.modules) == 2
    return float((total - want).detach().abs()), errors_by_name
