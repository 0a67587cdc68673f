"""Keep freed heap memory in the process, on CPU ranks, instead of returning it to the system.

A step frees its activations and the next one allocates as much again. In between, glibc trims the top of its heap, and
every page must be mapped and zeroed again: up to a fifth of a step. So CPU ranks keep up to 2 GiB, and at most a
quarter of their share of the host's memory. Allocations above 32 MB bypass the heap unless its top has room for them,
so the heap is extended at the start: that reserves addresses, not memory.

Nothing changes if glibc's own variables, or DRUMLINE_KEEP_PAGES=0, are set.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping

SWITCH = "DRUMLINE_KEEP_PAGES"
"""The environment variable that turns this off by 0."""
_GLIBC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt."""
LARGEST_BLOCK = 32 * 2**20
"""Bytes of the largest block from the heap: glibc's limit for the mmap threshold."""
TOP_PAD = 16 * 2**20
"""Bytes by which the heap grows, so that it grows seldom."""
BLOCK = LARGEST_BLOCK - 2**16
"""Bytes of a block that still comes from the heap."""
MARGIN = 8 * TOP_PAD
"""Bytes below the trim threshold: a larger free top would be returned entirely."""
MOST = 2**31 - 1
"""The largest value that mallopt takes."""


def keep_freed_memory(peers: int = 1, environment: Mapping[str, str] | None = None) -> int:
    """Keep freed memory, as one of `peers` ranks on this host; returns the limit in bytes, 0 if nothing changed."""
    env = os.environ if environment is None else environment
    set_by_user = any(name in env for name in _GLIBC_VARIABLES) or "glibc.malloc" in env.get("GLIBC_TUNABLES", "")
    if set_by_user or env.get(SWITCH) == "0":
        return 0
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not glibc, or not Linux
        return 0
    most = min(MOST, size // 4 // max(1, peers))
    if not (mallopt(_MMAP_THRESHOLD, LARGEST_BLOCK) and mallopt(_TRIM_THRESHOLD, most) and mallopt(_TOP_PAD, TOP_PAD)):
        return 0
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:  # else addresses are scarce
        _extend_heap(libc, most)
    return most


def _extend_heap(libc: ctypes.CDLL, size: int) -> None:
    """Grow the heap by allocating and freeing blocks. They are never touched, so no page is mapped."""
    malloc, free = libc.malloc, libc.free
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [malloc(BLOCK) for _ in range((size - MARGIN) // BLOCK)]
    for block in reversed(blocks):
        free(block)  # last one first, so that each joins the free top; free(NULL) does nothing
