"""Selective recomputation: bitwise equal gradients, less memory than none, less work than full."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import odd_models
import parity
import pytest
import small_jobs
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from world import World

from drumline.core.errors import PlanError
from drumline.costs.memory import peak_memory
from drumline.models import Profile
from drumline.models.recompute_choice import choices
from drumline.plans import Plan, check
from drumline.runtime.memory.recompute import recompute
from drumline.runtime.memory.selective import MAX_TRACES, SelectiveLayer, recompute_selectively
from drumline.tracing import trace

WIDE = 96
"""Rows long enough that a CPU keeps their products."""


class Inside(nn.Module):
    """Two linear layers of which the first is activated in place, and a value that is read, changed and read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.up(x))
        z = self.down(y)
        w = torch.tanh(z)
        z.mul_(0.5).add_(1.0)
        return x + w * torch.sigmoid(z)


class Packs(nn.Module):
    """Its weight is copied into a part of a longer buffer, as recurrent layers do; a result is turned in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(2 * WIDE * WIDE, dtype=x.dtype)
        part = torch.empty(0, dtype=x.dtype).set_(buffer.untyped_storage(), WIDE, (WIDE, WIDE), (WIDE, 1))
        part.copy_(self.up.weight.detach())
        turned = self.down(self.up(x) @ part).t_()
        return x + torch.tanh(turned).t()


class Draws(nn.Module):
    """A random choice that leaves little, which alone would be kept, before a dropout, which alone would not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        picked = torch.multinomial(y.detach().softmax(1), 1)
        return torch.tanh(self.down(F.dropout(y * y.gather(1, picked), 0.5)))


class Forks(nn.Module):
    """Its forward takes another path at every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), 0

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        return torch.tanh(torch.exp(-x) * self.down(x)) if odd else self.down(torch.sin(x)).exp()


class Forking(nn.Module):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.calls = nn.ModuleList(Forks() for _ in range(2)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x, self.calls % 2 == 1)
        return x


class Block(nn.Module):
    """Convolution, BatchNorm and an activation in place, with dropout behind; wide enough to keep the convolution."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x + F.relu_(self.norm(self.conv(x))))


class WideCNN(nn.Module):
    """Two such blocks between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(1, 16, 1), nn.Sequential(Block(), Block()), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return y


def tokens(n: int = 6) -> torch.Tensor:
    return torch.randint(11, (n, 5))


def vectors(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(6, *shape, dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (small_jobs.MLP, vectors(6)),
    "wide mlp": (functools.partial(small_jobs.MLP, WIDE), vectors(WIDE)),
    "wide mlp with dropout": (functools.partial(small_jobs.MLP, WIDE, 0.4), vectors(WIDE)),
    "cnn": (small_jobs.CNN, vectors(1, 5, 4)),
    "wide cnn": (lambda: nn.Sequential(Block(), Block()), vectors(16, 5, 4)),
    "wide cnn with dropout": (lambda: nn.Sequential(Block(0.3), Block(0.3)), vectors(16, 5, 4)),
    "packing": (lambda: nn.Sequential(Packs(), Packs()), vectors(WIDE)),
    "gpt": (small_jobs.GPT, tokens),
    "wide gpt": (functools.partial(small_jobs.GPT, WIDE), tokens),
    "wide gpt with dropout": (functools.partial(small_jobs.GPT, WIDE, dropout=0.4), tokens),
    "lstm": (small_jobs.Recurrent, vectors(4, 3)),
    "in place": (lambda: nn.Sequential(Inside(), Inside()), vectors(WIDE)),
    "draws": (lambda: nn.Sequential(Draws(), Draws()), vectors(WIDE)),
    "forks": (Forking, vectors(WIDE)),
    "torch's transformer layer": (
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(WIDE, 2, WIDE, 0.3, batch_first=True) for _ in range(2))),
        vectors(4, WIDE),
    ),
}


def steps(model: nn.Module, make: Callable[[], torch.Tensor], n: int = 3) -> list[list[torch.Tensor]]:
    """Gradients and buffers of some steps with the same random numbers."""
    torch.manual_seed(7)
    results = []
    for _ in range(n):
        model.zero_grad()
        out = model(make())
        (out.square().mean() + out.sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert len(gradients) == len(list(model.parameters()))
        results.append([*gradients, *map(torch.clone, model.buffers())])
    return results


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_bitwise_equal(name: str) -> None:
    build, make = CASES[name]
    torch.manual_seed(1)
    plain = build().double()
    model = copy.deepcopy(plain)
    layers = recompute_selectively(model, "cpu")
    expected, result = steps(plain, make), steps(model, make)
    for a, b in zip(expected, result, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(layer.verdicts for layer in layers)
    if "wide" in name:
        assert all({"kept", "again"} <= set(layer.verdicts) for layer in layers)


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def gpt(how: str, blocks: int = 2) -> tuple[nn.Module, list[SelectiveLayer]]:
    torch.manual_seed(1)
    model = small_jobs.GPT(WIDE, length=64)
    model.blocks.extend(small_jobs.Attention(WIDE) for _ in range(blocks - 2))
    if how == "full":
        recompute(model)
    return model, recompute_selectively(model, "cpu") if how == "selective" else []


def backward_calls(how: str) -> Counter[str]:
    """The operators of the second step's backward."""
    model, _ = gpt(how)
    for _ in range(2):
        loss = model(torch.randint(11, (8, 64))).square().mean()
        with Counting() as counter:
            loss.backward()
    return counter.calls


def test_transformer_recomputes_no_matmul() -> None:
    none, selective, full = (backward_calls(how) for how in ("none", "selective", "full"))
    dear = ("addmm", "mm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")
    assert [selective[name] for name in dear] == [none[name] for name in dear]
    assert full["addmm"] > none["addmm"] and full[dear[-1]] > none[dear[-1]]
    assert selective["native_layer_norm"] == selective["gelu"] == 2  # of each block its norm and its activation


def peak(how: str) -> int:
    """Peak bytes of the third step."""
    model, _ = gpt(how, blocks=6)
    batch = torch.randint(11, (8, 64))
    for _ in range(2):
        model(batch).square().mean().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(batch).square().mean().backward()
    pending, most = list(seen.profiler.kineto_results.experimental_event_tree()), 0
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            most = max(most, event.extra_fields.total_allocated)
    return most


def test_memory_is_between_none_and_full() -> None:
    none, selective, full = (peak(how) for how in ("none", "selective", "full"))
    assert none > 1.2 * selective > 1.2 * full, (none, selective, full)


def test_choices_are_visible() -> None:
    model, layers = gpt("selective")
    model(torch.randint(11, (8, 64))).square().mean().backward()
    rows = layers[0].choices()
    ranks = [c.bytes.per_sample / c.moved.per_sample for c in rows if c.moved.per_sample]
    assert ranks == sorted(ranks, reverse=True)
    verdicts = {c.name: c.verdict for c in rows if c.bytes.per_sample}
    assert verdicts["native_layer_norm"] == verdicts["gelu"] == "again"
    assert verdicts["_scaled_dot_product_flash_attention_for_cpu"] == "kept"
    products = [c.verdict for c in rows if c.name == "addmm"]
    assert sorted(products) == ["kept", "kept", "kept", "unused"]  # nothing needs the last one


class Texts(small_jobs.Samples):
    """Sequences as long as those above."""

    def __getitem__(self, i: int) -> Any:
        words = torch.full((65,), i % 11)
        return words[:-1], words[1:]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of the steps above."""
    return output.square().mean()


def traced() -> Profile:
    """The profile of the model above."""
    changes = {"model": lambda: gpt("none", 6)[0], "data": lambda: Texts("tokens"), "loss": mean_square}
    return trace(small_jobs.make("gpt", batch_size=8, **changes))


def test_prediction_uses_the_same_choice() -> None:
    profile = traced()
    model, layers = gpt("selective", 6)
    model(torch.randint(11, (8, 64))).square().mean().backward()
    blocks = [x for x in profile.layers if x.composite]
    assert [x.name for x in blocks] == [x.name for x in layers]
    for block, layer in zip(blocks, layers, strict=True):
        predicted, real = choices(block, "cpu", 4), layer.choices()
        key = ("name", "verdict")
        assert sorted([getattr(c, k) for k in key] for c in predicted) == sorted(
            [getattr(c, k) for k in key] for c in real
        )
        kept = sum(c.bytes.at(8) for c in predicted if c.verdict == "kept")
        assert kept == pytest.approx(4 * sum(c.bytes.at(1) for c in real if c.verdict == "kept"))  # seen in values
    memory = peak_memory(profile, Plan(recompute="selective"), 8)
    assert memory.activations == pytest.approx(peak("selective"), rel=0.05)


class Outside(nn.Module):
    """A layer that keeps its first matmul and returns it, to be changed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([Outside.Block()])
        self.change = False

    class Block(nn.Module):
        """Gives a product and something that was made from it."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.up(x)
            return y, torch.tanh(self.down(x + 1) + y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, z = self.block[0](x)
        return z + (y.mul_(2.0) if self.change else y)


def test_in_place_change_of_a_kept_result_is_refused() -> None:
    model = Outside()
    recompute_selectively(model, "cpu")
    x = torch.randn(4, WIDE)
    for _ in range(2):
        model(x).sum().backward()
    model.change = True
    with pytest.raises(PlanError, match=r"a result that layer block\.0 keeps was changed in place after its forward"):
        model(x).sum().backward()


class Later(Outside.Block):
    """Changes its own result in place, but not while it is traced."""

    change = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = super().forward(x)
        return (y.mul_(2.0) if self.change else y), z.exp()


def test_in_place_change_on_another_path_is_refused() -> None:
    model = Outside()
    model.block[0] = Later()
    recompute_selectively(model, "cpu")
    x = torch.randn(4, WIDE)
    for _ in range(2):
        model(x).sum().backward()
    model.block[0].change = True  # type: ignore[assignment]  # a plain attribute
    with pytest.raises(PlanError, match=r"changed in place by aten\.mul_"):
        model(x).sum().backward()


def test_second_backward_is_refused() -> None:
    """A kept result is freed as soon as it is used: it would be missing."""
    model = small_jobs.MLP(WIDE)
    recompute_selectively(model, "cpu")
    x = torch.randn(4, WIDE)
    for _ in range(2):
        model(x).sum().backward()
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PlanError, match=r"a second backward through layer blocks\.1"):
        loss.backward()


def test_full_recomputation_allows_several_backwards() -> None:
    model = small_jobs.CNN()
    recompute(model)
    loss = model(torch.randn(6, 1, 5, 4)).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True) if p.grad is not None)


def test_layers_without_a_backward_are_traced_a_few_times() -> None:
    """Evaluation is not counted; a layer without trained parameters is traced a few times."""
    model = nn.Sequential(small_jobs.Residual(6), small_jobs.Residual(6))
    model[0].requires_grad_(False)
    frozen, trained = recompute_selectively(model, "cpu")
    x = torch.randn(2, 6)
    with torch.no_grad():
        for _ in range(MAX_TRACES + 1):
            model(x)
    for _ in range(MAX_TRACES + 1):
        model(x).sum().backward()
    assert trained.verdicts and not frozen.verdicts
    with Counting() as counter:
        model(x)
    assert counter.calls["addmm"] == 4


def test_weights_cast_before_the_block() -> None:
    """Autocast caches casts; a block that runs twice casts its weights once, but recomputes both runs."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([small_jobs.Residual(WIDE)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.blocks[0](self.blocks[0](x))
            return y

    torch.manual_seed(1)
    plain = Twice()
    model = copy.deepcopy(plain)
    recompute_selectively(model, "cpu")
    x = torch.randn(4, WIDE)
    for _ in range(3):
        for m in (plain, model):
            m.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = m(x).square().mean()
            loss.backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(q.grad, p.grad, rtol=0.05, atol=1e-3)


def test_model_without_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match="recompute=selective saves nothing for Linear"):
        recompute_selectively(nn.Linear(3, 3), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("gpt", "dp=2,micro=2"),
        ("gpt", "dp=3,zero=3"),
        ("dropout", "dp=2,zero=2,micro=2"),
        ("gpt", "dp=2,precision=bf16"),
        ("gpt", "dp=2,zero=3,precision=fp16"),
        ("gpt", "dp=1,chunk=2"),
    ],
)
def test_under_the_engine(world: Callable[[int], World], job: str, plan: str) -> None:
    """Wide enough that something is kept, which the small models of the parity table are not."""
    dropout = 0.4 if job == "dropout" else 0.0
    model = functools.partial(small_jobs.GPT, WIDE, dropout=dropout)
    p = Plan.parse(f"{plan},recompute=selective")
    result = world(p.ranks).run(parity.run_verify, job, str(p), 3, {"model": model})[0]
    parity.check(result)


@pytest.mark.parametrize("plan", ["dp=2", "dp=3,zero=3,micro=2"])
def test_synced_batchnorm_message_is_repeated(world: Callable[[int], World], plan: str) -> None:
    """A wide block keeps its convolution, and every rank repeats the message of its norm."""
    p = Plan.parse(f"{plan},recompute=selective")
    changes = {"model": WideCNN}
    parity.check(world(p.ranks).run(parity.run_verify, "cnn", str(p), 3, changes)[0])
    expected = parity.serial("cnn", micro=p.micro, changes=changes)
    for result in world(p.ranks).run(parity.run_losses, "cnn", str(p), parity.STEPS, changes):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for name, value in expected["buffers"].items():
            torch.testing.assert_close(result["buffers"][name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_unsupported_combinations_are_refused(world: Callable[[int], World]) -> None:
    with pytest.raises(PlanError, match="recompute=selective saves nothing for Linear"):
        world(1).run(parity.run_losses, "mlp", "recompute=selective", 1, {"model": functools.partial(nn.Linear, 6, 3)})
    with pytest.raises(PlanError, match="does not run recompute=selective with compile"):
        check(Plan.parse("recompute=selective,compile=true"))


@pytest.mark.parametrize("model", odd_models.ODD, ids=lambda m: m.__name__)
def test_unusual_models(world: Callable[[int], World], model: type[nn.Module]) -> None:
    result, _ = world(2).run(odd_models.run, model, "dp=2,recompute=selective")[0]
    assert result.passed, result


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: fused attention that drops is there alone"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Fused attention and dropout draw from one generator; a mask that is not repeated is an error of the first order."""
    torch.manual_seed(1)
    layers = (nn.TransformerEncoderLayer(1024, 8, 1024, 0.3, batch_first=True) for _ in range(2))
    plain = nn.Sequential(*layers).cuda().to(dtype)
    model = copy.deepcopy(plain)
    chosen = recompute_selectively(model, "cuda")

    def make() -> torch.Tensor:
        return torch.randn(4, 512, 1024, device="cuda", dtype=dtype)

    for a, b in zip(steps(plain, make), steps(model, make), strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x - y).abs().max() <= 0.02 * max(x.abs().max(), 1e-3 * max(t.abs().max() for t in a))
    for layer in chosen:
        assert {"kept", "again"} <= set(layer.verdicts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: attention is another operator there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_recomputes_no_matmul(dtype: torch.dtype) -> None:
    """Whatever release of torch it has, and whichever kernel of attention it takes."""
    torch.manual_seed(1)
    plain = nn.Sequential(*(small_jobs.Attention(512) for _ in range(2))).cuda().to(dtype)
    model = copy.deepcopy(plain)
    recompute_selectively(model, "cuda")
    results = []
    for m in (plain, model):
        for _ in range(2):
            loss = m(torch.randn(4, 1024, 512, device="cuda", dtype=dtype)).square().mean()
            with Counting() as counter:
                loss.backward()
        results.append({k: v for k, v in counter.calls.items() if "attention" in k or k in ("mm", "addmm", "bmm")})
    assert results[0] == results[1]
