"""Limits of this process's control group, of either version: CPU quota, memory, processes.

A process that has used up its CPU quota is throttled until the period ends, so a short sample sees a burst or a pause;
only many periods together show the speed of a step.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

LISTING, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2^63 if there is no limit."""


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """CPU quota of a group of processes."""

    cores: float
    period: float
    """Seconds over which the quota is counted."""
    group: str
    """Folder of the group: processes with the same folder share the quota."""


def cpu_quota(listing: Path = LISTING, root: Path = ROOT) -> CpuQuota | None:
    """The tightest quota of this process's group and its parents; None without a limit."""
    quotas = [quota for group in _groups(listing, root, "cpu") if (quota := _quota_of(group))]
    return min(quotas, key=lambda quota: quota.cores, default=None)


def memory_limit(listing: Path = LISTING, root: Path = ROOT) -> int | None:
    """Bytes that may be used; None without a limit."""
    return _smallest(listing, root, "memory", ("memory.max", "memory.limit_in_bytes"))


def process_limit(listing: Path = LISTING, root: Path = ROOT) -> int | None:
    """Maximum number of processes and threads; None without a limit."""
    return _smallest(listing, root, "pids", ("pids.max",))


def oversubscription(ranks: int, threads: int) -> float:
    """Threads of the ranks of a host per core; 1 if each has its own."""
    return max(1.0, ranks * threads / len(os.sched_getaffinity(0)))


@functools.cache
def is_throttled() -> bool:
    """Whether this rank's threads can exceed its quota. Cached: quotas do not change while ranks are measured."""
    quota = cpu_quota()
    return quota is not None and quota.cores < torch.get_num_threads()


def typical_seconds(times: Sequence[float], cpu_times: Sequence[float]) -> float:
    """The median, which disturbances do not move; at least the CPU time at the quota.

    Which message meets a pause is chance: a mean over a few messages would vary by one pause, which is longer than the
    message itself.
    """
    quota = cpu_quota() if is_throttled() else None
    return max(statistics.median(times), statistics.mean(cpu_times) / quota.cores if quota else 0.0)


def _groups(listing: Path, root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and its parents.

    Inside a container the path may be that of the host: then only the top exists.
    """
    for line in _read(listing).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # version 2 has one tree; version 1 has one for each set of controllers
        tops = (root / controllers, root / controller) if controllers else (root,)
        top = next((folder for folder in tops if folder.is_dir()), None)
        if top is None:
            continue
        group = top / path.lstrip("/")
        while top in group.parents:
            yield group
            group = group.parent
        yield top


def _quota_of(group: Path) -> CpuQuota | None:
    words = _read(group / "cpu.max").split() or [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None  # "max" or "-1": no limit
    quota, period = map(int, words)
    return CpuQuota(quota / period, 1e-6 * period, str(group))


def _smallest(listing: Path, root: Path, controller: str, names: tuple[str, ...]) -> int | None:
    texts = (_read(group / name) for group in _groups(listing, root, controller) for name in names)
    return min((int(text) for text in texts if text.isdigit() and int(text) < _UNLIMITED), default=None)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
