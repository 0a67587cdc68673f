"""Whether torch's profiler runs, and the operators by which it marks spans.

Written for torch 2.13. Missing public API: `torch.profiler` starts a profiler, but does not tell whether one is on.
"""

from __future__ import annotations

import torch
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch.autograd import profiler

__all__ = ["SPAN_OPERATORS", "end_with_future", "profiler_enabled", "spans_are_recorded"]

SPAN_OPERATORS = frozenset(
    {
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
        torch.ops.profiler._record_function_enter.default,
        torch.ops.profiler._record_function_exit.default,
    }
)
"""Operators that `torch.profiler.record_function` calls when it begins and ends."""


def spans_are_recorded() -> bool:
    """Whether a profiler of any kind records named spans."""
    return bool(profiler_enabled() or profiler._is_profiler_enabled)


def end_with_future(span: torch.autograd.profiler.record_function, done: torch.futures.Future[None]) -> None:
    """End a span when the future completes, on whichever thread that is; `__exit__` works on its own thread alone."""
    span._call_end_callbacks_on_future(done)
