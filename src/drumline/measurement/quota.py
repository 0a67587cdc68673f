"""What control groups allow this process of the cores, as containers are limited. Who has used up a share stands still
until its period ends: a short look sees a burst or a stall, and only many periods together are what a step sees.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

LISTING, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Quota:
    """The share of a group of processes."""

    cores: float
    period: float
    """Seconds in which the share is counted."""
    group: str
    """Where the group is: processes that say the same share it."""


def quota(listing: Path = LISTING, root: Path = ROOT) -> Quota | None:
    """The tightest share of this process's group and of those around it; None where nothing limits it."""
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None  # no control groups here
    found = [share for line in lines for group in _groups(line, root) if (share := _share(group))]
    return min(found, key=lambda share: share.cores, default=None)


def _groups(line: str, root: Path) -> Iterator[Path]:
    """A group and those around it. In a container its path may be that of the host: then only the top is there."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    # version 2 has one tree; version 1 has one for each set of controllers
    tops = (root / controllers, root / "cpu") if controllers else (root,)
    top = next((t for t in tops if t.is_dir()), None)
    if top is None:
        return
    group = top / path.lstrip("/")
    while top in group.parents:
        yield group
        group = group.parent
    yield top


def _share(group: Path) -> Quota | None:
    """What the files of a group say, of either version."""
    try:
        if (group / "cpu.max").exists():
            most, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            most = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if most in ("max", "-1") else Quota(int(most) / int(period), 1e-6 * int(period), str(group))


@functools.cache
def stands_still() -> bool:
    """Whether this rank's threads can use up its share. Asked once: shares do not change while ranks are measured."""
    share = quota()
    return share is not None and share.cores < torch.get_num_threads()


def typical(times: Sequence[float], worked: Sequence[float]) -> float:
    """The median, which disturbances do not move. `worked` is the processor's time of the same.

    With a share of a core it takes at least what it works, at that share. Where the stalls fall is chance: a mean over
    a few messages is one stall more or less, each of them longer than the message.
    """
    share = quota() if stands_still() else None
    return max(statistics.median(times), statistics.mean(worked) / share.cores if share else 0.0)
