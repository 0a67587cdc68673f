"""Recurrent layers in half precision on a GPU.

Autocast gives cuDNN's recurrent layers float16, whatever type it is for: under bf16 they would lose its range, without
the loss scale that float16 needs. Here they get the type of the plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..tracing.warned import let_weights_lie_apart
from .called import Otherwise, as_called

_noticed = False


def notice(model: nn.Module) -> None:
    """Remember whether a model has recurrent layers: a mode around a forward costs time at each of its operators."""
    global _noticed
    _noticed = _noticed or any(isinstance(m, nn.RNNBase) for m in model.modules())


def noticed() -> bool:
    """Whether any model of this process has some."""
    return _noticed


class OwnType(Otherwise):
    """Around a forward on a GPU: recurrent layers compute in one type."""

    names = as_called("lstm", "gru", "rnn_tanh", "rnn_relu")

    def instead(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In that type."""
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", False)
        try:
            with warnings.catch_warnings():
                let_weights_lie_apart()  # they were cast one by one
                return func(*tree_map(self._cast, args), **tree_map(self._cast, kwargs))
        finally:
            torch.set_autocast_enabled("cuda", before)

    def _cast(self, value: Any) -> Any:
        real = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return value.to(self._dtype) if real else value
