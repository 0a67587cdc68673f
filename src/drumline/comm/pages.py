"""Memory that a rank on a CPU has used stays its own.

A step frees its activations and the next one wants as much again. In between, the C library gives the free end of its
heap back to the system, and every page of it is then made anew, filled with zeros: on some machines that is a fifth of
a step. So ranks on a CPU keep up to 2 GiB of it, and no more than a quarter of their share of the host's memory. Single
results of more than 32 MB are not of the heap, and still come and go.

Who has set the C library's own variables, or DRUMLINE_KEEP_PAGES=0, is left alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

OFF = "DRUMLINE_KEEP_PAGES"
_THEIRS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TRIM, _PAD, _MAPPED = -1, -2, -3
"""Of mallopt: how much of the end may be free, how much more is asked for at a time, what is not of the heap."""
HEAP = 32 * 2**20
"""The largest piece that comes from the heap: the C library takes no more."""
PAD = 16 * 2**20
"""Asked for at a time, so that a growing heap seldom asks."""
MOST = 2**31 - 1
"""The largest number that mallopt takes."""


def keep_pages(peers: int = 1, environment: Mapping[str, str] | None = None) -> int:
    """Keep free memory, as one of `peers` ranks on this host: so many bytes at most, 0 if it is left alone."""
    env = os.environ if environment is None else environment
    theirs = any(name in env for name in _THEIRS) or "glibc.malloc" in env.get("GLIBC_TUNABLES", "")
    if theirs or env.get(OFF) == "0":
        return 0
    try:
        mallopt = ctypes.CDLL(None).mallopt
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # another C library, or another system
        return 0
    most = min(MOST, size // 4 // max(1, peers))
    kept = mallopt(_MAPPED, HEAP) and mallopt(_TRIM, most) and mallopt(_PAD, PAD)
    return most if kept else 0
