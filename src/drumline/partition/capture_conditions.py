"""Conditions of a capture besides its inputs: the model's settings, and torch's modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Graph
from torch.overrides import TorchFunctionMode

from ..torchkit.dispatch_modes import function_modes
from .operator_properties import is_random

_around: list[Callable[[], AbstractContextManager[object]]] = []


@contextmanager
def captured_within(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Capture inside such a context, because a run will have it too."""
    _around.append(context)
    try:
        yield
    finally:
        _around.pop()


def capture_contexts() -> list[Callable[[], AbstractContextManager[object]]]:
    """The contexts to capture inside."""
    return list(_around)


class RandomnessMode(TorchFunctionMode):
    """A function mode that changes only random operators: a graph without any is the same under it."""


class CaptureConditions:
    """Settings of the model and modes of torch: they and the inputs decide what is captured."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {m: _settings(m) for m in model.modules()}
        self._modes = [m if isinstance(m, RandomnessMode) else type(m) for m in function_modes()] + list(_around)
        self._switches = (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
        )

    def capture_the_same(self, other: CaptureConditions, graph: Graph) -> bool:
        """Whether `graph`, captured under the other conditions, would be captured under these."""
        return (
            self._switches == other._switches
            and self._modes_on(graph) == other._modes_on(graph)
            and list(self._modules) == list(other._modules)
            and all(_same(v, other._modules[m]) for m, v in self._modules.items())
        )

    def _modes_on(self, graph: Graph) -> list[Any]:
        """The modes that can change the graph."""
        if any(is_random(n) for n in graph.nodes):
            return self._modes
        return [m for m in self._modes if not isinstance(m, RandomnessMode)]


def _settings(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, with the content of lists and tables, and which of its parameters are trained."""
    trained = [p.requires_grad for p in module._parameters.values() if p is not None]
    copied = {k: v.copy() if isinstance(v, dict | list | set) else v for k, v in vars(module).items()}
    return {**copied, "parameters trained": trained}


def _same(a: Any, b: Any) -> bool:
    """Whether two attributes are the same object, or equal values of the plain types."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, bool | int | float | str | set) and a == b
