"""The error tree. Each branch carries the exit code that the command line ends with.

DrumlineError              1
├── InputError             2   invalid input of the user
│   ├── PlanError              an invalid or unsupported plan
│   ├── ClusterError           an invalid cluster file
│   ├── JobError               a job file that fails to load, or a failing function of it
│   └── TraceError             a model that cannot be traced
├── DoesNotFit             3   no plan fits into memory
├── VerificationError      4   the result differs from the reference
├── GaveUp                 5   a rank failed and the run could not continue
│   ├── StoppedByGuard         all ranks agreed to stop: numbers that are not finite
│   ├── RankFailed             the rank that failed first, with its traceback
│   └── LaunchedRankFailed     the same, of ranks that only another launcher can start again
└── CorruptFile            6   a damaged file that a program wrote
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = [
    "ClusterError",
    "CorruptFile",
    "DoesNotFit",
    "DrumlineError",
    "GaveUp",
    "InputError",
    "JobError",
    "LaunchedRankFailed",
    "PlanError",
    "RankFailed",
    "StoppedByGuard",
    "TraceError",
    "VerificationError",
]


class DrumlineError(Exception):
    """An error with its subject, its place, the violated rule with its numbers, and a fix."""

    exit_code = 1
    silent = False
    """Whether another rank of the job prints it."""

    def __init__(self, what: str, *, where: str = "", rule: str = "", fix: str = "") -> None:
        self.what, self.where, self.rule, self.fix = what, where, rule, fix
        super().__init__(what, where, rule, fix)

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("where", self.where), ("rule", self.rule), ("try", self.fix)):
            if text:
                lines.append(f"  {label + ':':<6} {text}")
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """Lines that a notebook shows: the message, as on the command line."""
        return [f"{type(self).__name__}: {self}"]

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.rule, self.fix))


def _rebuild(cls: type[DrumlineError], what: str, where: str, rule: str, fix: str) -> DrumlineError:
    return cls(what, where=where, rule=rule, fix=fix)


class InputError(DrumlineError):
    """Invalid input of the user."""

    exit_code = 2


class PlanError(InputError):
    """An invalid or unsupported plan."""


class ClusterError(InputError):
    """An invalid cluster file."""


class JobError(InputError):
    """A job file cannot be loaded, or one of its functions failed."""


class TraceError(InputError):
    """A model cannot be traced on fake tensors."""


class DoesNotFit(DrumlineError):
    """No plan fits into the memory of the devices."""

    exit_code = 3


class VerificationError(DrumlineError):
    """The result of the plan differs from the reference."""

    exit_code = 4


class GaveUp(DrumlineError):
    """A rank failed and the run could not continue."""

    exit_code = 5


class StoppedByGuard(GaveUp):
    """All ranks agreed to stop before an update, because its numbers are not finite. The weights are good."""


class RankFailed(GaveUp):
    """A rank raised an exception, was killed, or hangs. The text ends with a traceback, or the stacks of all ranks."""

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        rule: str = "",
        fix: str = "",
        rank: int = -1,
        kind: str = "",
        trace: str = "",
    ) -> None:
        super().__init__(what, where=where, rule=rule, fix=fix)
        self.rank = rank
        """The rank that failed; -1 if none can be named."""
        self.kind = kind
        """`exception`, `memory`, `signal`, `exit` or `hang`."""
        self.trace = trace
        """Its traceback, or the stacks of all ranks."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n{self.trace.rstrip()}" if self.trace else text


class LaunchedRankFailed(GaveUp):
    """A rank of another launcher failed. Only that launcher can start it again."""

    trace = ""
    """Its traceback."""

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n{self.trace.rstrip()}" if self.trace else text


class CorruptFile(DrumlineError):
    """A file written by a program is damaged."""

    exit_code = 6


def nearest(word: str, words: Iterable[str]) -> str:
    """`Did you mean x?` for known words that `word` is a part of, or one with a slip in it; or empty.

    A part of a longer name comes first: `a100` is meant as `dgx-a100`, not as a slip in `a10`.
    """
    known = list(words)
    shortest = sorted(known, key=len)
    close = [w for w in shortest if word.lower() in _parts(w)][:3]
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.85)
    close = close or [w for w in shortest if len(word) > 2 and word.lower() in w.lower()][:3]
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _parts(name: str) -> list[str]:
    """The whole words of a name such as `dgx-a100` or `bert:large`."""
    return re.split(r"[^0-9a-z]+", name.lower())
