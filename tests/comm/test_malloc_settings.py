"""Freed memory that CPU ranks keep."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from drumline.comm.malloc_settings import MOST, SWITCH, keep_freed_memory

TRIAL = """
import resource, sys, torch
from drumline.comm.environment import connect
connect()
def step():
    return [torch.ones({values}) for _ in range({many})]
for _ in range(8):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 60 * 4 * 2**20 // os.sysconf("SC_PAGE_SIZE")


def _faults(values: int = 2**20, many: int = 60, **more: str) -> int:
    """Page faults of five steps, after eight warm-up steps."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k not in ("GLIBC_TUNABLES", SWITCH)}
    done = subprocess.run(
        [sys.executable, "-c", TRIAL.format(values=values, many=many)],
        env={**plain, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="another C library")
def test_the_next_step_reuses_the_pages_of_the_last() -> None:
    """The default depends on the top of the heap, so it is compared with a heap that keeps nothing."""
    assert _faults() < 0.1 * PAGES
    assert _faults(MALLOC_MMAP_THRESHOLD_="65536") > 2 * PAGES


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="another C library")
def test_tensors_above_the_mmap_threshold_are_reused_too() -> None:
    """Two of 120 MB, which glibc would map each time."""
    large = {"values": PAGES * os.sysconf("SC_PAGE_SIZE") // 8, "many": 2}
    assert _faults(**large) < 0.1 * PAGES
    assert _faults(**large, **{SWITCH: "0"}) > 2 * PAGES


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="another C library")
def test_the_extended_heap_takes_no_memory() -> None:
    code = (
        "import psutil\nfrom drumline.comm.malloc_settings import keep_freed_memory\nown = psutil.Process().memory_info\n"
        "before = own()\nkept = keep_freed_memory(1, {})\nafter = own()\n"
        "print(kept, after.vms - before.vms, after.rss - before.rss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    kept, addresses, memory = map(int, done.stdout.split())
    assert 0.7 * kept < addresses <= kept and memory < 2**24


@pytest.mark.parametrize(
    "env",
    [
        {SWITCH: "0"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
)
def test_user_settings_are_respected(env: dict[str, str]) -> None:
    assert keep_freed_memory(1, env) == 0


def test_the_limit_is_a_share_of_the_hosts_memory() -> None:
    alone, among = keep_freed_memory(1, {}), keep_freed_memory(1000, {})
    assert 0 < among < alone <= MOST
    keep_freed_memory(2, {})
