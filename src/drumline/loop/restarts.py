"""Restarts a training after a fault, from its newest complete checkpoint, until it ends or makes no progress.

With `min_ranks`, a rank that fails again before a new step is given up: the run continues with fewer replicas, the same
global batch and the same samples, and tries its full size again later.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import InputError, PlanError, RankFailed
from .callbacks import Notify

if TYPE_CHECKING:
    from ..launchers.failures import RankEnd
    from ..launchers.hang_watch import HangWatch
    from ..plans import Plan
    from ..runtime.training.checkpoint_policy import CheckpointPolicy
    from .training_events import TrainingEvents

RESTARTS = 3
"""Restarts without a new step after which a run gives up."""
REGROW = 60.0
"""Seconds until a run that lost ranks tries its full size again; doubled after each failed try."""
_LINE = re.compile(r'^ *File (".+", line \d+)', re.MULTILINE)
"""A line of the program in a traceback."""
_INJECTED = "failed: InjectedError:"
"""How the failure of a rank begins into which an exception was injected."""


@dataclasses.dataclass(frozen=True, slots=True)
class FaultOptions:
    """Options of a run for when a rank fails."""

    restarts: int = RESTARTS
    """Restarts without a new step; 0 never restarts."""
    hang_timeout: str | None = None
    """How long ranks may make no progress; none: learnt from the steps."""
    min_ranks: int | None = None
    """Continue with fewer ranks, but not fewer than these, if a rank does not come back; none: never."""
    regrow: float = REGROW
    """Seconds until a run that lost ranks tries its full size again."""
    chaos: str = ""
    """Faults to inject, for tests (comm/fault_injection.py)."""

    def check(self) -> None:
        """Refuse bad values before anything is measured or started."""
        if self.restarts < 0:
            raise InputError(f"--restarts {self.restarts}", rule="a number of restarts, or 0")
        if self.min_ranks is not None and self.min_ranks < 1:
            raise InputError(f"--min-ranks {self.min_ranks}", rule="at least one rank")
        if not self.regrow > 0:
            raise InputError(f"regrow={self.regrow}", rule="a time above 0")
        self.watch()
        if self.chaos:
            from ..comm.fault_injection import parse_faults

            parse_faults(self.chaos)

    def check_chaos(self, plan: Plan, steps: int) -> None:
        """Refuse injected faults that a run under this plan cannot have."""
        if self.chaos:
            from ..comm.fault_injection import check_faults

            check_faults(self.chaos, processes=plan.processes, steps=steps)

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
            raise InputError(f"--hang-timeout {self.hang_timeout}", rule="a time above 0")
        return HangWatch(seconds)


class Attempt(Protocol):
    """Runs the ranks once."""

    def __call__(self, plan: Plan, saves: CheckpointPolicy, number: int) -> list[Any]:
        """The results of the ranks; `number` is the number of restarts so far."""


class RestartLoop:
    """Runs a training until it ends, through the faults of its ranks.

    Only a failed rank is worth a restart: input errors and guards end the run at once. So does an exception of the
    user's program before the first step, or twice after the same step: it would come again.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        saves: CheckpointPolicy,
        options: FaultOptions,
        *,
        steps: int,
        watch: HangWatch,
        steps_done: Callable[[], int],
        notify: Notify,
    ) -> None:
        self._attempt, self._saves, self._options, self._steps = attempt, saves, options, steps
        self._watch, self._steps_done, self._notify = watch, steps_done, notify
        self._full = self.plan = plan
        """The plan of the current attempt, smaller than the full one while ranks are lost."""
        self.faults: list[str] = []
        """The faults that were survived."""
        self._number = 0
        self._best, self._useless = -1, 0
        self._last: tuple[str, int, int] | None = None
        """The fault, rank and step of the last failure."""
        self._fails_at = 0
        """The step in which an exception ended the last attempt; its second coming ends the run."""
        self._shrinks = 0
        own = saves.resume is not None and Path(saves.resume).resolve() == Path(saves.folder).resolve()
        self._old = frozenset() if own else frozenset(_checkpoints(saves.folder))
        """Checkpoints of another run in the same folder."""

    def run(self) -> list[Any]:
        """The results of the ranks."""
        policy = self._saves
        while True:
            try:
                with _StopLater(policy, self._regrow()) as stop:
                    results = self._attempt(self.plan, policy, self._number)
                if not (stop.asked and results[0]["preempted"]):
                    return results
                self.plan = self._full
                self._notify(f"trying all {self.plan.ranks} ranks again: {self.plan}")
            except RankFailed as e:
                self._after(e)
                self._notify(f"{e}\nrestarting {self.plan} from {self._start()}")
            self._number += 1
            policy = dataclasses.replace(self._resumed(), before=self._fails_at)

    def _after(self, e: RankFailed) -> None:
        """Decide how the next attempt runs; raise if there is none."""
        done = self._steps_done()
        self._fails_at = done if e.kind in ("exception", "memory") else 0
        self._useless = 0 if done > self._best else self._useless + 1
        self._best = max(self._best, done)
        before, self._last = self._last, (_fault(e), e.rank, done)
        stuck = before is not None and before[1:] == (e.rank, done)
        smaller = self._smaller() if stuck and e.rank >= 0 else None
        if not self._options.restarts:
            raise e
        if smaller is not None:
            self._shrinks += self.plan == self._full
            self.plan, self._useless, self._last = smaller, 0, None
            self.faults.append(f"{_first_line(e)}; continued with {smaller}")
            return
        again = before is not None and before[::2] == self._last[::2]
        if e.kind in ("exception", "memory") and (not done or again):
            raise e
        if self._useless >= self._options.restarts:
            raise RankFailed(
                f"gave up after {_restarts(self._number)}, {self._useless} of them without a new step: {e.what}",
                where=e.where,
                rule=f"at most {_restarts(self._options.restarts)} without a new step",
                fix="--restarts allows more" + ("; --min-ranks N continues with fewer ranks" if stuck else ""),
                rank=e.rank,
                kind=e.kind,
                trace=e.trace,
            ) from None
        if e.kind == "hang" and self._useless:  # the same step again: it may only be slow
            self._watch.be_patient()
        self.faults.append(_first_line(e))

    def _smaller(self) -> Plan | None:
        """The plan with the most replicas below the current one; none if fewer ranks are not allowed."""
        from ..plans import check

        for dp in range(self.plan.dp - 1, 0, -1):
            try:
                plan = dataclasses.replace(self.plan, dp=dp)
                check(plan)
            except PlanError:
                continue
            if plan.ranks >= (self._options.min_ranks or self._full.ranks):
                return plan
        return None

    def _regrow(self) -> float | None:
        """Seconds until the full size is tried again; none if no rank is lost."""
        return self._options.regrow * 2 ** (self._shrinks - 1) if self.plan != self._full else None

    def _resumed(self) -> CheckpointPolicy:
        """The policy of the next attempt: from this run's own newest checkpoint, if it has one.

        A rank that fails after the last save leaves a checkpoint without a step to train: the one before is used.
        """
        from ..runtime.checkpoint.folder import step_of

        complete = _checkpoints(self._saves.folder)
        new = [path for path in complete if path not in self._old and step_of(path) < self._steps]
        if not new:
            return self._saves
        # the folder, where possible: if its newest checkpoint is damaged, the one before is used
        resume = self._saves.folder if new[0] == complete[0] and not self._old else str(new[0])
        return dataclasses.replace(self._saves, resume=resume)

    def _start(self) -> str:
        """Where the next attempt begins, in words."""
        policy = self._resumed()
        if policy is not self._saves:
            return "the newest checkpoint"
        if policy.resume is not None:
            return policy.resume
        if any(path not in self._old for path in _checkpoints(policy.folder)):
            return "step 0, because the only checkpoint is of the last step"
        return "step 0, because there is no checkpoint" + ("" if policy.every else " (--save-every N saves some)")


class Replacements:
    """Replaces single processes of a plan with a coordinator: a worker by itself, parameter servers together.

    A process that fails again and again without a new update in between ends the attempt.
    """

    def __init__(self, plan: Plan, options: FaultOptions, events: TrainingEvents) -> None:
        self._plan, self._options, self._events = plan, options, events
        self._useless: dict[int, int] = {}
        self._best = -1

    def __call__(self, end: RankEnd) -> Sequence[int]:
        """The ranks to restart; none if the failure ends the attempt."""
        plan, error = self._plan, end.error
        if not isinstance(error, RankFailed) or not self._options.restarts:
            return ()
        if self._events.steps_done > self._best:
            self._best = self._events.steps_done
            self._useless.clear()
        if error.kind in ("exception", "memory") and not end.follow_up and self._useless.get(end.rank):
            return ()  # it would come again
        self._useless[end.rank] = self._useless.get(end.rank, 0) + 1
        if self._useless[end.rank] > self._options.restarts:
            return ()
        worker = end.rank < plan.dp
        self._events.faults.append(_first_line(error))
        who = "worker" if worker else "parameter servers"
        self._events.observer.warn(f"{error}\nreplacing the {who}; the others go on")
        return (end.rank,) if worker else tuple(range(plan.dp, plan.processes))


class _StopLater:
    """Asks the ranks to save and stop after some seconds, unless they end before."""

    def __init__(self, saves: CheckpointPolicy, seconds: float | None) -> None:
        from ..runtime.training.checkpoint_policy import STOP

        self._file = Path(saves.folder) / STOP
        self._timer = threading.Timer(seconds, self._ask) if seconds else None
        self.asked = False

    def _ask(self) -> None:
        self.asked = True
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.touch()

    def __enter__(self) -> _StopLater:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._file.unlink(missing_ok=True)


def _checkpoints(folder: str) -> list[Path]:
    from ..runtime.checkpoint.folder import complete_checkpoints

    return complete_checkpoints(Path(folder))


def _fault(e: RankFailed) -> str:
    """Identity of a failure, the same when it comes again: of an exception its type and the line that raised it.

    Its text may name an address or a process, and all ranks may raise it, each time another one first. Injected ones
    all come from one line; their text has the attempt and the step.
    """
    what = e.what.removeprefix(f"rank {e.rank} ")
    lines = _LINE.findall(e.trace) if e.kind == "exception" and not what.startswith(_INJECTED) else []
    return f"{what.removeprefix('failed: ').partition(':')[0]} at {lines[-1]}" if lines else what


def _restarts(count: int) -> str:
    return "1 restart" if count == 1 else f"{count} restarts"


def _first_line(error: RankFailed) -> str:
    return error.what.splitlines()[0]
