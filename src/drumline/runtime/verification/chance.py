"""Takes chance out of runs that are compared: dropout does nothing, and what a model draws is the middle of its range.

Ranks draw numbers of their own, as they should. So a model that draws can only be compared without chance, and what it
computes from the numbers still can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode


class Certain(TorchFunctionMode):
    """Functional dropout becomes the identity, and drawing gives the middle of what may be drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = False
        """Whether a module of the model had any."""
        self.drawn = False
        """Whether something else was drawn."""
        self.settles = False
        """Whether draws are settled now: those of a step are, and those of the data are not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        settled = _MIDDLES.get(func) if self.settles and kwargs.get("generator") is None else None
        if settled is not None:
            self.drawn = True
            return settled(func, *args, **kwargs)
        return func(*args, **kwargs)

    @property
    def notes(self) -> set[str]:
        """What is said of it."""
        said = {"dropout was set to 0"} if self.dropout else set()
        return said | ({"what the model draws at random was set to the middle of its range"} if self.drawn else set())


@contextmanager
def without_chance(model: nn.Module) -> Iterator[Certain]:
    """No dropout inside; other draws are settled while `settles` is true."""
    mode = Certain()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            mode.dropout |= module.p > 0
            module.p = 0.0
        for name in ("dropout", "drop_prob"):  # plain numbers, not modules: attention's, and of whole paths
            if isinstance(share := getattr(module, name, None), float):
                mode.dropout |= share > 0
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
    """A new tensor of the function's shape and type."""

    def settled(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn = func(*args, **kwargs)
        return torch.full(drawn.shape, middle, dtype=drawn.dtype, device=drawn.device)

    return settled


def _like(middle: float) -> Callable[..., torch.Tensor]:
    def settled(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(args[0] if args else kwargs.pop("input"), middle, **kwargs)

    return settled


def _whole_number(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """randint(high, size), randint(low, high, size) and the same after a tensor for randint_like."""
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


def _kept(func: Any, t: torch.Tensor, p: Any = 0.5, **_: Any) -> torch.Tensor:
    """In place, 1 with probability p."""
    return t.copy_(p >= 0.5) if isinstance(p, torch.Tensor) else t.fill_(float(p >= 0.5))


def _flipped(func: Any, input: torch.Tensor, p: float | None = None, **_: Any) -> torch.Tensor:
    """1 with the probabilities that are given."""
    return torch.full_like(input, float(p >= 0.5)) if p is not None else (input >= 0.5).to(input.dtype)


def _gumbel(
    func: Any, logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """Without its noise; torch calls the whole of it at once, so that what it draws inside is not seen."""
    y = (logits / tau).softmax(dim)
    if not hard:
        return y
    return torch.zeros_like(y).scatter_(dim, y.argmax(dim, keepdim=True), 1.0) - y.detach() + y


_MIDDLES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.randn: _full(0.0),
    torch.rand: _full(0.5),
    torch.randn_like: _like(0.0),
    torch.rand_like: _like(0.5),
    torch.randint: _whole_number,
    torch.randint_like: _whole_number,
    torch.Tensor.normal_: _normal,
    torch.Tensor.uniform_: _uniform,
    torch.Tensor.exponential_: _exponential,
    torch.Tensor.bernoulli_: _kept,
    torch.bernoulli: _flipped,
    torch.Tensor.bernoulli: _flipped,
    F.gumbel_softmax: _gumbel,
}
