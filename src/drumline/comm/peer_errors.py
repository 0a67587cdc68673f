"""Errors that a rank raises because another rank is gone: consequences of a failure, never its cause."""

from __future__ import annotations

_SYMPTOMS = (
    "Connection reset",
    "Connection closed",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh",
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
    "NCCL communicator was aborted",
    "gloo/transport",
)
"""Parts of the errors that a rank raises because another rank is gone."""


def is_follow_up(error: BaseException) -> bool:
    """Whether an exception says that another rank is gone."""
    text = str(error).lower()
    return any(symptom.lower() in text for symptom in _SYMPTOMS)
