"""Free memory that ranks on a CPU keep."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from drumline.comm.pages import MOST, OFF, keep_pages

TRIAL = """
import resource, sys, torch
from drumline.comm.environment import connect
connect()
def step():
    return [torch.ones(2**20) for _ in range(60)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 60 * 4 * 2**20 // os.sysconf("SC_PAGE_SIZE")


def _faults(**more: str) -> int:
    """Pages that five steps of 240 MB made, after three others."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k not in ("GLIBC_TUNABLES", OFF)}
    done = subprocess.run(
        [sys.executable, "-c", TRIAL], env={**plain, **more}, capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="another C library")
def test_the_next_step_has_the_pages_of_the_last() -> None:
    """Without, it depends on what lies at the end of the heap; so the other case is one that keeps nothing, as asked."""
    assert _faults() < 0.1 * PAGES
    assert _faults(MALLOC_MMAP_THRESHOLD_="65536") > 2 * PAGES


@pytest.mark.parametrize("env", [
    {OFF: "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
])  # fmt: skip
def test_who_has_decided_is_left_alone(env: dict[str, str]) -> None:
    assert keep_pages(1, env) == 0


def test_no_more_is_kept_than_a_share_of_the_host() -> None:
    alone, among = keep_pages(1, {}), keep_pages(1000, {})
    assert 0 < among < alone <= MOST
    keep_pages(2, {})
