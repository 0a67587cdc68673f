"""Ties the life of this process to that of its parent, so that a killed launcher leaves no orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent(expected: int | None = None) -> None:
    """On Linux, kill this process when its parent ends; at once if `expected` has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if expected is not None and os.getppid() != expected:
            os.kill(os.getpid(), signal.SIGKILL)
