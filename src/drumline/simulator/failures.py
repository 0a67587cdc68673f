"""Replays days of training in which devices fail: every failure restarts all ranks from the last checkpoint."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..core.errors import InputError
from ..theory.checkpoint_interval import expected_goodput

MOST_EVENTS = 5_000_000
"""Saves and failures of a replay, at most."""


@dataclass(frozen=True, slots=True)
class FailureReplay:
    """Where the time of a long training goes. `useful`, `repeated`, `saving` and `restarting` add up to `seconds`."""

    seconds: float
    mtbf: float
    """Mean seconds between failures of the whole cluster."""
    interval: float
    """Seconds of work between two saves."""
    stall: float
    """Seconds that training waits for a save."""
    write: float
    """Seconds after a save until it is stored; a failure before that loses it."""
    restart: float
    """Seconds from a failure until training goes on."""
    failures: int
    saves: int
    useful: float
    """Seconds of work that was kept; at the end, also what was not saved yet."""
    repeated: float
    """Seconds of work, and of unfinished saves, that failures lost."""
    saving: float
    restarting: float
    expected: float
    """The goodput by the closed form."""
    storage: float = 0.0
    """Bytes per second that all nodes together write to storage; 0 if unknown."""

    @property
    def goodput(self) -> float:
        """The share of the time that makes progress which is kept."""
        return self.useful / self.seconds if self.seconds else 0.0


def replay_failures(
    seconds: float, *, mtbf: float, interval: float, stall: float, restart: float, write: float = 0.0, seed: int = 0
) -> FailureReplay:
    """Train for some seconds. Times between failures are exponential; the same seed gives the same ones.

    A checkpoint is stored `write` seconds after its save, before the next one: `write` is at most the interval.
    """
    assert write <= (interval + stall) * (1 + 1e-9), f"saves every {interval} s that take {write} s to write"
    events = seconds / min(mtbf, interval + stall)
    if events > MOST_EVENTS:
        raise InputError(
            f"{seconds / 86400:g} days with a save every {interval:g} s and a failure every {mtbf:g} s",
            rule=f"at most {MOST_EVENTS} saves and failures are replayed",
            fix="fewer --days",
        )
    chance = random.Random(f"{seed}/failures")  # text, so that close seeds are not alike
    now, fails_at = 0.0, chance.expovariate(1 / mtbf)
    useful = repeated = saving = restarting = 0.0
    failures = saves = 0
    stored = 0.0  # when the last save is on the storage
    while now < seconds:
        done = now + interval + stall
        if min(done, seconds) <= fails_at:
            worked = min(interval, seconds - now)
            useful += worked
            saving += min(stall, seconds - now - worked)
            saves += done <= seconds
            now, stored = done, done + write
            continue
        repeated += fails_at - now
        if fails_at < stored:
            useful, repeated, stored = useful - interval, repeated + interval, 0.0
        failures += 1
        # a failure during the restart begins it again
        now, fails_at = fails_at, fails_at + chance.expovariate(1 / mtbf)
        while fails_at < min(now + restart, seconds):
            failures += 1
            restarting += fails_at - now
            now, fails_at = fails_at, fails_at + chance.expovariate(1 / mtbf)
        restarting += min(restart, seconds - now)
        now += restart
    return FailureReplay(
        seconds,
        mtbf,
        interval,
        stall,
        write,
        restart,
        failures,
        saves,
        useful,
        repeated,
        saving,
        restarting,
        expected_goodput(interval, stall, restart, mtbf, write=write),
    )
