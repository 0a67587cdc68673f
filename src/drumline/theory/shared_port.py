"""A port that several messages share equally: when each of them is through.

Each message needs `service` seconds of the port's time, and alone takes `own` seconds, if its sender is the slower end.
With k messages under way, each proceeds at min(1 / k, service / own) of the port's speed.
"""

from __future__ import annotations

from collections.abc import Sequence


def shared_port_ends(arrivals: Sequence[float], service: float, own: float = 0.0) -> list[float]:
    """When each of some equal messages that start at `arrivals` (ascending) is through, in the same order."""
    if service <= 0:
        return [at + own for at in arrivals]
    ends: list[float] = []
    done = 0.0  # port seconds that every message under way has had, since the first began
    under_way: list[float] = []  # what each of them had to begin with, in order
    now, waiting = 0.0, list(arrivals)
    while waiting or under_way:
        if not under_way:
            now = waiting[0]
        rate = port_rate(len(under_way), service, own)
        end = now + (under_way[0] + service - done) / rate if under_way else float("inf")
        if waiting and waiting[0] <= end:
            done += rate * (waiting[0] - now)
            now = waiting.pop(0)
            under_way.append(done)
        else:
            done, now = under_way.pop(0) + service, end
            ends.append(now)
    return ends


def port_rate(under_way: int, service: float, own: float) -> float:
    """The speed of each message, as a share of the port's."""
    if not under_way:
        return 0.0
    return min(1.0 / under_way, service / own) if own > 0 else 1.0 / under_way
