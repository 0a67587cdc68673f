"""Dry runs of the best plans: a plan whose dry run fails is not proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import PlanError
from ..costs import Estimate
from ..plans import Plan
from .objectives import Scored

WANTED = 3
"""Plans that must pass, best first; the rest is not tried."""

TRIED = 12
"""Plans that are tried before the search gives up."""

DryRun = Callable[[Plan, Estimate], str]
"""(plan, its estimate) -> why it must not be proposed, or an empty string."""


def drop_failed(fitting: Sequence[Scored], dry_run: DryRun | None) -> list[Scored]:
    """Plans that fit, best first, without those whose dry run fails."""
    if dry_run is None:
        return list(fitting)
    passed: list[Scored] = []
    failed: list[str] = []
    for plan, estimate in fitting[:TRIED]:
        reason = dry_run(plan, estimate)
        if reason:
            failed.append(f"{plan}: {reason}")
        else:
            passed.append((plan, estimate))
        if len(passed) == WANTED:
            break
    if failed and not passed:
        raise PlanError(
            f"none of the {len(failed)} best plans passes its dry run",
            where=failed[0],
            rule="a plan whose dry run fails is not proposed",
            fix="without --dry-run, the answer is the cost model's",
        )
    return [*passed, *fitting[len(passed) + len(failed) :]]
