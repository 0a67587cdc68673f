"""Collectives in torch's profiler: one span per call, from the call until it is done, on whichever thread that is."""

from __future__ import annotations

import torch
from torch._C._autograd import _profiler_enabled as profiling
from torch.autograd.profiler import record_function

__all__ = ["Span", "profiling"]


class Span:
    """A call that a profiler looks at: made only where `profiling()`."""

    def __init__(self, name: str) -> None:
        record = record_function(name)
        record.__enter__()
        # A future carries the profiler's state to the thread that ends it; __exit__ would not.
        self._done: torch.futures.Future[None] = torch.futures.Future()
        record._call_end_callbacks_on_future(self._done)

    def end(self) -> None:
        """The call is done."""
        self._done.set_result(None)
