"""Counts of a GPU trace besides operators: views, and Python functions entered by a forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drumline.core.job import Job
from drumline.models.profile import Layer
from drumline.tracing import trace


def _recurse(x: torch.Tensor, depth: int) -> torch.Tensor:
    return _recurse(x, depth - 1) if depth else x


class Block(nn.Module):
    """Some views, and functions that do nothing."""

    def __init__(self, views: int, functions: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.views, self.functions = views, functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.views):
            x = x.transpose(-1, -2)
        out: torch.Tensor = _recurse(self.inner(x), self.functions - 1) if self.functions else self.inner(x)
        return out


def layers(make: Callable[[], nn.Module], device: str = "cuda") -> dict[str, Layer]:
    job = Job(
        model=make,
        loss=lambda out, y: (out - y).square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=lambda: [(torch.zeros(8, 8), torch.zeros(8, 8))] * 4,
        batch_size=4,
    )
    return {x.name: x for x in trace(job, precision="fp32", device=device).layers}


def blocks(*each: tuple[int, int]) -> nn.Module:
    return nn.Sequential(*(Block(views, functions) for views, functions in each))


@pytest.mark.parametrize("views, functions", [(2, 0), (0, 5), (4, 12)])
def test_views_and_functions_of_a_forward_are_counted(views: int, functions: int) -> None:
    plain, more = (layers(lambda each=each: blocks(each))["0"] for each in ((0, 0), (views, functions)))  # type: ignore[misc]
    assert more.views - plain.views == views
    assert more.python_calls - plain.python_calls == functions
    assert plain.python_calls > 4  # of the modules


def test_functions_of_the_trace_are_not_counted_and_a_profiler_continues() -> None:
    def mine(frame: Any, event: str, argument: Any) -> None:
        return None

    model = blocks((1, 3), (1, 3))
    seen = []

    def real(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    x = torch.zeros(4, 8, 8)
    sys.setprofile(real)
    model(x)
    sys.setprofile(None)
    sys.setprofile(mine)
    try:
        traced = layers(lambda: blocks((1, 3), (1, 3)))
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert sum(x.python_calls for x in traced.values()) == pytest.approx(len(seen), rel=0.35)
    assert sum(x.views for x in traced.values()) == 2 * (
        1 + 3
    )  # a product turns its weight and flattens what it is given


def test_a_trace_for_a_cpu_counts_no_functions() -> None:
    assert all(x.python_calls == 0 for x in layers(lambda: blocks((2, 5)), "cpu").values())


def test_equal_layers_have_equal_counts() -> None:
    """The first layer may fill caches for all."""
    looked = []

    class Lazy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not looked:
                looked.append(_recurse(x, 30))
            return super().forward(x)

    traced = layers(lambda: nn.Sequential(*(Lazy(0, 0) for _ in range(3))))
    assert len({traced[name].python_calls for name in "012"}) == 1 and looked


def test_the_gradient_of_a_convolutions_bias_is_a_sum_on_a_gpu() -> None:
    def make(bias: bool) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 1, 3, padding=1, bias=bias), nn.Flatten(1, 2)
        )

    def sums(bias: bool, device: str) -> int:
        ops = [op for x in layers(make(bias), device).values() for op in x.ops]
        return sum(op.count for op in ops if op.name == "sum")

    assert sums(True, "cuda") - sums(False, "cuda") == 1
    assert sums(True, "cpu") == sums(False, "cpu")


def test_a_sum_over_rows_has_sizes() -> None:
    traced = layers(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    (rows,) = [op for x in traced.values() for op in x.ops if op.name == "sum" and op.phase == "backward"]
    assert [size.at(4) for size in rows.shape] == [32.0, 8.0]
