"""Workers that share stations (a server's ports, its updates), each with one task at a time: how long a task takes.

Approximate mean value analysis (Bard and Schweitzer): a task that comes to a station finds there what the others have
on average. It is right for stations that are shared equally and workers out of phase. Perfectly regular workers take
turns and wait less, workers in step wait more.
"""

from __future__ import annotations

from collections.abc import Sequence

_ROUNDS = 200
_CLOSE = 1e-9


def cycle_seconds(counts: Sequence[int], delays: Sequence[float], stations: Sequence[float]) -> list[float]:
    """Seconds from task to task, for kinds of workers.

    There are `counts[c]` workers of a kind, which spend `delays[c]` seconds of a task on their own and `stations[k]`
    seconds, if alone, at each station.
    """
    used = [s for s in stations if s > 0]
    cycles = [delay + sum(used) for delay in delays]
    queues = [[n * s / cycle if cycle else 0.0 for n, cycle in zip(counts, cycles, strict=True)] for s in used]
    for _ in range(_ROUNDS):
        before = cycles
        stays = [
            [s * (1 + sum(queue) - own / n) for own, n in zip(queue, counts, strict=True)]
            for s, queue in zip(used, queues, strict=True)
        ]
        cycles = [delay + sum(stay[c] for stay in stays) for c, delay in enumerate(delays)]
        queues = [[n * stay[c] / cycles[c] if cycles[c] else 0.0 for c, n in enumerate(counts)] for stay in stays]
        if all(abs(a - b) <= _CLOSE * a for a, b in zip(cycles, before, strict=True)):
            break
    return cycles
