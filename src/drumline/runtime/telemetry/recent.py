"""Staleness and waiting over the last steps, for the log line: one step alone says little about either."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class RecentStaleness:
    """The mean staleness of the gradients of the last records that have any."""

    def __init__(self, records: int) -> None:
        self._kept: deque[tuple[int, ...]] = deque(maxlen=records)

    def add(self, staleness: tuple[int, ...]) -> float | None:
        """Add one record; the mean, or None before the first gradient with a staleness."""
        if staleness:
            self._kept.append(staleness)
        count = sum(map(len, self._kept))
        return sum(map(sum, self._kept)) / count if count else None


class RecentWaits:
    """The share of the last steps that each rank spent waiting for others."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._kept: deque[tuple[int, tuple[float, ...], float]] = deque()
        """Step, seconds waited by rank, and the seconds in which they did."""
        self._since = 0.0
        self._last: float | None = None
        """When the last waits were reported, in seconds of the run."""

    def add(self, step: int, waits: tuple[float, ...], seconds: float, elapsed: float | None) -> None:
        """Add one record, with waits or without; `elapsed` counts where known, else the sum of `seconds`."""
        self._since += seconds
        if elapsed is not None and self._last is None:
            self._last = max(0.0, elapsed - seconds)
        if not waits:
            return
        period = self._since if elapsed is None or self._last is None else elapsed - self._last
        self._since, self._last = 0.0, elapsed if elapsed is not None else self._last
        if self._kept and len(self._kept[-1][1]) != len(waits):  # ranks were lost, or came back
            self._kept.clear()
        self._kept.append((step, waits, max(period, 0.0)))
        while self._kept[0][0] <= step - self._steps:
            self._kept.popleft()

    @property
    def shares(self) -> Sequence[float]:
        """By rank; empty if nothing was reported."""
        period = sum(p for _, _, p in self._kept)
        if not period:
            return ()
        ranks = range(len(self._kept[-1][1]))
        return [min(1.0, sum(waits[r] for _, waits, _ in self._kept) / period) for r in ranks]

    @property
    def share(self) -> float | None:
        """The mean over ranks."""
        return sum(self.shares) / len(self.shares) if self.shares else None

    @property
    def longest_rank(self) -> int | None:
        """The rank that waited most; None if no rank waited."""
        shares = self.shares
        return max(range(len(shares)), key=lambda r: shares[r]) if any(shares) else None

    @property
    def longest_share(self) -> float | None:
        """Its share."""
        return None if self.longest_rank is None else self.shares[self.longest_rank]
