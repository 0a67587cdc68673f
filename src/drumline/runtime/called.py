"""Calls of some of torch's functions, by name, done otherwise."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode


class Otherwise(TorchFunctionMode):
    """Around a forward in one type: functions of these names are called by `instead`."""

    names: ClassVar[frozenset[str]]

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in self.names:
            return func(*args, **(kwargs or {}))
        return self.instead(func, args, kwargs or {})

    @abstractmethod
    def instead(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One such call."""


def as_called(*names: str) -> frozenset[str]:
    """As a module calls a recurrent layer, and as it stands in a captured graph."""
    return frozenset(name + ending for name in names for ending in ("", ".input", ".data"))
