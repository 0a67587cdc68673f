"""Torch-function modes that make two runs comparable: one without randomness, one in float64 throughout.

Ranks draw different random numbers, as they should. So a model is compared with dropout off, and every random draw
replaced by the middle of its range; what the model computes from the draws is still compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ...partition.capture_conditions import RandomnessMode
from ...torchkit.libraries import python_of_script
from ...torchkit.modules import DropoutBase
from ...tracing.grouped_matmul import patch_grouped_mm


class NoRandomness(RandomnessMode):
    """Makes functional dropout the identity, and random draws the middle of their range."""

    def __init__(self, *, draws: bool = True) -> None:
        super().__init__()
        self._draws = draws
        self.dropout = False
        """Whether a module of the model had dropout."""
        self.drawn = False
        """Whether any other random draw was replaced."""
        self.in_step = False
        """Whether a step runs: its draws are replaced, those of the data are not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        replacement = _MIDDLES.get(func) if self.in_step and self._draws and kwargs.get("generator") is None else None
        if replacement is not None:
            self.drawn = True
            return replacement(func, *args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """Read data in the middle of a step."""
        before, self.in_step = self.in_step, False
        try:
            yield
        finally:
            self.in_step = before

    @property
    def notes(self) -> set[str]:
        """Notes for the report."""
        dropout = {"dropout was set to 0"} if self.dropout else set()
        return dropout | (
            {"random draws of the model were replaced by the middle of their range"} if self.drawn else set()
        )


@contextmanager
def without_randomness(model: nn.Module, *, draws: bool = True) -> Iterator[NoRandomness]:
    """Disable dropout; other draws are replaced while `in_step` is set, unless `draws` are to stay."""
    mode = NoRandomness(draws=draws)
    for module in model.modules():
        if isinstance(module, DropoutBase):
            mode.dropout |= module.p > 0
            module.p = 0.0
        for name in ("dropout", "drop_prob"):  # plain floats, not modules: attention dropout and stochastic depth
            if isinstance(rate := getattr(module, name, None), float):
                mode.dropout |= rate > 0
                setattr(module, name, 0.0)
    with mode:
        yield mode


_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.alpha_dropout,
}


def _full(middle: float) -> Callable[..., torch.Tensor]:
    """A new tensor of the function's shape and dtype."""

    def replacement(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn = func(*args, **kwargs)
        return torch.full(drawn.shape, middle, dtype=drawn.dtype, device=drawn.device)

    return replacement


def _like(middle: float) -> Callable[..., torch.Tensor]:
    def replacement(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(args[0] if args else kwargs.pop("input"), middle, **kwargs)

    return replacement


def _randint(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """randint(high, size), randint(low, high, size), and randint_like, which has a tensor first."""
    bounds = [a for a in args if isinstance(a, int)] + [kwargs[k] for k in ("low", "high") if k in kwargs]
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    drawn = func(*args, **kwargs)
    return torch.full(drawn.shape, (low + high - 1) // 2, dtype=drawn.dtype, device=drawn.device)


def _normal(func: Any, t: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return t.fill_(mean)


def _uniform(func: Any, t: torch.Tensor, *args: float, **kwargs: Any) -> torch.Tensor:
    low, high = (*args, *(0.0, 1.0)[len(args) :])
    return t.fill_((kwargs.get("from", low) + kwargs.get("to", high)) / 2)


def _exponential(func: Any, t: torch.Tensor, lambd: float = 1.0, **_: Any) -> torch.Tensor:
    return t.fill_(1.0 / lambd)


def _bernoulli_in_place(func: Any, t: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    """In place: 1 if p >= 0.5."""
    return t.copy_(p >= 0.5) if isinstance(p, torch.Tensor) else t.fill_(float(p >= 0.5))


def _bernoulli(func: Any, input: torch.Tensor, p: float | None = None, **_: Any) -> torch.Tensor:
    """1 where the probability is at least 0.5."""
    return torch.full_like(input, float(p >= 0.5)) if p is not None else (input >= 0.5).to(input.dtype)


def _gumbel(
    func: Any, logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Gumbel softmax without noise; torch dispatches it as one function, so its inner draws are not seen."""
    y = (logits / tau).softmax(dim)
    if not hard:
        return y
    return torch.zeros_like(y).scatter_(dim, y.argmax(dim, keepdim=True), 1.0) - y.detach() + y


_MIDDLES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.randn: _full(0.0),
    torch.rand: _full(0.5),
    torch.randn_like: _like(0.0),
    torch.rand_like: _like(0.5),
    torch.randint: _randint,
    torch.randint_like: _randint,
    torch.Tensor.normal_: _normal,
    torch.Tensor.uniform_: _uniform,
    torch.Tensor.exponential_: _exponential,
    torch.Tensor.bernoulli_: _bernoulli_in_place,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    F.gumbel_softmax: _gumbel,
}


_NEW_TENSORS = {
    torch.arange,
    torch.as_tensor,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.logspace,
    torch.ones,
    torch.scalar_tensor,
    torch.tensor,
    torch.zeros,
}
"""Functions whose tensors have the default dtype if they are given floats and no dtype."""


class Float64Mode(TorchFunctionMode):
    """Turns a model's float32 computations into float64, for runs in float64: explicit ones, and new tensors.

    Their rounding would hide what float64 is meant to show, and the smallest float64 is no float32. Scripted functions
    run as Python, to be visible here. Torch's own optimizers are not changed: their arithmetic has the dtype of the
    parameters, and their step counters are float32, which fused GPU kernels rely on. Nor is the data: only a step is.
    """

    def __init__(self, randomness: NoRandomness | None = None) -> None:
        """`randomness` says whether a step runs; without it, always."""
        super().__init__()
        self._randomness = randomness
        self._script: Any = None
        self._updating = False
        self._hooks: list[Any] = []
        patch_grouped_mm()

    def __enter__(self) -> Float64Mode:
        plain: Any = torch.jit.ScriptFunction.__call__

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return (python_of_script(function) or plain.__get__(function))(*args, **kwargs)

        self._script = plain
        torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign,assignment]  # of any signature
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        torch.jit.ScriptFunction.__call__ = self._script  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        classes = type(optimizer).__mro__
        self._updating = any(k.__module__.startswith("torch.optim.") for k in classes if k is not torch.optim.Optimizer)

    def _after_update(self, *_: Any) -> None:
        self._updating = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._updating or not (self._randomness is None or self._randomness.in_step):
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args)
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        if func in _NEW_TENSORS and kwargs.get("dtype") is None:
            return _with_default_float64(func, *args, **kwargs)
        return func(*args, **kwargs)


def _with_default_float64(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_default_dtype(usual)
