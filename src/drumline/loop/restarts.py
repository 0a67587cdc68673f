"""Restarts a training after a fault, from its newest complete checkpoint, until it ends or makes no progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError, RankFailed
from .callbacks import Notify

if TYPE_CHECKING:
    from ..launchers.hang_watch import HangWatch
    from ..runtime.training.checkpoint_policy import CheckpointPolicy

RESTARTS = 3
"""Restarts without a new step after which a run gives up."""

Attempt = Callable[["CheckpointPolicy", int], list[Any]]
"""Runs the ranks under a checkpoint policy; the second argument is the number of restarts so far."""


@dataclasses.dataclass(frozen=True, slots=True)
class FaultOptions:
    """What happens when a rank fails."""

    restarts: int = RESTARTS
    """Restarts without a new step; 0 never restarts."""
    hang_timeout: str | None = None
    """How long ranks may make no progress; none: learnt from the steps."""
    chaos: str = ""
    """Faults to inject, for tests (runtime/training/chaos.py)."""

    def check(self) -> None:
        """Refuse bad values before anything is measured or started."""
        if self.restarts < 0:
            raise InputError(f"--restarts {self.restarts}", rule="a number of restarts, or 0")
        self.watch()
        if self.chaos:
            from ..runtime.training.chaos import parse_faults

            parse_faults(self.chaos)

    def watch(self) -> HangWatch:
        """The watch over the ranks."""
        from ..core.units import parse_seconds
        from ..launchers.hang_watch import HangWatch

        if self.hang_timeout is None:
            return HangWatch()
        try:
            seconds = parse_seconds(self.hang_timeout)
        except ValueError as e:
            raise InputError(f"--hang-timeout {self.hang_timeout}", rule=str(e)) from None
        if not seconds > 0:
            raise InputError(f"--hang-timeout {self.hang_timeout}", rule="more than no time")
        return HangWatch(seconds)


def run_with_restarts(
    attempt: Attempt,
    saves: CheckpointPolicy,
    options: FaultOptions,
    *,
    watch: HangWatch,
    steps_done: Callable[[], int],
    notify: Notify,
) -> tuple[list[Any], tuple[str, ...]]:
    """The results of the ranks, and the faults that were survived.

    Only a failed rank is worth a restart: input errors and guards end the run at once. So does an exception of the
    user's program before the first step, or twice after the same step: it would come again.
    """
    faults: list[str] = []
    best, useless = 0, 0
    last: tuple[str, int] | None = None
    policy = saves
    while True:
        try:
            return attempt(policy, len(faults)), tuple(faults)
        except RankFailed as e:
            done = steps_done()
            useless = 0 if done > best else useless + 1
            best = max(best, done)
            again = e.kind == "exception" and (last == (e.what, done) or not done)
            if not options.restarts or again:
                raise
            if useless >= options.restarts:
                raise RankFailed(
                    f"gave up after {len(faults)} restarts, {useless} of them without a new step: {e.what}",
                    rule=f"at most {options.restarts} restarts without a new step",
                    fix="--restarts allows more",
                    rank=e.rank,
                    kind=e.kind,
                    trace=e.trace,
                ) from None
            last = (e.what, done)
            if e.kind == "hang":
                watch.be_patient()
            faults.append(e.what.splitlines()[0])
            policy = _resumed(saves)
            notify(_restart_note(e, policy, saves))


def _resumed(saves: CheckpointPolicy) -> CheckpointPolicy:
    """The policy of the next attempt: from this run's own newest checkpoint, if it has one."""
    from ..runtime.checkpoint.folder import complete_checkpoints

    folder = Path(saves.folder)
    return dataclasses.replace(saves, resume=saves.folder) if complete_checkpoints(folder) else saves


def _restart_note(error: RankFailed, policy: CheckpointPolicy, saves: CheckpointPolicy) -> str:
    if policy.resume is not None:
        start = "the newest checkpoint"
    else:
        start = "step 0, because there is no checkpoint" + ("" if saves.every else " (--save-every N saves some)")
    return f"{error}\nrestarting from {start}"
