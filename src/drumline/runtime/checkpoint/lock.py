"""A lock on a folder, of checkpoints or of a run: one job at a time writes to it.

A kernel file lock shows whether the owner is alive, on one machine and on most shared file systems. Where it does not
work, the file has the owner's host and process, and its modification time is the heartbeat: an owner on this host
is asked for by its process, one on another host counts as dead when its heartbeat has stopped.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.units import format_seconds
from .disk import Disk

LOCK = "LOCK"
HEARTBEAT = 20.0
"""Seconds between heartbeats."""
VISIBLE = 20.0
"""Seconds within which a file that another host wrote must be visible."""
DEAD = 120.0
"""Seconds without a heartbeat after which an owner on another host counts as dead."""
SETTLE = 0.3
"""Seconds after which another job's entry would be visible, where the kernel does not lock."""


class FolderLock:
    """Locks a folder from construction until `release`, or until the process ends."""

    def __init__(self, disk: Disk, folder: Path, nonce: str, *, doing: str = "writes checkpoints to") -> None:
        self._path, self._doing = folder / LOCK, doing
        self._disk = disk
        self._handle = disk.open_lock(self._path)
        try:
            locked = disk.lock(self._handle)
            before = self._owner()
            if locked is False or (before and self._may_live(before, locked)):
                raise self._refusal(before)
            owner = {"pid": os.getpid(), "start": process_start(os.getpid()), "host": platform.node()}
            owner |= {"since": int(time.time()), "nonce": nonce}
            disk.rewrite(self._handle, (json.dumps(owner) + "\n").encode())
            if locked is None:  # two jobs may have read an empty file at the same moment: the later one has it
                time.sleep(SETTLE)
                if self._owner().get("nonce") != nonce:
                    raise self._refusal(self._owner())
        except BaseException:
            disk.close(self._handle)
            raise
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="drumline-lock", daemon=True)
        self._thread.start()

    def _may_live(self, owner: dict[str, Any], locked: bool | None) -> bool:
        """Whether an owner that the file names may still write; `locked` is None if the kernel cannot say."""
        if owner.get("host") not in (None, platform.node()):
            return self._age() < DEAD
        pid = owner.get("pid")
        alive = isinstance(pid, int) and pid > 0 and process_start(pid) == owner.get("start")
        return locked is None and alive

    def release(self) -> None:
        """Release the lock."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            with suppress(OSError):  # on a full disk, closing alone releases the lock
                self._disk.rewrite(self._handle, b"")
            self._disk.close(self._handle)

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT):
            with suppress(OSError):  # a full disk or a server that is away for a while: the next beat may arrive
                self._disk.touch(self._handle)

    def _owner(self) -> dict[str, Any]:
        return _parsed(os.pread(self._handle, 4096, 0))

    def _age(self) -> float:
        """Seconds since the owner's last heartbeat, by the file system's clock: hosts' clocks may differ."""
        probe = self._path.with_name(f".{LOCK}-{os.getpid()}")
        probe.unlink(missing_ok=True)
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - os.fstat(self._handle).st_mtime

    def _refusal(self, owner: dict[str, Any]) -> InputError:
        own = owner.get("pid") == os.getpid() and owner.get("host") == platform.node()
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
        since = owner.get("since")
        if isinstance(since, int):
            who += f", started {format_seconds(max(1.0, time.time() - since))} ago"
        return InputError(
            f"another job {self._doing} {self._path.parent}: {who}, seen {max(0.0, self._age()):.0f} s ago",
            where=str(self._path),
            rule="one job writes to a folder at a time",
            fix="wait for it (finish_saves() of the engine that saves there)"
            if own
            else "another folder, or end that job",
        )


def process_start(pid: int) -> str | None:
    """Start time of a process in the kernel's clock, which distinguishes it from a later one; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        pass
    except IndexError:
        return ""
    try:
        os.kill(pid, 0)  # a system without /proc
    except ProcessLookupError:
        return None
    except OSError:
        return ""
    return "" if not Path("/proc/self").exists() else None


def check_shared(folder: Path, nonce: str, rank: int) -> None:
    """Refuse a folder that this rank does not share with the first: no checkpoint there would be complete."""
    end = time.monotonic() + VISIBLE
    while True:
        with suppress(OSError):
            if _parsed((folder / LOCK).read_bytes()).get("nonce") == nonce:
                return
        if time.monotonic() > end:
            raise InputError(
                f"rank {rank} on {platform.node()} does not see the first rank's lock in {folder}",
                where=str(folder / LOCK),
                rule="all ranks share the checkpoint folder",
                fix="use a folder on a file system that all hosts mount",
            )
        time.sleep(0.05)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(text or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
