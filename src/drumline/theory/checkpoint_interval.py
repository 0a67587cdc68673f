"""How often to save a checkpoint: saving costs time, and so does the work that a failure loses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.units import format_seconds, parse_seconds

USUAL_DEVICE_MTBF = "50000h"
"""Mean time between failures of one device: Llama 3's training lost 419 times to unexpected failures in 54 days on
16,384 GPUs, which is one per 50,700 hours of a GPU. Larger: saves further apart."""


@dataclass(frozen=True, slots=True)
class FailureRate:
    """How often something fails: a mean time between failures, of each device or of the whole run."""

    seconds: float
    whole_run: bool = False

    @classmethod
    def parse(cls, text: str | float) -> FailureRate:
        """`50000h` (of one device; also `50000h/device`), `12h/run` (of the whole run), or seconds of one device."""
        if isinstance(text, int | float):
            return cls._positive(float(text), text)
        time, slash, of = text.partition("/")
        if slash and of.strip() not in ("run", "device"):
            raise ValueError(f"after the slash: device or run, as in {time}/run")
        if time.strip().replace(".", "").isdigit() and float(time):
            raise ValueError(f"a time has a unit, as in {time.strip()}h")
        return cls._positive(parse_seconds(time), text, whole_run=of.strip() == "run")

    @classmethod
    def _positive(cls, seconds: float, text: str | float, *, whole_run: bool = False) -> FailureRate:
        if not 0 < seconds < math.inf:
            raise ValueError("more than no time, and not forever")
        return cls(seconds, whole_run)

    def of_run(self, devices: int) -> float:
        """Mean seconds between failures of a run on that many devices: n devices fail n times as often."""
        return self.seconds if self.whole_run else self.seconds / devices

    def in_words(self, devices: int) -> str:
        """`each device fails every 50,000 h, one of 64 every 781 h`."""
        if self.whole_run or devices == 1:
            return f"the run fails every {format_seconds(self.of_run(devices))}"
        each, some = format_seconds(self.seconds), format_seconds(self.of_run(devices))
        return f"a device fails every {each}, one of {devices} every {some}"


def save_interval(stall: float, mtbf: float) -> float:
    """Seconds between two saves that lose least (Young 1974, Daly 2006): sqrt(2 x stall x mean time between failures).

    Saving every t seconds loses stall / t of the time, and every failure loses t / 2. It holds if a save takes much
    less than the time between failures.
    """
    return math.sqrt(2 * stall * mtbf)


def expected_goodput(interval: float, stall: float, restart: float, mtbf: float, *, write: float = 0.0) -> float:
    """The share of the time that makes progress which is kept, with a save after every `interval` seconds of work.

    Failures are a Poisson process of mean distance M. A failure loses the work since the last complete save, and a
    restart of R seconds follows, which can fail too. Then an interval t with its save d takes
    e^(R / M) M (e^((t + d) / M) - 1) seconds on average (Daly 2006). If the storage has a checkpoint only `write`
    seconds after its save, a failure in that time loses another interval: on average that is a longer restart.
    """
    restart += interval * write / (interval + stall)
    exponent = (interval + stall + restart) / mtbf
    if exponent > 700:  # e^700 is near the largest number: nothing is ever completed
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf))
