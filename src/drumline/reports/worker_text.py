"""The replay of workers as text for 40 columns and more: throughput, waiting, staleness, servers."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.units import counted, format_count
from ..simulator.worker_replay import WorkerReplay

MOST_WORKERS = 16
"""Workers that are listed one by one."""
MOST_LINES = 12
"""Largest number of lines of a histogram."""
_BAR = 16
"""Characters of the longest bar of a histogram."""


def worker_lines(replay: WorkerReplay) -> str:
    """A few lines about a replay."""
    lines = [f"{counted(replay.updates, 'update')}, {format_count(replay.samples_per_second, 'samples')}/s"]
    lines += _waiting(replay)
    if len(replay.staleness) > 1 or replay.mean_staleness:
        lines.append(f"staleness of the gradients: {replay.mean_staleness:.2g} updates on average")
        lines += histogram_lines(replay.staleness)
    if replay.dropped:
        lines.append(f"dropped, because they came too late: {replay.dropped} gradients")
    if replay.server_use:
        used = ", ".join(f"{what} {100 * share:.0f}%" for what, share in replay.server_use.items())
        lines.append(f"the servers are busy: {used} of the time")
    return "\n".join(lines)


def _waiting(replay: WorkerReplay) -> list[str]:
    """The share of time that each worker waits, and who is waited for."""
    shares = replay.waiting
    mean = sum(shares) / len(shares)
    least = replay.slowest
    if max(shares) - shares[least] < 0.05:
        return [f"workers wait {100 * mean:.0f}% of their time"]
    listed = ", ".join(f"{w}: {100 * share:.0f}%" for w, share in enumerate(shares[:MOST_WORKERS]))
    more = ", ..." if len(shares) > MOST_WORKERS else ""
    return [f"workers wait {100 * mean:.0f}% of their time, mostly for worker {least}", f"  {listed}{more}"]


def histogram_lines(counts: Mapping[int, int]) -> list[str]:
    """One line for each number of updates, or for each few of them: its share, and a bar."""
    width = -(-(max(counts) + 1) // MOST_LINES)
    bins: dict[int, int] = {}
    for updates, n in sorted(counts.items()):
        bins[updates // width] = bins.get(updates // width, 0) + n
    whole, most = sum(bins.values()), max(bins.values())
    return [
        f"  {_range(i, width):>7} {'#' * max(1, round(_BAR * n / most)):<{_BAR}} {100 * n / whole:.1f}%"
        for i, n in bins.items()
    ]


def _range(i: int, width: int) -> str:
    return str(i) if width == 1 else f"{i * width}-{(i + 1) * width - 1}"
