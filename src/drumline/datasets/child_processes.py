"""Child processes that end when their parent dies in any way."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """Let the operating system end this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
