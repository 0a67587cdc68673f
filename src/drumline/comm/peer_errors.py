"""Errors that a rank raises because another rank is gone: consequences of a failure, never its cause.

They are recognized by their words, and by where they come from: an error that the user's own code, or a library that it
calls, raises with the same words ("Connection refused" from a download) is the cause.
"""

from __future__ import annotations

from ..core.errors import DrumlineError, GaveUp

_CERTAIN = ("connectFullMesh", "NCCL communicator was aborted", "gloo/transport")
"""Parts of errors that only a communication library writes, wherever they are raised."""
_SYMPTOMS = (
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
"""Parts of errors that say that another rank is gone, if a module that communicates raises them."""
_COMMUNICATING = (
    "drumline.comm",
    "drumline.mpi",
    "drumline.runtime",
    "torch.distributed",
    "torch.autograd",
    "torch.futures",
    "torch.nn.parallel",
)
"""Modules whose lines raise such errors; DDP's come out of the backward."""


def is_follow_up(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone, and comes from where ranks communicate."""
    text = str(error).lower()
    certain = any(part.lower() in text for part in _CERTAIN)
    return says_peer_is_gone(error) and (certain or _communicates(error))


def says_peer_is_gone(error: BaseException) -> bool:
    """Whether the words of an exception say that another rank is gone; for errors of a message, wherever raised."""
    if isinstance(error, DrumlineError) and not isinstance(error, GaveUp):
        return False  # about this rank's own input, whatever it quotes
    text = str(error).lower()
    return any(part.lower() in text for part in (*_CERTAIN, *_SYMPTOMS))


def _communicates(error: BaseException) -> bool:
    """Whether an exception comes from a module that communicates, as far as it says where it comes from."""
    if type(error).__module__.startswith("torch.distributed"):
        return True
    trace = error.__traceback__
    if trace is None:  # never raised in this process: only its words are known
        return True
    while trace.tb_next is not None:
        trace = trace.tb_next
    name = f"{trace.tb_frame.f_globals.get('__name__', '')}."
    return any(name.startswith(f"{module}.") for module in _COMMUNICATING)
