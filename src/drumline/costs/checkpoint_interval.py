"""How often to save a checkpoint: saving costs time, and so does the work that a failure loses."""

from __future__ import annotations

import math


def save_interval(stall: float, mtbf: float) -> float:
    """Seconds between two saves that lose least (Young 1974, Daly 2006): sqrt(2 x stall x mean time between failures).

    Saving every t seconds loses stall / t of the time, and every failure loses t / 2. It holds if a save takes much
    less than the time between failures.
    """
    return math.sqrt(2 * stall * mtbf)


def expected_goodput(interval: float, stall: float, restart: float, mtbf: float) -> float:
    """The share of the time that makes progress which is kept, with a save after every `interval` seconds of work.

    Failures are a Poisson process of mean distance M. A failure loses the work since the last complete save, and a
    restart of R seconds follows, which can fail too. Then an interval t with its save d takes
    e^(R / M) M (e^((t + d) / M) - 1) seconds on average (Daly 2006).
    """
    exponent = (interval + stall + restart) / mtbf
    if exponent > 700:  # e^700 is near the largest number: nothing is ever completed
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf))
