"""The ranks of this program: joined at the first use, not at import; left at exit without waiting for the dead."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from ..comm.environment import MPI_LAUNCHERS, Place, connect, place, say_errors_plainly
from ..comm.hosts import host_digest
from ..comm.mail.gloo import GlooPost
from ..comm.mail.matching import Matching
from ..comm.mail.post import Post
from ..comm.mail.threads import ThreadPost, run_posts
from ..comm.shm import NoSharedMemory, ShmTransport
from ..core.errors import GaveUp, InputError, nearest

if TYPE_CHECKING:
    from .comm import Intracomm

T = TypeVar("T")
VARIABLE = "DRUMLINE_TRANSPORT"
TRANSPORTS = ("shm", "gloo", "mpi", "threads")

_made: Matching | None = None
_close: Callable[[], None]
_lock = threading.Lock()
_own = threading.local()
"""The matching of a thread that is a rank of its own."""


def matching() -> Matching:
    """This rank's messages; the first call joins the others."""
    global _made, _close
    mine: Matching | None = getattr(_own, "matching", None)
    if mine is not None:
        return mine
    if _made is None:
        with _lock:
            if _made is None:
                say_errors_plainly(place().rank)
                _made, _close = join(os.environ.get(VARIABLE, ""))
                atexit.register(_at_exit)
    return _made


def finalize() -> None:
    """Leave the others: see off what was sent, and say that nothing more comes."""
    matching()
    _close()


def finalized() -> bool:
    """Whether this rank has left."""
    return _made is not None and _made.closed


def _at_exit() -> None:
    """A rank that ends by an error does not wait: the others learn of its death by themselves."""
    if _made is None or _made.closed:
        return
    if getattr(sys, "last_value", None) is not None:
        _made.closed = True
        return
    with contextlib.suppress(GaveUp):  # who is left says what happened
        _close()


def join(transport: str) -> tuple[Matching, Callable[[], None]]:
    """The messages of this process, and how to end them. `transport` is what the user asked for, or empty."""
    if transport and transport not in TRANSPORTS:
        raise InputError(
            f"{VARIABLE}={transport!r}",
            where="environment",
            rule=f"one of {', '.join(TRANSPORTS)}",
            fix=nearest(transport, TRANSPORTS),
        )
    where = place()
    if dist.is_initialized():
        where = Place(dist.get_rank(), dist.get_world_size(), where.local_rank, where.launcher)
    if where.size == 1 and transport in ("", "threads"):
        return _over(ThreadPost())
    if transport == "threads":
        raise InputError(
            f"{VARIABLE}=threads in {where.size} processes",
            where="environment",
            rule="threads are ranks of one process",
            fix="drumline.mpi.run_threads(function, p)",
        )
    if transport == "mpi" or (not transport and through_mpi(where)):
        from ..comm.mpi.post import MpiPost

        return _over(MpiPost())
    connect(backend="gloo" if transport == "gloo" and not dist.is_initialized() else "auto")
    if transport == "shm" or (not transport and _one_host(where)):
        try:
            return _shared()
        except NoSharedMemory as e:
            if transport:
                raise InputError(f"{VARIABLE}=shm", where="environment", rule=str(e), fix=f"{VARIABLE}=gloo") from e
            warnings.warn(f"no shared memory, so messages go by gloo: {e}", RuntimeWarning, stacklevel=2)
    return _over(GlooPost())


def through_mpi(where: Place) -> bool:
    """Whether mpiexec started us and mpi4py is there."""
    return where.launcher in MPI_LAUNCHERS and importlib.util.find_spec("mpi4py") is not None


def _one_host(where: Place) -> bool:
    """Whether all ranks share this host: each tells its own through the store by which they met."""
    store = dist.PrefixStore("drumline/mpi/host", dist.distributed_c10d._get_default_store())
    mine = host_digest().hex()
    store.set(str(where.rank), mine)
    return all(store.get(str(rank)).decode() == mine for rank in range(where.size))


def _over(post: Post) -> tuple[Matching, Callable[[], None]]:
    made = Matching(post)
    return made, made.close


def _shared() -> tuple[Matching, Callable[[], None]]:
    transport = ShmTransport.over()
    return transport.matching, transport.close


def run_threads(function: Callable[[Intracomm], T], p: int) -> list[T]:
    """Run `function(comm)` on p ranks that are threads of this process; what each returned, by rank."""
    from .comm import Intracomm

    def rank(post: Post) -> T:
        _own.matching = Matching(post)
        try:
            result = function(Intracomm._world_of(_own.matching))
            _own.matching.close()
            return result
        finally:
            del _own.matching

    return run_posts(rank, p)
