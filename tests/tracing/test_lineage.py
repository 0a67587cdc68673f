"""Operators that must be recomputed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.tracing.lineage import Lineage, draws_random_numbers, written_by


class Follow(TorchDispatchMode):
    """Adds every operator to a lineage."""

    def __init__(self) -> None:
        super().__init__()
        self.lineage, self.names = Lineage(), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.lineage.add(func, args, kwargs or {}, out)
        self.names.append(func._overloadpacket.__name__)
        return out

    def groups(self) -> set[tuple[str, ...]]:
        """Names of operators of each group with several members."""
        groups: dict[int, list[str]] = {}
        for i, name in enumerate(self.names):
            groups.setdefault(self.lineage.group(i), []).append(name)
        return {tuple(names) for names in groups.values() if len(names) > 1}

    def bound(self) -> set[str]:
        """Names of operators that are always recomputed."""
        bound = self.lineage.always_recomputed()
        return {name for i, name in enumerate(self.names) if self.lineage.group(i) in bound}


X = torch.randn(4, 4)


def follow(function: Callable[[torch.Tensor], Any]) -> Follow:
    with Follow() as seen:
        function(X)
    return seen


def changes_input(x: torch.Tensor) -> torch.Tensor:
    return x.clone() + BUFFER.add_(1.0)


def read_between(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    z = y.sin()
    return z + y.mul_(2.0)


def number_between(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    n = float(y[0, 0])
    return y.mul_(2.0) * n


BUFFER = torch.zeros(4, 4)
CASES: dict[str, tuple[Callable[[torch.Tensor], Any], set[tuple[str, ...]], set[str]]] = {
    "alone": (lambda x: x.exp().sin(), set(), set()),
    "in place": (lambda x: F.relu_(x @ x).sin(), {("mm", "relu_")}, set()),
    "through a view": (lambda x: (x @ x).view(-1).add_(1.0).sin(), {("mm", "add_")}, set()),
    "of others": (changes_input, set(), {"add_"}),
    "read between": (read_between, {("exp", "mul_")}, {"exp", "mul_"}),
    "a number between": (number_between, {("exp", "mul_")}, {"exp", "mul_"}),
    "random": (lambda x: torch.rand_like(x) + torch.rand_like(x), {("rand_like", "rand_like")}, set()),
    "dropout": (lambda x: F.dropout(x.requires_grad_(), 0.5).detach(), {("empty_like", "bernoulli_", "div_")}, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_of_operators(name: str) -> None:
    function, groups, bound = CASES[name]
    seen = follow(function)
    X.requires_grad_(False)
    assert (seen.groups(), seen.bound()) == (groups, bound)


def test_reused_memory_is_new() -> None:
    """A freed storage's address is reused: the two have nothing in common."""
    seen = follow(lambda x: [x.exp() is None for _ in range(50)])
    assert not seen.groups() and not seen.bound()


def test_attention_draws_random_numbers_only_with_dropout() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.zeros(1, 1, 2, 4)
    assert not draws_random_numbers(attention, (q, q, q), {}) and not draws_random_numbers(
        attention, (q, q, q, 0.0, True), {}
    )
    assert draws_random_numbers(attention, (q, q, q, 0.1), {}) and draws_random_numbers(
        attention, (q, q, q), {"dropout_p": 0.1}
    )
    assert not draws_random_numbers(torch.ops.aten.exp.default, (q,), {})


def test_written_arguments() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    assert written_by(torch.ops.aten.add_.Tensor, (a, b), {}) == [a]
    assert not written_by(torch.ops.aten.add.Tensor, (a, b), {})
    (out,) = written_by(torch.ops.aten.add.out, (a, b), {"out": b})
    assert out is b
