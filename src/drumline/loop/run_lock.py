"""The lock on a run folder: a second training in it is refused while the first one runs."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ..core.errors import InputError

if TYPE_CHECKING:
    from ..runtime.checkpoint.lock import FolderLock

P = ParamSpec("P")
R = TypeVar("R")
_taken = threading.local()
"""`locks`: those that the verb of this thread has taken."""


def lock_run(folder: Path) -> None:
    """Lock a run folder until the verb that called this ends, or refuse it with the process that uses it."""
    from ..runtime.checkpoint.disk import Disk
    from ..runtime.checkpoint.lock import FolderLock

    try:
        lock = FolderLock(Disk(), folder, secrets.token_hex(8), doing="is training in")
    except OSError as e:
        raise InputError(f"{folder} cannot be locked: {e.strerror}", fix="--output with another name") from None
    locks().append(lock)


def locks() -> list[FolderLock]:
    """The locks that this thread holds."""
    if not hasattr(_taken, "locks"):
        _taken.locks = []
    held: list[FolderLock] = _taken.locks
    return held


def releases_run_lock(verb: Callable[P, R]) -> Callable[P, R]:
    """Release the locks that a verb has taken when it returns or raises."""

    @functools.wraps(verb)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = len(locks())
        try:
            return verb(*args, **kwargs)
        finally:
            while len(locks()) > before:
                locks().pop().release()

    return run
