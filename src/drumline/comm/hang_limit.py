"""How long ranks may make no progress: learnt from their own steps, and counted only while their watcher looks."""

from __future__ import annotations

FACTOR, SHORTEST, START, WARM = 5.0, 10.0, 300.0, 3
"""Slowest warm steps, and seconds, that may pass without progress; seconds before that; steps that are not warm."""


class SlowestStep:
    """The slowest warm step. Time in which a rank was outside of its steps, in a save for example, is no step's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds."""
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """The ranks start, or start again."""
        self._step, self._since = -1, now
        self.noted = now
        """When the steps were noted last."""

    @property
    def warm(self) -> bool:
        """Whether the steps that compile and allocate are over."""
        return self._step >= WARM

    def note(self, step: int, now: float, *, counts: bool = True) -> None:
        """The ranks are in this step. `counts`: the time since the last note was spent in steps."""
        if not counts:
            self._since += now - self.noted
        self.noted = now
        if step > self._step:
            if self.warm:
                self.seconds = max(self.seconds, (now - self._since) / (step - self._step))
            self._step, self._since = step, now

    @property
    def limit(self) -> float:
        """Seconds without progress that are allowed in warm steps."""
        return max(SHORTEST, FACTOR * self.seconds)


class UnbrokenWatch:
    """Since when a watcher has looked without a break. While it is away, silence is its own, not that of the ranks.

    It may be stopped, or wait for a terminal that takes no output; ranks that send it records then stop, too.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        """Seconds between two checks above which the watcher counts as suspended."""
        self.since = self._looked = float("-inf")

    def look(self, now: float) -> bool:
        """Record a check. Returns whether the watcher was suspended before it; silence is then measured from now."""
        away = now - self._looked > self._gap
        self._looked = now
        if away:
            self.since = now
        return away
