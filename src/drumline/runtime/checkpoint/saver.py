"""Saves the whole state of an engine, in the foreground or background, so that any plan and any world size can load it.

    with Saver(engine, "runs/a/checkpoints", keep=3) as saver:
        ...
        saver.save(wait=False)      # returns when everything is copied; written while training continues

All ranks create, use and close a saver together. Errors in the background are raised by the next call.
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
from typing import Any

import torch

from ...comm.rank_status import rank_status
from ...core.errors import DrumlineError, InputError
from ..core.agreement import broadcast_text, first_error, raise_together
from ..core.engine_core import EngineCore
from . import commit, contents
from .codec import encode
from .disk import Disk
from .folder import prune, remove_leftovers
from .lock import FolderLock, check_shared
from .snapshot import SnapshotMemory, share

PATIENCE = 1800.0
"""Seconds that the first rank waits for the other ranks' parts."""


class Saver:
    """Writes checkpoints of one engine to one folder, which is locked for other jobs."""

    def __init__(
        self,
        engine: EngineCore,
        folder: str | Path,
        *,
        keep: int = 2,
        disk: Disk | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.engine, self.folder, self.keep = engine, Path(os.path.abspath(folder)), check_keep(keep)
        self.stall = 0.0
        """Seconds that the last save blocked training."""
        self.last: Path | None = None
        """The newest checkpoint that is known to be complete."""
        self._disk, self._patience = disk or Disk(), patience
        self._snapshot = SnapshotMemory()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: Path | None = None
        self._lock: FolderLock | None = None
        self.step, self._running = -1, False
        """The step of the last save, finished or not."""
        self._abort = threading.Event()
        self._nonce = broadcast_text(engine, secrets.token_hex(6) if engine.rank == 0 else None)
        raise_together(engine, self._prepare() if engine.rank == 0 else None)
        raise_together(engine, self._prepare() if engine.rank else None)
        self._replica = contents.replica_index(engine)

    def _prepare(self) -> DrumlineError | None:
        """Lock the folder and remove leftovers of unfinished saves; other ranks check that they see the lock."""
        try:
            if self.engine.rank:
                check_shared(self.folder, self._nonce, self.engine.rank)
                return None
            self._disk.make_folder(self.folder)
            self._lock = FolderLock(self._disk, self.folder, self._nonce)
            remove_leftovers(self._disk, self.folder)
        except DrumlineError as e:
            return e
        except OSError as e:
            self._release()
            return InputError(
                f"{self.folder} cannot be used for checkpoints: {e.strerror}", where=str(e.filename or self.folder)
            )
        return None

    def save(self, *, wait: bool = True) -> Path | None:
        """Save the current state. With `wait`, returns its path; else it is written while training continues.

        Replicas that differ are averaged first, and go on from the average, as a run that resumes from it would.
        """
        start = time.perf_counter()
        self.engine.drain()
        before = rank_status().place("saving")
        self._finish_pending()
        self.engine.average_replicas()
        request, error = self._request(copy=not wait)
        raise_together(self.engine, error)
        assert request is not None
        self.step, self._running = self.engine.steps, True
        self._thread = threading.Thread(target=self._write, args=(request,), name="drumline-save")
        self._thread.start()
        if wait:
            self._finish_pending()
        rank_status().place(before)
        self.stall = time.perf_counter() - start
        return self.last if wait else None

    def check(self) -> None:
        """Raise now, on all ranks, what a save would refuse."""
        raise_together(self.engine, self._request(copy=False)[1])

    def finish(self) -> Path | None:
        """Wait for the pending save and raise its error; returns the newest complete checkpoint."""
        self._finish_pending()
        return self.last

    def close(self) -> None:
        """Finish, and unlock the folder."""
        try:
            self.finish()
        finally:
            self._release()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # other ranks may not get here: no collective calls, but finish the pending write
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

    def _finish_pending(self) -> None:
        """Finish the pending save on all ranks, and raise on all if it failed on any."""
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
        if self.engine.rank == 0 and (failed or mine):
            self._free_disk()
        if failed is not None:
            raise failed
        raise_together(self.engine, mine if self.engine.rank == 0 else None)
        self.last = Path(broadcast_text(self.engine, str(self._written) if self.engine.rank == 0 else None))

    def _free_disk(self) -> None:
        """Remove what a failed save has written: its disk may be full. What stays is removed before the next save."""
        try:
            remove_leftovers(self._disk, self.folder)
        except OSError as e:
            print(f"drumline: an unfinished save in {self.folder} cannot be removed: {e.strerror}", file=sys.stderr)

    def _failure(self) -> DrumlineError | None:
        """The error of this rank's thread, if any."""
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error
        return None if self._error is None else commit.as_error(self._error, self.step, self.folder)

    def _request(self, *, copy: bool) -> tuple[commit.SaveRequest | None, DrumlineError | None]:
        """This rank's part of a save; or the error, if something cannot be saved."""
        engine = self.engine
        try:
            if engine.rank == 0:
                remove_leftovers(self._disk, self.folder)  # of a failed save
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)  # another thread and stream will read
            outline = contents.outline(engine)
            runs = share(contents.sharded(engine), self._replica)
            runs += share(contents.replicated(engine), contents.ReplicaIndex(engine.ranks, engine.rank))
            runs += contents.own(engine, outline)
            request = commit.SaveRequest(
                folder=self.folder,
                temporary=self.folder / f".writing-{self._nonce}-{engine.steps:08d}",
                rank=engine.rank,
                world=engine.ranks,
                runs=self._snapshot.copy(runs) if copy else runs,
                empty=contents.empty(engine, outline),
                names=contents.required_names(engine, outline),
                groups=contents.groups(engine),
                numbers=contents.scalars(engine) if self._replica.index == 0 else {},
                about=manifest_fields(engine, outline) if engine.rank == 0 else {},
                optimizer=type(engine.optimizer).__name__,
                patience=self._patience,
            )
        except DrumlineError as e:
            return None, e
        except OSError as e:
            return None, commit.as_error(e, engine.steps, self.folder)
        return request, None

    def _write(self, request: commit.SaveRequest) -> None:
        """Write the checkpoint, in a background thread."""
        self._written = None
        try:
            commit.write_part(self._disk, request)
            if request.rank == 0:
                self._written = commit.finish(self._disk, request, self._abort)
        except BaseException as e:
            self._error = e
            if not threading.main_thread().is_alive():  # no caller is left to raise it
                print(f"drumline: {commit.as_error(e, self.step, self.folder)}", file=sys.stderr)
            return
        if request.rank == 0:
            self._prune()

    def _prune(self) -> None:
        """Remove old checkpoints; a failure to do so does not fail the save."""
        try:
            prune(self._disk, self.folder, self.keep)
        except OSError as e:
            print(f"drumline: an old checkpoint in {self.folder} cannot be removed: {e.strerror}", file=sys.stderr)
        except BaseException as e:
            self._error = e


def saver_for(engine: EngineCore, folder: str | Path, *, keep: int, current: Saver | None) -> Saver:
    """The saver of a folder. `current`, from an earlier save, is kept if it is the folder's, else closed.

    A kept saver leaves the folder locked and reuses the memory of its copies.
    """
    if current is not None and current.folder != Path(os.path.abspath(folder)):
        current.close()
        current = None
    saver = current or Saver(engine, folder, keep=keep)
    saver.keep = check_keep(keep)
    return saver


def check_keep(keep: int) -> int:
    """Refuse to keep fewer than two checkpoints."""
    if keep < 2:
        raise InputError(f"keep={keep}", rule="keep >= 2: the newest may be damaged")
    return keep


def manifest_fields(engine: EngineCore, outline: contents.ModelOutline) -> dict[str, Any]:
    """The fields of the manifest besides tensors."""
    from ... import __version__

    job = engine.job
    source = getattr(engine.stream, "source", None)
    state: dict[str, Any] = {"extra": _extra_state(engine, outline)}
    for key in ("schedule", "scaler", "coordinator", "callbacks"):
        part = getattr(engine, key, None)
        if part is not None and (key != "callbacks" or part):
            if not hasattr(part, "state_dict"):
                raise InputError(f"the {key} has no state_dict()", rule="what is saved has a state_dict()")
            state[key] = encode(part.state_dict(), f"the {key}'s state")
    return {
        "step": engine.steps,
        "plan": str(engine.plan),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "job": {"source": job.source, "digest": job.digest, **({"order": source.name} if source is not None else {})},
        "versions": {"drumline": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "data": {
            "position": engine.position,
            "seed": job.seed,
            "batch_size": job.batch_size,
            **({"samples": source.length} if source is not None and source.length else {}),
        },
        "tied": outline.tied,
        "state": state,
    }


def _extra_state(engine: EngineCore, outline: contents.ModelOutline) -> dict[str, Any]:
    """Encoded extra state of modules."""
    modules = contents.extra_modules(engine, outline)
    return {name: encode(m.get_extra_state(), f"the extra state of module {name!r}") for name, m in modules.items()}
