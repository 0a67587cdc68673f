"""precision=fp8: linear layers in float8. The arithmetic runs on a CPU too; plans with it are refused there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import parity
import pytest
import small_jobs
import torch
import torch.nn.functional as F
from torch import nn
from world import World

import drumline as dl
from drumline.comm.environment import disconnect
from drumline.core.errors import PlanError
from drumline.runtime.engine import initialize
from drumline.runtime.numerics import float8
from drumline.runtime.verification.verify import Verification, verify

Worlds = Callable[[int], World]
HERE = "drumline.runtime.numerics.float8.missing_float8"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """An engine in this process makes a process group of one rank."""
    yield
    disconnect()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 447.9, 3e4, 1e30])
def test_scales_use_the_range_and_nothing_overflows(dtype: torch.dtype, size: float) -> None:
    values = torch.linspace(-size, size, 257).bfloat16()
    small, back = float8.to_float8(values, dtype)
    limit = torch.finfo(dtype).max
    assert limit / 2 <= float(small.float().abs().max()) <= limit
    assert float(torch.log2(back)) % 1 == 0
    error = (small.float() * back - values.float()).abs() / values.float().abs().clamp(min=size / 100)
    assert float(error.max()) <= (2**-4 if dtype is E4M3 else 2**-3)


def test_zeros_and_numbers_that_are_not_finite() -> None:
    small, back = float8.to_float8(torch.zeros(2, 2).bfloat16(), E4M3)
    assert torch.equal(small.float() * back, torch.zeros(2, 2))
    for bad in (torch.nan, torch.inf):
        small, back = float8.to_float8(torch.tensor([[bad, 1.0]]).bfloat16(), E4M3)
        assert not (small.float() * back).isfinite().all()


@pytest.mark.parametrize("rows", [(16,), (5,), (2, 3)])
def test_a_layer_is_close_to_one_in_float32(rows: tuple[int, ...]) -> None:
    """The products of 64 rounded numbers: their errors are independent, so the sum is closer than each."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    x, pull = torch.randn(*rows, 64), torch.randn(*rows, 48)
    results = []
    for replaced in (False, True):
        if replaced:
            assert float8.use_float8(nn.Sequential(layer)) == []
        layer.zero_grad()
        value = x.clone().requires_grad_()
        y = layer(value)
        y.backward(pull.to(y.dtype))
        results.append([t.float() for t in (y.detach(), value.grad, layer.weight.grad, layer.bias.grad)])
    for plain, eight, most in zip(*results, (0.06, 0.1, 0.1, 0.01), strict=True):
        assert 0 < float((eight - plain).norm() / plain.norm()) <= most


def test_the_backward_is_in_float8_too() -> None:
    """The gradient's larger range and smaller mantissa show: 1 + 1/8 is a number of e4m3, not of e5m2."""
    layer = nn.Linear(16, 16, bias=False)
    layer.weight.data = torch.eye(16)
    float8.use_float8(nn.Sequential(layer))
    x = torch.full((16, 16), 1.125).requires_grad_()
    y = layer(x)
    assert torch.equal(y.float(), x)
    y.backward(torch.full((16, 16), 1.125).bfloat16())
    assert x.grad is not None
    assert set(x.grad.flatten().tolist()) == {1.0}


class Wide(nn.Module):
    """Layers that fit, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.head = (
            nn.Linear(16, 64),
            nn.LayerNorm(64),
            nn.Linear(64, 16),
            nn.Linear(16, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(F.gelu(self.norm(self.up(x)))))


class Vectors(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Points, labelled by their sector."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, int(x[:3].argmax())


def wide_job() -> dl.Job:
    return dl.Job(
        model=Wide,
        loss=F.cross_entropy,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        data=Vectors,
        batch_size=20,
        seed=2,
    )


def test_which_layers_are_left() -> None:
    assert float8.use_float8(Wide()) == ["head"]
    with pytest.raises(PlanError, match="nothing to do") as caught:
        float8.use_float8(small_jobs.MLP())
    assert "multiples of 16" in caught.value.rule


def test_the_layers_that_are_left_are_named() -> None:
    with mock.patch(HERE, lambda _: ""):
        engine = initialize(wide_job(), "dp=1,precision=fp8")
    assert engine.strategy.remarks == ("precision=fp8 leaves head in bf16: 16 does not divide both sizes",)
    assert float8.left_in_bf16([]) == ""
    assert "a, b, c and 2 more in bf16" in float8.left_in_bf16(list("abcde"))


def test_names_of_the_state_dict_stay() -> None:
    model = Wide()
    names = list(model.state_dict())
    float8.use_float8(model)
    assert list(model.state_dict()) == names


def test_trains_as_far_as_bf16() -> None:
    losses = {}
    for precision in ("bf16", "fp8"):
        with mock.patch(HERE, lambda _: ""):
            engine = initialize(wide_job(), f"dp=1,precision={precision}")
        steps = [engine.step(batch) for batch in engine.data(40)]
        losses[precision] = sum(steps[-3:]) / 3
        assert losses[precision] < 0.7 * steps[0]
    assert losses["fp8"] != losses["bf16"]
    assert abs(losses["fp8"] - losses["bf16"]) <= 0.1 * losses["bf16"]


def verify_here(plan: str) -> Verification | None:
    """On every rank: verify a plan in float8, as if a CPU had it."""
    from drumline.plans import Plan

    with mock.patch(HERE, lambda _: ""), parity.shard_small_layers(plan):
        return verify(wide_job(), Plan.parse(plan), steps=3)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=2,micro=2", "dp=2,zero=3"])
def test_parity(world: Worlds, plan: str) -> None:
    result = world(2).run(verify_here, f"{plan},precision=fp8")[0]
    parity.check(result)
    assert set(result.errors) == {"float64", "float8"}
    assert any("fp8 is approximate: loss error" in note for note in result.notes)


def test_refused_where_there_is_no_such_unit() -> None:
    with pytest.raises(PlanError) as caught:
        initialize(wide_job(), "dp=1,precision=fp8")
    assert caught.value.what == "precision=fp8 does not run on this device"
    assert caught.value.rule.endswith("(H100) or newer; this is a CPU")
    assert caught.value.fix == "precision=bf16"


def test_older_and_other_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    assert float8.missing_float8(torch.device("cuda")) == "NVIDIA A100-SXM4-80GB has 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert float8.missing_float8(torch.device("cuda")) == ""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in float8.missing_float8(torch.device("cuda"))
