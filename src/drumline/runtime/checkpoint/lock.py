"""One job at a time writes to a folder of checkpoints.

The kernel's lock on a file tells whether the owner lives, on one machine and on most shared file systems. Where it does
not reach other machines, the owner's host, process and the age of its last sign of life are in the file itself.
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
from .disk import Disk

LOCK = "LOCK"
BEAT = 20.0
"""Seconds between signs of life."""
SHARED = 20.0
"""Seconds after which a file that another host has written must be seen."""
DEAD = 120.0
"""Seconds without one after which an owner on another host counts as dead."""


class Lock:
    """Held from its making until `release`, or until the process ends."""

    def __init__(self, disk: Disk, folder: Path, nonce: str) -> None:
        self._path = folder / LOCK
        self._disk = disk
        self._handle = disk.open_lock(self._path)
        try:
            if not disk.lock(self._handle):
                raise self._refusal(self._owner())
            owner = self._owner()
            if owner.get("host") not in (None, platform.node()) and self._age() < DEAD:
                raise self._refusal(owner)
            owner = {"pid": os.getpid(), "host": platform.node(), "since": int(time.time()), "nonce": nonce}
            disk.rewrite(self._handle, (json.dumps(owner) + "\n").encode())
        except BaseException:
            disk.close(self._handle)
            raise
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="drumline-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others write here."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            with suppress(OSError):  # on a disk that takes nothing more, closing alone gives the lock back
                self._disk.rewrite(self._handle, b"")
            self._disk.close(self._handle)

    def _beat(self) -> None:
        while not self._end.wait(BEAT):
            try:
                self._disk.touch(self._handle)
            except OSError:
                return

    def _owner(self) -> dict[str, Any]:
        return _parsed(os.pread(self._handle, 4096, 0))

    def _age(self) -> float:
        """Seconds since the owner's last sign of life, by the clock of the file system: hosts may disagree."""
        probe = self._path.with_name(f".{LOCK}-{os.getpid()}")
        probe.unlink(missing_ok=True)
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - os.fstat(self._handle).st_mtime

    def _refusal(self, owner: dict[str, Any]) -> InputError:
        own = owner.get("pid") == os.getpid() and owner.get("host") == platform.node()
        who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
        return InputError(
            f"another job writes checkpoints to {self._path.parent}: {who}, seen {max(0.0, self._age()):.0f} s ago",
            where=str(self._path),
            rule="one job writes to a folder at a time",
            fix="finish_saves() of the engine that saves there" if own else "another folder, or end that job",
        )


def check_shared(folder: Path, nonce: str, rank: int) -> None:
    """Refuse a folder that this rank does not share with the first: each would write a part, and nobody the whole."""
    end = time.monotonic() + SHARED
    while True:
        with suppress(OSError):
            if _parsed((folder / LOCK).read_bytes()).get("nonce") == nonce:
                return
        if time.monotonic() > end:
            raise InputError(
                f"rank {rank} on {platform.node()} does not see what the first rank wrote to {folder}",
                where=str(folder / LOCK),
                rule="all ranks share the folder of the checkpoints",
                fix="a folder on a file system that all hosts mount",
            )
        time.sleep(0.05)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(text or b"{}")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
