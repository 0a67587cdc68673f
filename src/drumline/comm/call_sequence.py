"""Which calls of a group repeat earlier ones, so that the ranks need not compare them again.

The ranks of a group make the same calls in the same order, so what a rank has learnt from its own calls, the others
have learnt too. A call is judged by the calls before it (its context):

- the context is new, or was followed by different calls before: all ranks know this, and compare the call;
- the context was always followed by one call, and this is it: nothing to compare, which is the usual case;
- the context was always followed by another call, or all ranks made it from another line: this rank deviates. The
  others may deviate in the same way or not at all, so this rank must find out what they do before it continues.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
"""An odd number: the base of the rolling hash."""
CONTEXT = 64
"""Calls before a call that count: more than the equal buckets of one step."""
MOST = 8192
"""Contexts that are remembered; then learning begins again, on all ranks at the same call."""
PATIENCE = 3
"""Times that one call may come from another line than before without being out of order; then its line is ignored."""


class Judgement(Enum):
    """What to do about a call."""

    KNOWN = "known"
    COMPARE = "compare"
    DEVIATES = "deviates"


@dataclass(slots=True)
class _Known:
    """A call that followed a context."""

    site: int
    """The line from which all ranks made it; 0 if they made it from different lines."""
    excused: int = 0
    """Times that it came from another line."""


class CallSequence:
    """The calls of one rank in one group."""

    def __init__(self) -> None:
        self._last: deque[int] = deque([0] * CONTEXT, CONTEXT)
        self._context = 0
        self._drop = pow(_BASE, CONTEXT, 1 << 64)
        self._next: dict[int, dict[int, _Known]] = {}

    def judge(self, call: int, site: int) -> Judgement:
        """Judge the next call by its hash and that of its line."""
        followers = self._next.get(self._context)
        if followers is None or len(followers) > 1:
            return Judgement.COMPARE
        known = followers.get(call)
        if known is None or known.site not in (0, site):
            return Judgement.DEVIATES
        return Judgement.KNOWN

    def learn(self, call: int, site: int) -> None:
        """Remember a call that the ranks have compared; `site` is the line of all ranks, or 0 if they differ."""
        if len(self._next) >= MOST:
            self._next.clear()
        self._next.setdefault(self._context, {}).setdefault(call, _Known(site))

    def excuse(self, call: int) -> None:
        """Accept another line for a known call of this context."""
        known = self._next.get(self._context, {}).get(call)
        if known is not None:
            known.excused += 1
            if known.excused >= PATIENCE:
                known.site = 0

    def advance(self, call: int) -> None:
        """Go on to the next call."""
        oldest = self._last[0]
        self._last.append(call)
        self._context = (self._context * _BASE + call - oldest * self._drop) & _MASK
