"""`deepspeed.utils`: the logger."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..comm.environment import rank_info

logger = logging.getLogger("drumline")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks: rank 0 by default; -1 means all."""
    wanted = [0] if ranks is None else ranks
    if -1 in wanted or rank_info().rank in wanted:
        logger.log(level, message)
