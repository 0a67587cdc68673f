"""Saves an engine's whole state, at once or in the background, so that any plan and any number of ranks can load it.

    with Saver(engine, "runs/a/checkpoints", keep=3) as saver:
        ...
        saver.save(wait=False)      # returns when everything is copied; the writing goes on beside the training

All ranks make a saver, save and close it together. What fails in the background is raised by the next call.
"""

from __future__ import annotations

import datetime
import os
import platform
import secrets
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ...core.errors import DrumlineError, InputError
from . import commit, view
from .agree import agree, first_error, tell
from .codec import encode
from .disk import Disk
from .folder import clean, prune
from .lock import Lock, check_shared
from .share import share
from .snapshot import Block

if TYPE_CHECKING:
    from ..engine import Engine

PATIENCE = 1800.0
"""Seconds that the first rank waits for the parts of the others."""


class Saver:
    """Writes checkpoints of one engine to one folder, which no other job may write to meanwhile."""

    def __init__(
        self, engine: Engine, folder: str | Path, *, keep: int = 2, disk: Disk | None = None, patience: float = PATIENCE
    ) -> None:
        self.engine, self.folder, self.keep = engine, Path(os.path.abspath(folder)), checked(keep)
        self.stall = 0.0
        """Seconds that the last save kept the training waiting."""
        self.last: Path | None = None
        """The newest checkpoint that is known to be complete."""
        self._disk, self._patience = disk or Disk(), patience
        self._block = Block()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: Path | None = None
        self._lock: Lock | None = None
        self.step, self._running = -1, False
        """The step that was saved last, or is being saved."""
        self._abort = threading.Event()
        self._nonce = tell(engine, secrets.token_hex(6) if engine.rank == 0 else None)
        agree(engine, self._prepare() if engine.rank == 0 else None)
        agree(engine, self._prepare() if engine.rank else None)
        self._copies = view.copies_of_pieces(engine)

    def _prepare(self) -> DrumlineError | None:
        """Take the folder, and sweep out what saves that did not end have left; the other ranks must see that."""
        try:
            if self.engine.rank:
                check_shared(self.folder, self._nonce, self.engine.rank)
                return None
            self._disk.make_folder(self.folder)
            self._lock = Lock(self._disk, self.folder, self._nonce)
            clean(self._disk, self.folder)
        except DrumlineError as e:
            return e
        except OSError as e:
            self._release()
            return InputError(
                f"{self.folder} cannot hold checkpoints: {e.strerror}", where=str(e.filename or self.folder)
            )
        return None

    def save(self, *, wait: bool = True) -> Path | None:
        """Save the state of this moment. With `wait`, its path; else it is written while the training goes on."""
        start = time.perf_counter()
        self._settle()
        order, error = self._order(copy=not wait)
        agree(self.engine, error)
        assert order is not None
        self.step, self._running = self.engine.steps, True
        self._thread = threading.Thread(target=self._write, args=(order,), name="drumline-save")
        self._thread.start()
        if wait:
            self._settle()
        self.stall = time.perf_counter() - start
        return self.last if wait else None

    def check(self) -> None:
        """Refuse now, on all ranks, what a save would refuse later."""
        agree(self.engine, self._order(copy=False)[1])

    def finish(self) -> Path | None:
        """Wait for what is being written; raise what went wrong. The newest complete checkpoint."""
        self._settle()
        return self.last

    def close(self) -> None:
        """Finish, and let others write to the folder."""
        try:
            self.finish()
        finally:
            self._release()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # the other ranks may not come here: no agreement, but what is being written is finished
            self._join(commit.GRACE)
            self._abort.set()
            self._join()
            self._release()

    def _join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _settle(self) -> None:
        """End the save that is under way, on all ranks, and raise on all of them when it failed on any."""
        if not self._running:
            return
        self._running = False
        if self.engine.rank:
            self._join()
        # the first rank waits for the parts of the others: it must hear first when one will not come
        failed = first_error(self.engine, self._failure() if self.engine.rank else None)
        if failed is not None:
            self._abort.set()
        self._join()
        self._abort.clear()
        mine = self._failure()
        self._error = None
        if failed is not None:
            raise failed
        agree(self.engine, mine if self.engine.rank == 0 else None)
        self.last = Path(tell(self.engine, str(self._written) if self.engine.rank == 0 else None))

    def _failure(self) -> DrumlineError | None:
        """What went wrong in this rank's thread."""
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error
        return None if self._error is None else commit.as_error(self._error, self.step, self.folder)

    def _order(self, *, copy: bool) -> tuple[commit.Order | None, DrumlineError | None]:
        """What this rank is to write; an error instead, when something cannot be saved."""
        engine = self.engine
        try:
            if engine.rank == 0:
                clean(self._disk, self.folder)  # of a save that failed
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)  # another thread, and another stream, will read
            outline = view.outline(engine)
            held = share(view.sharded(engine), self._copies)
            held += share(view.common(engine), view.Copies(engine.ranks, engine.rank))
            held += view.own(engine, outline)
            order = commit.Order(
                folder=self.folder,
                temporary=self.folder / f".writing-{self._nonce}-{engine.steps:08d}",
                rank=engine.rank,
                world=engine.ranks,
                held=self._block.copy(held) if copy else held,
                empty=view.empty(engine, outline),
                names=view.names(engine, outline),
                groups=view.groups(engine),
                numbers=view.numbers(engine) if self._copies.index == 0 else {},
                about=about(engine, outline) if engine.rank == 0 else {},
                optimizer=type(engine.optimizer).__name__,
                patience=self._patience,
            )
        except DrumlineError as e:
            return None, e
        except OSError as e:
            return None, commit.as_error(e, engine.steps, self.folder)
        return order, None

    def _write(self, order: commit.Order) -> None:
        """Write it, on a thread of its own."""
        self._written = None
        try:
            commit.write_part(self._disk, order)
            if order.rank == 0:
                self._written = commit.finish(self._disk, order, self._abort)
        except BaseException as e:
            self._error = e
            if not threading.main_thread().is_alive():  # nobody is left to raise it
                print(f"drumline: {commit.as_error(e, self.step, self.folder)}", file=sys.stderr)
            return
        if order.rank == 0:
            self._prune()

    def _prune(self) -> None:
        """Old checkpoints that cannot be removed take room, but the new one is there all the same."""
        try:
            prune(self._disk, self.folder, self.keep)
        except OSError as e:
            print(f"drumline: an old checkpoint in {self.folder} cannot be removed: {e.strerror}", file=sys.stderr)
        except BaseException as e:
            self._error = e


def saver_of(engine: Engine, folder: str | Path, *, keep: int) -> Saver:
    """The saver that an engine keeps from save to save: the folder stays locked, the memory of copies is used again."""
    saver = engine.saver
    if saver is not None and saver.folder != Path(os.path.abspath(folder)):
        saver.close()
        saver = engine.saver = None
    if saver is None:
        saver = engine.saver = Saver(engine, folder, keep=keep)
    saver.keep = checked(keep)
    return saver


def checked(keep: int) -> int:
    """Refuse to keep one checkpoint alone."""
    if keep < 2:
        raise InputError(f"keep={keep}", rule="keep >= 2: the newest may turn out to be damaged")
    return keep


def about(engine: Engine, outline: view.Outline) -> dict[str, Any]:
    """What the manifest says beside tensors."""
    from ... import __version__

    job = engine.job
    dataset = getattr(engine.stream, "dataset", None)
    state: dict[str, Any] = {"extra": _extra(engine, outline)}
    for key in ("schedule", "scaler"):
        part = getattr(engine, key, None)
        if part is not None:
            if not hasattr(part, "state_dict"):
                raise InputError(f"the {key} has no state_dict()", rule="what is saved must be able to say its state")
            state[key] = encode(part.state_dict(), f"the {key}'s state")
    return {
        "step": engine.steps,
        "plan": str(engine.plan),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "job": {"source": job.source, "digest": job.digest},
        "versions": {"drumline": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "data": {
            "position": engine.position,
            "seed": job.seed,
            "batch_size": job.batch_size,
            **({"samples": len(dataset)} if dataset is not None else {}),
        },
        "tied": outline.tied,
        "state": state,
    }


def _extra(engine: Engine, outline: view.Outline) -> dict[str, Any]:
    """What modules keep beside their tensors."""
    modules = view.extra_modules(engine, outline)
    return {name: encode(m.get_extra_state(), f"the extra state of module {name!r}") for name, m in modules.items()}
