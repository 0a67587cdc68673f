"""Two choices of a plan that cannot be combined, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .plan import Plan


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two choices that cannot be combined."""

    choices: str
    applies: Callable[[Plan], bool]
    reason: str | Callable[[Plan], str]
    fix: str | Callable[[Plan], str]
    """The change to make, or the nearest plan that runs."""

    def reason_for(self, plan: Plan) -> str:
        """Why a plan does not run."""
        return self.reason if isinstance(self.reason, str) else self.reason(plan)

    def fix_for(self, plan: Plan) -> str:
        """The change to make in a plan."""
        return self.fix if isinstance(self.fix, str) else f"the nearest plan that runs: {self.fix(plan)}"
