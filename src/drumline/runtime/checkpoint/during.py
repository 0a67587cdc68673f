"""Checkpoints during a training run: go on from one, save every so many steps, and save before the job is ended.

SIGTERM and SIGUSR1 (what schedulers send before they take a machine away), or a file STOP in the folder, end the run
after the step under way, with a checkpoint. A second signal ends the process at once.
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

from ...core.errors import GaveUp, InputError
from .saver import Saver, checked, saver_of

if TYPE_CHECKING:
    from ..engine import Engine

STOP = "STOP"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Saves:
    """What a run does about checkpoints."""

    folder: str
    every: int = 0
    """Steps between two; 0 saves only when the run is asked to end."""
    keep: int = 2
    resume: str | None = None
    """The checkpoint, or the folder of them, to go on from."""

    def __post_init__(self) -> None:
        checked(self.keep)
        if self.every < 0:
            raise InputError(f"--save-every {self.every}", rule="a number of steps, or 0")


class Keeper:
    """Keeps the checkpoints of one run, on one rank; all ranks call it at the same steps."""

    def __init__(self, engine: Engine, saves: Saves, say: Callable[[str], None]) -> None:
        self._engine, self._saves, self._say = engine, saves, say
        self._asked = False
        self.preempted = False
        """Whether the run was asked to end."""
        self._before: dict[signal.Signals, Any] = {}
        self.stalls: list[float] = []
        """Seconds that each save has kept the training waiting."""

    def begin(self) -> None:
        """Go on from the checkpoint that was named; refuse now what could not be saved later."""
        engine, saves = self._engine, self._saves
        if saves.resume is not None:
            loaded = engine.load(saves.resume)
            self._tell(f"resumed: {loaded.path}, step {loaded.step}, saved under {loaded.plan}")
        self._saver().check()
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._on_signal) for s in SIGNALS}

    def _on_signal(self, number: int, _: object) -> None:
        if self._asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._asked = True

    def after_step(self) -> bool:
        """Save when it is time to. Whether the run is to end here."""
        if self._stop_is_wanted():
            self.preempted = True
            self._tell("asked to end: saving")
            return True
        if self._saves.every and self._engine.steps % self._saves.every == 0:
            self._save(wait=False)
        return False

    def end(self) -> str:
        """Save what is not saved yet, and wait for it. The newest checkpoint."""
        saver = self._saver()
        try:
            if self.preempted or self._saves.every:
                self._save(wait=False)
            last = saver.finish()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self._engine.finish_saves()
        if self.preempted and self._engine.rank == 0:
            Path(self._saves.folder, STOP).unlink(missing_ok=True)
        if last is not None:
            self._tell(f"saved: {last}")
        return str(last or "")

    def _saver(self) -> Saver:
        return saver_of(self._engine, self._saves.folder, keep=self._saves.keep)

    def _save(self, *, wait: bool) -> None:
        """The step may be saved already. A save that failed is told of, and this one is tried all the same."""
        saver = self._saver()
        try:
            if saver.step == self._engine.steps:
                saver.finish()
            else:
                saver.save(wait=wait)
                self.stalls.append(saver.stall)
        except GaveUp as e:
            self._tell(f"{e.what}; it is tried again")
            saver.save(wait=wait)

    def _stop_is_wanted(self) -> bool:
        """Whether any rank was asked to end: all must stop after the same step."""
        asked = self._asked or (self._engine.rank == 0 and Path(self._saves.folder, STOP).exists())
        if self._engine.ranks == 1:
            return asked
        flag = torch.tensor([int(asked)], dtype=torch.int32, device=self._engine.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._engine.group)
        return bool(flag.item())

    def _tell(self, text: str) -> None:
        if self._engine.rank == 0:
            self._say(text)


def steps_left(engine: Engine, steps: int) -> int:
    """How many of a job's steps are left to train; none is refused."""
    if engine.position >= steps:
        raise InputError(
            f"the checkpoint is at step {engine.position}, and the job has {steps}",
            rule="a step is left to train",
            fix=f"--steps with more than {engine.position}",
        )
    return steps - engine.position
