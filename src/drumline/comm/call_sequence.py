"""Which calls of a group repeat earlier ones, so that the ranks need not compare them again.

The ranks of a group make the same calls in the same order, so what a rank has learnt from its own calls, the others
have learnt too. A call is judged by the calls before it (its context):

- the context is new, or different calls follow it by turns: all ranks know this, and compare the call;
- this is the usual call of its context: nothing to compare, which is the common case;
- the context is usually followed by another call, or all ranks made it from another line: this rank deviates. The
  others may deviate in the same way or not at all, so this rank must find out what they do before it continues.

A call that all ranks make now and then (a vote of the replicas, a save) deviates each time, which costs a few
milliseconds; comparing the usual call in all steps between would cost more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
"""An odd number: the base of the rolling hash."""
CONTEXT = 64
"""Calls before a call that count: more than the equal buckets of one step."""
MOST = 8192
"""Contexts that are remembered; then learning begins again, on all ranks at the same call."""
PATIENCE = 3
"""Times that one call may come from another line than before without being out of order; then its line is ignored."""
RARE = 32
"""Times that the usual call must come before another one may interrupt it: finding out through the store what the
others do takes as long as about 20 comparisons. A context interrupted more often is compared every time."""
SETTLED = 256
"""Times in a row that one call must follow such a context until it is usual again."""


class Judgement(Enum):
    """The decision about a call."""

    KNOWN = "known"
    COMPARE = "compare"
    DEVIATES = "deviates"


@dataclass(slots=True)
class KnownCall:
    """A call that followed a context."""

    call: int
    site: int
    """The line from which all ranks made it; 0 if they made it from different lines."""
    following: int
    """The context after it."""
    in_a_row: int = 0
    """Times that it came since the last other call."""
    excused: int = 0
    """Times that it came from another line."""
    recognized_by: Any = None
    """A value that the caller compares to recognize this call without its hashes."""


@dataclass(slots=True)
class _Context:
    """The calls that followed the same earlier calls."""

    usual: KnownCall
    """The call that follows; the last one where it varies."""
    calls: dict[int, KnownCall]
    varies: bool = False
    """Whether other calls follow too often for one to be usual."""


class CallSequence:
    """The calls of one rank in one group."""

    def __init__(self) -> None:
        self._last: deque[int] = deque([0] * CONTEXT, CONTEXT)
        self._context = 0
        self._drop = pow(_BASE, CONTEXT, 1 << 64)
        self._contexts: dict[int, _Context] = {}
        self.expected: KnownCall | None = None
        """The usual next call."""

    def follow(self, expected: KnownCall) -> None:
        """The next call is the expected one: what every call of every step does."""
        expected.in_a_row += 1
        self._last.append(expected.call)
        self._context = expected.following
        context = self._contexts.get(expected.following)
        self.expected = None if context is None or context.varies else context.usual

    def judge(self, call: int, site: int) -> Judgement:
        """Judge the next call by its hash and that of its line."""
        expected = self.expected
        if expected is None:
            return Judgement.COMPARE
        return Judgement.KNOWN if expected.call == call and expected.site in (0, site) else Judgement.DEVIATES

    def learn(self, call: int, site: int) -> None:
        """Remember a call that the ranks have compared; `site` is the line of all ranks, or 0 if they differ."""
        if len(self._contexts) >= MOST:
            self._contexts.clear()
        context = self._contexts.get(self._context)
        if context is None:
            known = KnownCall(call, site, self._after(call))
            self._contexts[self._context] = _Context(known, {call: known})
            return
        known = context.calls.setdefault(call, KnownCall(call, site, self._after(call)))
        if known is not context.usual:
            context.varies = context.varies or context.usual.in_a_row < RARE
            context.usual.in_a_row = 0
            if context.varies:
                context.usual = known

    def excuse(self, call: int) -> None:
        """Accept another line for a known call of this context."""
        context = self._contexts.get(self._context)
        known = context.calls.get(call) if context else None
        if known is not None:
            known.excused += 1
            if known.excused >= PATIENCE:
                known.site = 0

    def advance(self, call: int) -> None:
        """Go on to the next call."""
        context = self._contexts.get(self._context)
        if context is not None and context.usual.call == call:
            context.usual.in_a_row += 1
            context.varies = context.varies and context.usual.in_a_row < SETTLED
        self._context = self._after(call)
        self._last.append(call)
        context = self._contexts.get(self._context)
        self.expected = None if context is None or context.varies else context.usual

    def _after(self, call: int) -> int:
        """The context that this call leads to."""
        return (self._context * _BASE + call - self._last[0] * self._drop) & _MASK
