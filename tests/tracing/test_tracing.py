"""Traces against hand-counted amounts, against a real step, and on unusual models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drumline as dl
from drumline.core.errors import JobError, TraceError
from drumline.tracing import trace
from drumline.tracing.layers import layers_of


def job(
    model: Any, sample: Any, *, loss: Any = F.mse_loss, batch: int = 8, optimizer: Any = None, **more: Any
) -> dl.Job:
    make = optimizer or (lambda p: torch.optim.AdamW(p))
    return dl.Job(model=model, loss=loss, optimizer=make, data=lambda: [sample] * 20, batch_size=batch, **more)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def test_mlp_against_hand_counts() -> None:
    n = 8
    p = trace(job(mlp, (torch.zeros(16), torch.zeros(4))))
    assert p.parameters == p.trained == 16 * 32 + 32 + 32 * 4 + 4
    assert [x.name for x in p.layers] == ["0", "1", "2", "loss"]
    first, relu, last, _ = p.layers
    assert first.flops("forward").at(n) == 2 * n * 16 * 32
    assert first.flops("backward").at(n) == pytest.approx(2 * n * 16 * 32 + n * 32)  # weights, and the sum of the bias
    assert last.flops("backward").at(n) == pytest.approx(2 * 2 * n * 32 * 4 + n * 4)
    assert first.saved.at(n) + relu.saved.at(n) == 2 * n * 32 * 4  # ReLU keeps its output, autograd's graph its input
    assert (p.optimizer, p.state_per_parameter) == ("AdamW", 8.0)
    assert p.input.at(n) == n * (16 + 4) * 4
    assert p.origin == "traced" and not p.notes


def test_amounts_are_affine_in_the_batch() -> None:
    small, large = (trace(job(mlp, (torch.zeros(16), torch.zeros(4)), batch=b)) for b in (4, 64))
    for n in (4, 10, 64, 1000):
        assert small.flops().at(n) == pytest.approx(large.flops().at(n))
        for a, b in zip(small.layers, large.layers, strict=True):
            assert a.live_backward.at(n) == pytest.approx(b.live_backward.at(n), rel=1e-3)


def test_nothing_is_allocated() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2**16, 2**16, bias=False)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    p = trace(job(Huge, (torch.zeros(2**16), torch.zeros(2**16))))  # 64 GiB of parameters
    assert p.parameters == 4 * 2**32


def test_peak_memory_equals_that_of_a_real_step() -> None:
    """Compare the predicted peak of one rank with the allocator's count."""
    from torch.profiler import ProfilerActivity, profile

    from drumline.costs.memory import peak_memory
    from drumline.plans import Plan

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8))

    n = 256
    p = trace(job(model, (torch.zeros(64), torch.zeros(8)), batch=n))
    net, x, y = model(), torch.randn(n, 64), torch.randn(n, 8)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    pending, most = list(seen.profiler.kineto_results.experimental_event_tree()), 0
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == "[memory]":
            most = max(most, event.extra_fields.total_allocated)
    state = 3 * 4 * p.parameters + 4 * (x.numel() + y.numel())
    assert peak_memory(p, Plan(), n).total == pytest.approx(state + most, rel=0.05)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).mean(1)


class Reads(nn.Module):
    """Reads a value in its constructor, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.rate


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.layer(a) + b}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_tied_weight_counts_once() -> None:
    p = trace(job(Tied, (torch.zeros(5, dtype=torch.long), 3), loss=F.cross_entropy))
    assert p.parameters == 80


def test_constructor_that_reads_values() -> None:
    p = trace(job(Reads, (torch.zeros(16), torch.zeros(4))))
    assert p.parameters == 68
    assert "its constructor reads values" in p.notes[0]


def test_mapping_inputs_and_outputs() -> None:
    sample = ({"a": torch.zeros(4), "b": torch.zeros(4)}, torch.zeros(4))
    p = trace(job(Mapped, sample, loss=lambda out, t: F.mse_loss(out["out"], t)))
    assert p.parameters == 20


def test_sum_and_weight_loss_and_recurrent_layers() -> None:
    p = trace(job(Recurrent, (torch.zeros(6, 4), torch.zeros(4)), loss=lambda o, t: ((o - t).square().sum(), len(o))))
    assert p.parameters == 4 * 8 * (4 + 8) + 8 * 8 + 8 * 4 + 4
    assert p.flops("backward").at(8) > p.flops("forward").at(8)


def test_sequence_first_collate() -> None:
    def stack(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([x for x, _ in samples], dim=1), torch.stack([y for _, y in samples])

    model = lambda: nn.LSTM(4, 4)  # noqa: E731
    p = trace(job(model, (torch.zeros(6, 4), torch.zeros(4)), loss=lambda o, t: F.mse_loss(o[0][-1], t), collate=stack))
    assert p.flops("forward").per_sample == pytest.approx(6 * 2 * 16 * (4 + 4), rel=0.1)  # six times four gates


def test_frozen_parameters() -> None:
    def model() -> nn.Module:
        net = mlp()
        net[0].requires_grad_(False)
        return net

    p = trace(job(model, (torch.zeros(16), torch.zeros(4))))
    assert (p.parameters - p.trained, p.trained) == (16 * 32 + 32, 32 * 4 + 4)


def test_states_of_every_optimizer() -> None:
    for make, state in [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4.0),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12.0),
    ]:
        p = trace(job(mlp, (torch.zeros(16), torch.zeros(4)), optimizer=make))
        assert p.state_per_parameter == state


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (lambda: nn.Linear(5, 4), TraceError, "Linear failed on a batch of"),
        (lambda: nn.ReLU(), JobError, "no parameter to train"),
        (lambda: 3, JobError, "gave int"),
    ],
)
def test_untraceable_jobs_are_refused(model: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trace(job(model, (torch.zeros(16), torch.zeros(4))))


def test_a_loss_must_be_one_number() -> None:
    with pytest.raises(JobError, match=r"the loss is \(251, 4\)"):
        trace(job(mlp, (torch.zeros(16), torch.zeros(4)), loss=lambda o, t: (o - t).square()))


def test_a_traced_profile_is_saved_and_loaded(tmp_path: Any) -> None:
    p = trace(job(mlp, (torch.zeros(16), torch.zeros(4))))
    p.save(tmp_path / "p.json")
    assert dl.Profile.load(tmp_path / "p.json") == p


def test_layers_are_the_repeated_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3))

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(100, 64), nn.ModuleList(Block() for _ in range(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Body(), nn.Linear(64, 100, bias=False)
            self.head.weight = self.body.embed.weight

    layers = {spec.name: spec for spec in layers_of(Model())}
    assert list(layers) == ["body.embed", "body.layers.0", "body.layers.1", "head"]
    assert layers["body.layers.0"].composite and layers["body.layers.0"].unit
    assert not layers["head"].unit and not layers["body.embed"].unit  # they share their weight


def test_short_chains_are_one_layer_and_long_ones_are_not() -> None:
    class Model(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(length)))
            self.head = nn.Linear(4, 4)

    assert [(s.name, s.composite) for s in layers_of(Model(3))] == [("chain", True), ("head", False)]
    assert [s.name for s in layers_of(Model(9))][:2] == ["chain.0", "chain.1"]


def test_the_work_of_a_norm_grows_with_the_samples() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))

    p = trace(job(model, (torch.zeros(1, 8, 8), torch.zeros(2))))
    norm = next(x for x in p.layers if x.kind == "BatchNorm2d")
    assert norm.flops("forward").at(20) == pytest.approx(20 * 4 * 36, rel=0.05)


def test_facts_for_recomputation() -> None:
    """Values of a layer, their writers, its outputs, and how many operators a backward needs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu_(self.down(F.dropout(torch.tanh(self.up(x)), 0.5)))

    n = 8
    p = trace(job(lambda: nn.Sequential(nn.Sequential(Block(), nn.Identity())), (torch.zeros(16), torch.zeros(16))))
    block = next(x for x in p.layers if x.composite)
    ops = {(op.name, op.output.at(n)): op for op in block.ops if op.phase == "forward"}
    up, tanh, mask, product = (ops[key, 4.0 * n * 32] for key in ("addmm", "tanh", "bernoulli_", "mul"))
    down, relu, divide = ops["addmm", 4.0 * n * 16], ops["relu_", 0.0], ops["div_", 0.0]
    assert up.group == tanh.group == product.group == 0
    assert mask.group == divide.group != down.group == relu.group != 0
    assert [op.is_output for op in (up, tanh, mask, product, down, relu)] == [False] * 4 + [True] * 2
    assert {op.recompute for op in ops.values()} == {""}
    plain = trace(job(lambda: nn.Sequential(small_block(), nn.ReLU()), (torch.zeros(16), torch.zeros(16))))
    last = [op for op in plain.layers[0].ops if op.phase == "forward"][-1]
    assert (last.name, last.recompute) == ("addmm", "never")  # its backward reads what it was given


def small_block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Linear(16, 16))
