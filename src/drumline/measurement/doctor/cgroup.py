"""What the kernel lets this process use: limits of its control group, of either version, the tightest on the way up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_NONE = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


def cpu_quota(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that may be used at a time, or None without a limit."""
    found = []
    for folder in _levels(root, own, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            found.append(float(words[0]) / float(words[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and float(quota) > 0:
            found.append(float(quota) / float(period))
    return min(found, default=None)


def memory_limit(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that may be used, or None without a limit."""
    return _least(root, own, "memory", ("memory.max", "memory.limit_in_bytes"))


def process_limit(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Processes and threads that may be, or None without a limit."""
    return _least(root, own, "pids", ("pids.max",))


def _least(root: Path, own: Path, controller: str, names: tuple[str, ...]) -> int | None:
    texts = (_read(folder / name) for folder in _levels(root, own, controller) for name in names)
    return min((int(text) for text in texts if text.isdigit() and int(text) < _NONE), default=None)


def _levels(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of all groups around it."""
    for line in _read(own).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        base = root if number == "0" else root / controller
        # Inside a container the path may be that of the host: then only the root is there.
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
