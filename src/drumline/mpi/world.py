"""The ranks of this program: connected at the first use, not at import; left at exit without waiting for dead ranks."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import torch.distributed as dist

from ..comm.environment import MPI_LAUNCHERS, RankInfo, connect, print_errors_without_traceback, rank_info
from ..comm.hosts import host_digest
from ..comm.messaging.endpoint import Endpoint
from ..comm.messaging.gloo_endpoint import GlooEndpoint
from ..comm.messaging.matching import MessageMatcher
from ..comm.messaging.thread_endpoint import ThreadEndpoint
from ..comm.shm import NoSharedMemory, ShmTransport
from ..core.errors import GaveUp, InputError, nearest
from ..torchkit.process_groups import default_store

VARIABLE = "DRUMLINE_TRANSPORT"
TRANSPORTS = ("shm", "gloo", "mpi", "threads")

_made: MessageMatcher | None = None
_close: Callable[[], None]
_lock = threading.Lock()
_own = threading.local()
"""The matcher of a thread that is a rank."""


def matcher() -> MessageMatcher:
    """This rank's message matcher; the first call connects to the others."""
    global _made, _close
    mine: MessageMatcher | None = getattr(_own, "matcher", None)
    if mine is not None:
        return mine
    if _made is None:
        with _lock:
            if _made is None:
                print_errors_without_traceback(rank_info().rank)
                _made, _close = join(os.environ.get(VARIABLE, ""))
                atexit.register(_at_exit)
    return _made


def finalize() -> None:
    """Flush this rank's sends and leave the others."""
    matcher()
    _close()


def finalized() -> bool:
    """Whether this rank has left."""
    return _made is not None and _made.closed


def _at_exit() -> None:
    """Leave at exit; a rank that ends with an error does not wait, since the others detect its death."""
    if _made is None or _made.closed:
        return
    if getattr(sys, "last_value", None) is not None:
        _made.closed = True
        return
    with contextlib.suppress(GaveUp):  # the remaining ranks report what happened
        _close()


def join(transport: str) -> tuple[MessageMatcher, Callable[[], None]]:
    """The matcher of this process, and the function that closes it. `transport` is the user's choice, or empty."""
    if transport and transport not in TRANSPORTS:
        raise InputError(
            f"{VARIABLE}={transport!r}",
            where="environment",
            rule=f"one of {', '.join(TRANSPORTS)}",
            fix=nearest(transport, TRANSPORTS),
        )
    where = rank_info()
    if dist.is_initialized():
        where = RankInfo(dist.get_rank(), dist.get_world_size(), where.local_rank, where.launcher)
    if where.size == 1 and transport in ("", "threads"):
        return _over(ThreadEndpoint())
    if transport == "threads":
        raise InputError(
            f"{VARIABLE}=threads in {where.size} processes",
            where="environment",
            rule="threads are ranks of one process",
            fix="drumline.mpi.run_threads(function, p)",
        )
    if transport == "mpi" or (not transport and through_mpi(where)):
        from ..comm.mpi.endpoint import MpiEndpoint

        return _over(MpiEndpoint())
    connect(backend="gloo" if transport == "gloo" and not dist.is_initialized() else "auto")
    if transport == "shm" or (not transport and _one_host(where)):
        try:
            return _shared()
        except NoSharedMemory as e:
            if transport:
                raise InputError(f"{VARIABLE}=shm", where="environment", rule=str(e), fix=f"{VARIABLE}=gloo") from e
            warnings.warn(f"no shared memory, so messages go by gloo: {e}", RuntimeWarning, stacklevel=2)
    return _over(GlooEndpoint())


def through_mpi(where: RankInfo) -> bool:
    """Whether mpiexec started this process and mpi4py is installed."""
    return where.launcher in MPI_LAUNCHERS and importlib.util.find_spec("mpi4py") is not None


def _one_host(where: RankInfo) -> bool:
    """Whether all ranks share this host: each publishes its host in the store."""
    store = dist.PrefixStore("drumline/mpi/host", default_store())
    mine = host_digest().hex()
    store.set(str(where.rank), mine)
    return all(store.get(str(rank)).decode() == mine for rank in range(where.size))


def _over(endpoint: Endpoint) -> tuple[MessageMatcher, Callable[[], None]]:
    made = MessageMatcher(endpoint)
    return made, made.close


def _shared() -> tuple[MessageMatcher, Callable[[], None]]:
    transport = ShmTransport.over()
    return transport.matcher, transport.close


@contextlib.contextmanager
def thread_rank(endpoint: Endpoint) -> Iterator[MessageMatcher]:
    """Make this thread a rank; its matcher is closed at the end unless there was an error."""
    _own.matcher = matcher = MessageMatcher(endpoint)
    try:
        yield matcher
        matcher.close()
    finally:
        del _own.matcher
