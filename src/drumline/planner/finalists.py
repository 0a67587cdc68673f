"""The finalists of a search are looked at more closely: a plan that fails there is not proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import PlanError
from ..costs import Estimate
from ..plans import Plan
from .objectives import Scored

WANTED = 3
"""Plans that must pass, the best first; then the rest is left as it is."""

TRIED = 12
"""Plans that are looked at before none is proposed."""

DryRun = Callable[[Plan, Estimate], str]
"""(plan, its estimate) -> why it is not to be proposed, or nothing."""


def passed(fitting: Sequence[Scored], dry_run: DryRun | None) -> list[Scored]:
    """The plans that fit, best first, without those that fail."""
    if dry_run is None:
        return list(fitting)
    kept: list[Scored] = []
    failed: list[str] = []
    for plan, estimate in fitting[:TRIED]:
        why = dry_run(plan, estimate)
        if why:
            failed.append(f"{plan}: {why}")
        else:
            kept.append((plan, estimate))
        if len(kept) == WANTED:
            break
    if failed and not kept:
        raise PlanError(
            f"none of the {len(failed)} best plans passes its dry run",
            where=failed[0],
            rule="a plan whose dry run fails is not proposed",
            fix="without --dry-run, the answer is the closed form's",
        )
    return [*kept, *fitting[len(kept) + len(failed) :]]
