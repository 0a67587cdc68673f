"""Fake tensors: shapes and types without values, of two kinds.

Most serve for their shape alone: code that runs on ranks is called with them to learn shapes, and sends nothing. Those
of a dry run (`DryRunMode`) are treated as real: every step runs as it would, and its messages are recorded.

Written for torch 2.13. Missing public API: `torch.export` and `torch.compile` use fake tensors, but no public name
creates one or tells one from a real tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules import transformer

from .dispatch_modes import without_dispatch_modes
from .libraries import python_of_script

__all__ = [
    "VALUE_REQUESTS",
    "DryRunMode",
    "FakeTensor",
    "FakeTensorMode",
    "active_fake_mode",
    "agreed_numbers",
    "has_no_values",
    "is_shape_only",
    "prepare",
    "unset_fake_temporarily",
    "with_real_tensors",
]

VALUE_REQUESTS = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of an operator whose result depends on the values of a fake tensor."""


def active_fake_mode() -> FakeTensorMode | None:
    """The mode under which new tensors are fake, or None."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if isinstance(mode, FakeTensorMode) else None


def prepare() -> None:
    """Adapt torch to fake tensors, once: silence the logger whose errors are raised anyway, accept fake masks, and run
    scripted functions."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    _accept_fake_masks()
    _run_scripts_as_python()


def _run_scripts_as_python() -> None:
    """Run the Python of a scripted function on fake tensors: the script loses the numbers that it makes of shapes."""
    plain: Any = torch.jit.ScriptFunction.__call__
    if getattr(plain, "accepts_fake_tensors", False):
        return

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        fake = any(isinstance(x, FakeTensor) for x in (*args, *kwargs.values()))
        python = python_of_script(function) if fake else None
        return (python or plain.__get__(function))(*args, **kwargs)

    call.accepts_fake_tensors = True  # type: ignore[attr-defined]  # marks the replacement
    torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign,assignment]  # of any signature


def _accept_fake_masks() -> None:
    """Keep `nn.TransformerEncoder` from reading the values of a mask.

    It compares a mask with the causal one to choose a faster kernel; the result is the same with the mask itself.
    """
    original = transformer._detect_is_causal_mask
    if getattr(original, "accepts_fake_masks", False):
        return

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        if isinstance(mask, FakeTensor) or getattr(mask, "is_meta", False):
            return is_causal is True
        return bool(original(mask, is_causal, size))

    detect.accepts_fake_masks = True  # type: ignore[attr-defined]  # marks the replacement
    transformer._detect_is_causal_mask = detect


class DryRunMode(FakeTensorMode):
    """The mode of a dry run, whose tensors count as real."""


def is_shape_only(x: Any) -> bool:
    """Whether a tensor serves for its shape alone, so that nothing is sent for it."""
    return isinstance(x, FakeTensor) and not isinstance(x.fake_mode, DryRunMode)


def has_no_values(x: Any) -> bool:
    """Whether a tensor is fake, of either kind."""
    return isinstance(x, FakeTensor)


def agreed_numbers(x: torch.Tensor, own: list[Any]) -> list[Any]:
    """The numbers in a tensor after ranks have exchanged it; without values, this rank's own, as all ranks agree."""
    return own if has_no_values(x) else x.tolist()


@contextmanager
def with_real_tensors() -> Iterator[None]:
    """Leave all modes, also those of a dry run: tensors inside are real and not recorded. Also a decorator."""
    with without_dispatch_modes():
        yield
