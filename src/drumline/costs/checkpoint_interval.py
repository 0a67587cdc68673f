"""How often to save a checkpoint: saving costs time, and so does the work that a failure loses."""

from __future__ import annotations

import math


def save_interval(stall: float, mtbf: float) -> float:
    """Seconds between two saves that lose least (Young 1974, Daly 2006): sqrt(2 x stall x mean time between failures).

    Saving every t seconds loses stall / t of the time, and every failure loses t / 2. It holds if a save takes much
    less than the time between failures.
    """
    return math.sqrt(2 * stall * mtbf)
