"""Worker processes of a DataLoader: ended at once, and started without torch's signal handler.

Written for torch 2.13. Missing public API: an iterator's workers end when it is collected, and the handler of SIGCHLD
is always installed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import signal_handling

__all__ = ["end_workers", "without_sigchld_handler"]


def end_workers(batches: Iterator[Any]) -> None:
    """End the workers of a DataLoader's iterator now."""
    batches._shutdown_workers()  # type: ignore[attr-defined]  # what its __del__ calls


@contextmanager
def without_sigchld_handler() -> Iterator[None]:
    """Start a DataLoader's workers without the handler that raises in whatever code runs when a worker dies.

    `next` checks its workers while it waits, and raises where the error belongs.
    """
    before, was_set = signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = was_set
        assert signal.getsignal(signal.SIGCHLD) is before
