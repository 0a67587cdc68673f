"""Checkpoints during a training run: resume from one, save every n steps, and save before the job is preempted.

SIGTERM and SIGUSR1 (which schedulers send before they take a machine away), or a file STOP in the folder, end the run
after the current step, with a checkpoint. A second signal ends the process immediately. Ranks that step by themselves
save and stop where they meet: what is due in between is done at the next meeting.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...core.errors import DrumlineError, GaveUp, InputError
from ..checkpoint.saver import Saver, check_keep

if TYPE_CHECKING:
    from ..engine import Engine

STOP = "STOP"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The folder and interval of a run's checkpoints, and the one to resume from."""

    folder: str
    every: int = 0
    """Steps between saves; 0 saves only when the run is asked to stop, before a step that fails, and at the end of a
    run that was resumed."""
    keep: int = 2
    resume: str | None = None
    """The checkpoint, or the folder of checkpoints, to resume from."""
    before: int = 0
    """A step before which everything is saved, because it failed in the last attempt and may fail again; 0: none."""

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.every < 0:
            raise InputError(f"--save-every {self.every}", rule="a number of steps, or 0")


class TrainingCheckpoints:
    """Saves and resumes the checkpoints of one run; all ranks call it at the same steps."""

    def __init__(self, engine: Engine, policy: CheckpointPolicy, report: Callable[[str], None]) -> None:
        self._engine, self._policy, self._report = engine, policy, report
        self._stop_requested = False
        self._checked = 0
        """Steps when a save was last considered."""
        self.preempted = False
        """Whether the run was asked to stop."""
        self._old_handlers: dict[signal.Signals, Any] = {}
        self.stalls: list[float] = []
        """Seconds that each save blocked training."""

    def begin(self) -> None:
        """Resume from the given checkpoint; refuse now what could not be saved later."""
        engine, policy = self._engine, self._policy
        if policy.resume is not None:
            loaded = engine.load(policy.resume)
            self._say(f"resumed: {loaded.path}, step {loaded.step}, saved under {loaded.plan}")
        self._checked = engine.steps
        if self._saves_work:
            self._saver().check()
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {s: signal.signal(s, self._on_signal) for s in SIGNALS}
            # a handler may have been asked while the training was set up (launchers/early_signals.py)
            self._stop_requested = any(getattr(old, "asked", False) for old in self._old_handlers.values())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher starts ranks with these blocked

    @property
    def _saves_work(self) -> bool:
        """Whether the end of the run is saved, also if it is not asked to stop."""
        return bool(self._policy.every) or self._policy.resume is not None

    def _on_signal(self, number: int, _: object) -> None:
        if self._stop_requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._stop_requested = True

    def after_step(self) -> bool:
        """Save if it is due. Whether the run is to stop here. All ranks call it after steps at which they meet."""
        if self._should_stop():
            self.preempted = True
            self._say("asked to stop: saving a checkpoint")
            return True
        saves, self._checked = self.saves_now, self._engine.steps + self._engine.steps_in_flight
        if self._step_may_fail:
            self._save(wait=True)
            self._say(f"saved before the step that failed: {self._saver().last}")
        elif saves:
            self._save(wait=False)
        return False

    @property
    def saves_now(self) -> bool:
        """Whether a save is due after this step: it completes the steps in flight."""
        every, steps = self._policy.every, self._engine.steps + self._engine.steps_in_flight
        return self._step_may_fail or (bool(every) and steps // every > self._checked // every)

    @property
    def _step_may_fail(self) -> bool:
        """Whether the next step failed in the last attempt. Not where a save changes the steps that follow."""
        engine = self._engine
        return engine.position == self._policy.before and engine.in_flight is None and not engine.strategy.steps_alone

    def end(self) -> str:
        """Save what is not saved yet, and wait for it. Returns the newest checkpoint."""
        last = None
        try:
            if self.preempted or self._saves_work:
                self._save(wait=False)
                last = self._saver().finish()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        self._engine.finish_saves()
        if self.preempted and self._engine.rank == 0:
            Path(self._policy.folder, STOP).unlink(missing_ok=True)
        if last is not None:
            self._say(f"saved: {last}")
        return str(last or "")

    def save_good_weights(self) -> None:
        """Save before an error that all ranks raise together ends the run: its weights are those of the last good step.

        A failure to save does not hide that error.
        """
        try:
            if self._engine.steps:
                self._save(wait=True)
                self._say(f"saved before the run stops: {self._saver().last}")
        except DrumlineError as e:
            self._say(f"the last good step is not saved: {e.what}")

    def _saver(self) -> Saver:
        return self._engine.saver_for(self._policy.folder, keep=self._policy.keep)

    def _save(self, *, wait: bool) -> None:
        """Save the current step unless it is saved already. A failed earlier save is reported; this one is tried."""
        saver = self._saver()
        self._engine.drain()
        try:
            if saver.step == self._engine.steps:
                saver.finish()
            else:
                saver.save(wait=wait)
                self.stalls.append(saver.stall)
        except GaveUp as e:
            self._say(f"{e.what}; trying again")
            saver.save(wait=wait)

    def _should_stop(self) -> bool:
        """Whether any rank was asked to stop: all must stop after the same step."""
        stop = self._stop_requested or (self._engine.rank == 0 and Path(self._policy.folder, STOP).exists())
        if self._engine.ranks == 1:
            return stop
        if self._engine.in_flight is not None:  # ranks do not meet between steps: it goes with a batch's numbers
            self._engine.in_flight.stop_wanted = stop
            return self._engine.in_flight.stop_agreed
        flag = torch.tensor([int(stop)], dtype=torch.int32, device=self._engine.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._engine.group)
        return bool(flag.item())

    def _say(self, text: str) -> None:
        if self._engine.rank == 0:
            self._report(text)


def steps_left(engine: Engine, steps: int) -> int:
    """Number of steps left to train; zero is refused."""
    if engine.position >= steps:
        raise InputError(
            f"the checkpoint is at step {engine.position}, and the job has {steps} steps",
            rule="at least one step is left to train",
            fix=f"--steps with more than {engine.position}",
        )
    return steps - engine.position
