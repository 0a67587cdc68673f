"""What `drumline train` does about checkpoints: where they go, which one it goes on from, how a run ends early."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InputError

if TYPE_CHECKING:
    from ..runtime.checkpoint.during import Saves

FOLDER = "checkpoints"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The options of the command."""

    every: int = 0
    keep: int = 2
    resume: str | None = None
    """`auto`, or a path."""
    mtbf: str = "24h"
    """The mean time between failures, for the advice on `every`."""

    def check(self) -> None:
        """Refuse what cannot be, before anything is measured or started."""
        from ..runtime.checkpoint.during import Saves

        self._mtbf()
        if self.every or self.resume is not None:
            Saves("", self.every, self.keep)
        if self.resume not in (None, "auto"):
            from ..runtime.checkpoint.folder import find

            find(Path(str(self.resume)))

    def advice(self, stall: float | None, step: float) -> str:
        """How often to save, when a save has kept the training waiting for `stall` seconds; nothing where none has."""
        if not self.every or not stall or not step:
            return ""
        from ..core.units import format_seconds
        from ..costs.interval import save_interval

        mtbf = self._mtbf()
        best = save_interval(stall, mtbf)
        steps = max(1, round(best / step))
        return (
            f"a save stalls the training for {format_seconds(stall)}: with a failure every {format_seconds(mtbf)}, "
            f"least time is lost by saving every {format_seconds(best)} (Young/Daly), --save-every {steps}"
        )

    def _mtbf(self) -> float:
        from ..core.units import parse_seconds

        try:
            found = parse_seconds(self.mtbf)
        except ValueError as e:
            raise InputError(f"--mtbf {self.mtbf}", rule=str(e)) from None
        if found <= 0:
            raise InputError(f"--mtbf {self.mtbf}", rule="more than no time")
        return found

    def of(self, job: str, folder: Path) -> Saves | None:
        """What the ranks are to do, in the run folder `folder`; nothing when nothing was asked for."""
        if not self.every and self.resume is None:
            return None
        from ..runtime.checkpoint.during import Saves

        resume = self.resume
        if resume == "auto":
            resume = _newest(job, folder)
            if resume is None:
                print("no checkpoint to go on from: the run starts at step 0")
        return Saves(str(folder / FOLDER), self.every, self.keep, resume)


def goes_on(saves: Saves | None, folder: Path) -> bool:
    """Whether the run continues the one that the run folder holds, and not a copy or another one."""
    if saves is None or saves.resume is None:
        return False
    return Path(saves.resume).resolve().is_relative_to(folder.resolve())


def _newest(job: str, folder: Path) -> str | None:
    """The folder of checkpoints to go on from: this run's, or those of the job's run that was saved last."""
    from ..runtime.checkpoint.folder import complete

    if complete(folder / FOLDER):
        return str(folder / FOLDER)
    found = [p / FOLDER for p in Path("runs").glob(f"{job}-*") if complete(p / FOLDER)]
    return str(max(found, key=lambda p: complete(p)[0].stat().st_mtime)) if found else None


@contextmanager
def stopping(saves: Saves | None) -> Iterator[None]:
    """Around the run: the first SIGTERM or SIGUSR1 asks the ranks to save and end, a second one ends all at once."""
    if saves is None:
        yield
        return
    from ..runtime.checkpoint.during import SIGNALS, STOP

    stop = Path(saves.folder) / STOP

    def ask(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.parent.mkdir(parents=True, exist_ok=True)
        stop.touch()

    stop.unlink(missing_ok=True)  # of a run before
    before = {s: signal.signal(s, ask) for s in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.unlink(missing_ok=True)
