"""Errors that a rank raises because another rank is gone: consequences of a failure, never its cause.

They are recognized by their type and by where they were raised: in our communicators, or in torch's C++ code for
groups. An error that the user's own code, or a library that it calls, raises is a cause, whatever it says ("Connection
refused" from a download), unless it was raised because of such a consequence. Words decide only about what C++ raises,
because it has one type for a lost rank and for a wrong argument.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

from ..core.errors import DrumlineError, GaveUp, RankFailed, StoppedByGuard
from .signed_store import AlteredStore

_SYMPTOMS = (
    "connectFullMesh",
    "NCCL communicator was aborted",
    "gloo/transport",
    "Connection reset",
    "Connection closed",
    "Connection refused",
    "Broken pipe",
    "timed out",
    "Socket",
    "has died",
    "has left",
    "is not done after",
    "was destroyed",
    "that cannot arrive",
    "lost rank",
    "of the pipeline",
    "no rank received",
    "waited for",
)
"""Parts of errors that say that another rank is gone, if they were raised where ranks communicate."""
_OURS = ("drumline.comm", "drumline.mpi", "drumline.runtime.pipeline.channels")
"""Modules of ours whose GaveUp says that another rank is gone."""
_QUOTING = "drumline.comm.mpi"
"""Its errors quote those of the MPI library, which are also about a wrong call."""
_COMMUNICATING = (
    "drumline.comm",
    "drumline.mpi",
    "drumline.runtime",
    "torch.distributed",
    "torch.autograd",
    "torch.futures",
    "torch.nn.parallel",
)
"""Modules out of whose calls such errors come; DDP's come out of the backward."""
_C_SOURCE = re.compile(r"\[[^]\s]*(gloo|c10d)[^]\s]*:\d+\]")
"""How errors of gloo begin: with the line of C++ that raised them."""
_RAISES = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}


def is_follow_up(error: BaseException) -> bool:
    """Whether an exception was raised because another rank is gone, or because of such an exception."""
    return any(_tells_of_a_lost_peer(e) for e in _chain(error))


def says_peer_is_gone(error: BaseException) -> bool:
    """Whether the words of an exception say that another rank is gone; for errors of a message, wherever raised."""
    if isinstance(error, DrumlineError) and not isinstance(error, GaveUp):
        return False  # about this rank's own input, whatever it quotes
    text = str(error).lower()
    return any(part.lower() in text for part in _SYMPTOMS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those because of which it was raised."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _tells_of_a_lost_peer(error: BaseException) -> bool:
    if isinstance(error, AlteredStore | StoppedByGuard | RankFailed):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    trace = _innermost(error)
    if trace is None:  # never raised in this process: only its words are known
        return says_peer_is_gone(error)
    if isinstance(error, DrumlineError):
        by_origin = isinstance(error, GaveUp) and _is_in(trace, _OURS)
        return by_origin and (not _is_in(trace, (_QUOTING,)) or says_peer_is_gone(error))
    if _is_in(trace, _COMMUNICATING) or isinstance(error, dist.DistError):
        return says_peer_is_gone(error)
    # the user's program waits for a work of gloo itself: C++ raised it, not a `raise` of the program
    code = trace.tb_frame.f_code.co_code
    return isinstance(error, RuntimeError) and code[trace.tb_lasti] not in _RAISES and bool(_C_SOURCE.match(str(error)))


def _innermost(error: BaseException) -> TracebackType | None:
    """The place where an exception was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_in(trace: TracebackType, modules: tuple[str, ...]) -> bool:
    name = f"{trace.tb_frame.f_globals.get('__name__', '')}."
    return any(name.startswith(f"{module}.") for module in modules)
