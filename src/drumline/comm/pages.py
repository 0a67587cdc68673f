"""Memory that a rank on a CPU has used stays its own.

A step frees its activations and the next one wants as much again. In between, the C library gives the free end of its
heap back to the system, and every page of it is then made anew, filled with zeros: on some machines that is a fifth of
a step. So ranks on a CPU keep up to 2 GiB of it, and no more than a quarter of their share of the host's memory. Single
results of more than 32 MB would not be of the heap, and come and go, unless its free end has room for them: so the end
is moved that far away at the start, which takes addresses and no memory.

Who has set the C library's own variables, or DRUMLINE_KEEP_PAGES=0, is left alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping

OFF = "DRUMLINE_KEEP_PAGES"
_THEIRS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TRIM, _PAD, _MAPPED = -1, -2, -3
"""Of mallopt: how much of the end may be free, how much more is asked for at a time, what is not of the heap."""
HEAP = 32 * 2**20
"""The largest piece that comes from the heap: the C library takes no more."""
PAD = 16 * 2**20
"""Asked for at a time, so that a growing heap seldom asks."""
PIECE = HEAP - 2**16
"""A piece that still comes from the heap."""
LEFT = 8 * PAD
"""How far below what may be free it stays: a longer end would be given back, all of it."""
MOST = 2**31 - 1
"""The largest number that mallopt takes."""


def keep_pages(peers: int = 1, environment: Mapping[str, str] | None = None) -> int:
    """Keep free memory, as one of `peers` ranks on this host: so many bytes at most, 0 if it is left alone."""
    env = os.environ if environment is None else environment
    theirs = any(name in env for name in _THEIRS) or "glibc.malloc" in env.get("GLIBC_TUNABLES", "")
    if theirs or env.get(OFF) == "0":
        return 0
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # another C library, or another system
        return 0
    most = min(MOST, size // 4 // max(1, peers))
    if not (mallopt(_MAPPED, HEAP) and mallopt(_TRIM, most) and mallopt(_PAD, PAD)):
        return 0
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:  # else addresses are scarce
        _make_room(libc, most)
    return most


def _make_room(libc: ctypes.CDLL, size: int) -> None:
    """Move the end of the heap away. Nothing of it is touched, so that no page is made."""
    malloc, free = libc.malloc, libc.free
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    pieces = [malloc(PIECE) for _ in range((size - LEFT) // PIECE)]
    for piece in reversed(pieces):
        free(piece)  # the last one first: each joins the free end; of nothing, it does nothing
