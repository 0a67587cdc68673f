"""Recurrent layers in half precision, and recurrent layers whose weights a strategy owns.

CPU: torch chooses oneDNN's LSTM before autocast has made its input half precision, and so does not see that oneDNN has
no such LSTM on this processor (bf16 needs AVX-512, fp16 more). The call then fails; here torch's own operators compute
it, matmul by matmul, as they do a GRU.

GPU: autocast gives cuDNN's recurrent layers float16, whatever type it is for. Under bf16 they would lose its range,
without the loss scale that float16 needs; here they get the type of the plan.
"""

from __future__ import annotations

import functools
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...torchkit.pytree import tree_map
from ...torchkit.recurrent import onednn_enabled, set_onednn_enabled, silence_rnn_contiguity_warning

_known = False


def note_recurrent_layers(model: nn.Module) -> None:
    """Remember whether a model has recurrent layers: a mode around a forward costs time at each of its operators."""
    global _known
    _known = _known or any(isinstance(m, nn.RNNBase) for m in model.modules())


def has_recurrent_layers() -> bool:
    """Whether any model of this process has some."""
    return _known


class FunctionOverride(TorchFunctionMode):
    """Context in which calls of some of torch's functions, by name, go to `override`."""

    names: ClassVar[frozenset[str]]

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in self.names:
            return func(*args, **(kwargs or {}))
        return self.override(func, args, kwargs or {})

    @abstractmethod
    def override(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one such call."""


def _spellings(*names: str) -> frozenset[str]:
    """The names as a module calls a recurrent layer, and as a captured graph has them."""
    return frozenset(name + ending for name in names for ending in ("", ".input", ".data"))


@functools.cache
def onednn_lacks(dtype: torch.dtype) -> bool:
    """Whether oneDNN has no LSTM of this type on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False  # torch's own operators are all there is
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype in checks and not getattr(torch.ops.mkldnn, checks[dtype])()


class LstmWithoutOnednn(FunctionOverride):
    """LSTMs run without oneDNN, and return its type. Several threads may be inside at once."""

    names = _spellings("lstm")
    _lock = threading.Lock()
    _inside = 0
    _before = True

    def override(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it without oneDNN."""
        with self._without():
            return tuple(t.to(self._dtype) for t in func(*args, **kwargs))

    @classmethod
    @contextmanager
    def _without(cls) -> Iterator[None]:
        with cls._lock:
            if cls._inside == 0:
                cls._before = onednn_enabled()
                set_onednn_enabled(False)
            cls._inside += 1
        try:
            yield
        finally:
            with cls._lock:
                cls._inside -= 1
                if cls._inside == 0:
                    set_onednn_enabled(cls._before)


class RecurrentDtype(FunctionOverride):
    """Recurrent layers on a GPU compute in one type."""

    names = _spellings("lstm", "gru", "rnn_tanh", "rnn_relu")

    def override(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it in that type."""
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", False)
        try:
            with warnings.catch_warnings():
                silence_rnn_contiguity_warning()  # they were cast one by one
                return func(*tree_map(self._cast, args), **tree_map(self._cast, kwargs))
        finally:
            torch.set_autocast_enabled("cuda", before)

    def _cast(self, value: Any) -> Any:
        real = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
        return value.to(self._dtype) if real else value


def keep_in_place(model: nn.Module) -> None:
    """Stop recurrent layers from moving their weights.

    On a GPU torch lays them out contiguously, for cuDNN, whenever it finds other tensors in their places than before. A
    strategy that updates or gathers weights in memory of its own would still fill the old places, and the layer
    would compute with its first weights. Here cuDNN copies them at each call instead.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    for module in layers:
        module.flatten_parameters = skip_flattening  # type: ignore[method-assign]  # of this layer alone
    if layers:
        silence_rnn_contiguity_warning()


def skip_flattening() -> None:
    """Replaces `flatten_parameters`."""
