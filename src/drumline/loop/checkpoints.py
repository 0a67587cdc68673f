"""Checkpoints of a training: where they go, which one it resumes from, and how a signal ends it with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InputError

if TYPE_CHECKING:
    from ..runtime.training.checkpoint_policy import CheckpointPolicy
    from ..theory.checkpoint_interval import FailureRate
    from .callbacks import Notify

FOLDER = "checkpoints"


def parse_failures(mtbf: str | float | None) -> FailureRate:
    """The value of --mtbf; the usual rate of a device if none is given."""
    from ..theory.checkpoint_interval import USUAL_DEVICE_MTBF, FailureRate

    try:
        return FailureRate.parse(USUAL_DEVICE_MTBF if mtbf is None else mtbf)
    except ValueError as e:
        fix = "--mtbf 50000h for one device, --mtbf 12h/run for the whole run"
        raise InputError(f"--mtbf {mtbf}", rule=str(e), fix=fix) from None


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """When to save, and what to resume from."""

    every: int = 0
    """Steps between two checkpoints; 0 saves only when the run is asked to stop, or was resumed."""
    keep: int = 2
    """Checkpoints that stay on disk."""
    resume: str | None = None
    """`auto` (the newest checkpoint), or a path."""
    mtbf: str | None = None
    """Mean time between failures, for the advice on `every`: `50000h` of one device, or `12h/run`."""

    def check(self) -> None:
        """Refuse bad values before anything is measured or started."""
        from ..runtime.training.checkpoint_policy import CheckpointPolicy

        parse_failures(self.mtbf)
        if self.every or self.resume is not None:
            CheckpointPolicy("", self.every, self.keep)
        if self.resume not in (None, "auto"):
            from ..runtime.checkpoint.folder import find_checkpoints

            find_checkpoints(Path(str(self.resume)))

    def advice(self, stall: float | None, step: float, ranks: int) -> str:
        """How often to save, given that a save stalled the training for `stall` seconds; nothing if none did."""
        if not self.every or not stall or not step:
            return ""
        from ..core.units import format_seconds
        from ..theory.checkpoint_interval import save_interval

        rate = parse_failures(self.mtbf)
        best = save_interval(stall, rate.of_run(ranks))
        steps = max(1, round(best / step))
        return (
            f"a save stalls training for {format_seconds(stall)}; if {rate.in_words(ranks)} (--mtbf), "
            f"saving every {format_seconds(best)} loses the least time (Young/Daly): --save-every {steps}"
        )

    def policy(self, job: str, folder: Path, notify: Notify) -> CheckpointPolicy:
        """Instructions for the ranks of a run in `folder`."""
        from ..runtime.training.checkpoint_policy import CheckpointPolicy

        resume = self.resume
        if resume == "auto":
            resume = _newest(job, folder)
            if resume is None:
                notify("no checkpoint to resume from: the run starts at step 0")
        return CheckpointPolicy(str(folder / FOLDER), self.every, self.keep, resume)


def continues(saves: CheckpointPolicy, folder: Path) -> bool:
    """Whether the run continues the one in its own run folder, not a copy or another run."""
    if saves.resume is None:
        return False
    return Path(saves.resume).resolve().is_relative_to(folder.resolve())


def _newest(job: str, folder: Path) -> str | None:
    """The checkpoints to resume from: this run's, or those of the job's run that saved last."""
    from ..runtime.checkpoint.folder import complete_checkpoints

    if complete_checkpoints(folder / FOLDER):
        return str(folder / FOLDER)
    folders = [p / FOLDER for p in Path("runs").glob(f"{job}-*") if complete_checkpoints(p / FOLDER)]
    return str(max(folders, key=lambda p: complete_checkpoints(p)[0].stat().st_mtime)) if folders else None


@contextmanager
def stop_on_signal(saves: CheckpointPolicy) -> Iterator[None]:
    """During a run: the first SIGTERM or SIGUSR1 asks the ranks to save and end, a second one ends at once.

    Python handles signals in the main thread only: a training started from another thread leaves them alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from ..runtime.training.checkpoint_policy import SIGNALS, STOP

    stop = Path(saves.folder) / STOP
    asked = False

    def ask(number: int, _: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt(signal.Signals(number).name)
        asked = True
        stop.parent.mkdir(parents=True, exist_ok=True)
        stop.touch()

    stop.unlink(missing_ok=True)  # of an earlier run
    before = {s: signal.signal(s, ask) for s in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.unlink(missing_ok=True)
