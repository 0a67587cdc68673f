"""Callbacks of the loop: sentences for the user, and progress. The verbs themselves print nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

Notify = Callable[[str], None]
"""Receives a sentence for the user."""
Progress = Callable[[str, int, int], None]
"""Receives (what runs now, parts done, parts in total)."""


def log_note(text: str) -> None:
    """Log a sentence for the user: the default where no callback is given."""
    logging.getLogger("drumline").warning(text)


def ignore_progress(what: str, done: int, total: int) -> None:
    """Show no progress: the default."""
