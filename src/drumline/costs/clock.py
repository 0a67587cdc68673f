"""When a pipeline order ends: what `lanes.play` says too, but without its actions, for a search that asks often."""

from __future__ import annotations

from collections.abc import Sequence

from ..schedules import Pipeline


def finish(
    pipeline: Pipeline,
    homes: dict[int, int],
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    transfer: Sequence[float],
) -> float:
    """Seconds until the last action ends; `homes` are those of the order. Messages travel behind computation, one after
    the other on each link in each direction.
    """
    stages, last = pipeline.stages, pipeline.stages - 1
    seconds = {"F": forward, "B": backward, "W": weight}
    ended = {kind: [[-1.0] * pipeline.micros for _ in range(stages)] for kind in "FBW"}
    came = {kind: [[-1.0] * pipeline.micros for _ in range(stages)] for kind in "FB"}
    # the first stage's forwards, and the last one's backwards, wait for nobody
    came["F"][0] = came["B"][last] = [0.0] * pipeline.micros
    free: dict[tuple[int, int], float] = {}
    lanes = [[(a.kind, a.stage, a.micro) for a in lane] for lane in pipeline.lanes]
    place, clock = [0] * len(lanes), [0.0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(lanes):
            i, now = place[rank], clock[rank]
            while i < len(lane):
                kind, s, m = lane[i]
                ready = ended["B"][s][m] if kind == "W" else came[kind][s][m]
                if ready < 0:
                    break
                if kind == "B":
                    ready = max(ready, ended["F"][s][m])
                now = max(now, ready) + seconds[kind][s]
                ended[kind][s][m] = now
                other = s + 1 if kind == "F" else s - 1
                if kind != "W" and 0 <= other <= last:
                    home, arrived = homes[other], now
                    if home != rank:
                        arrived = max(now, free.get((rank, home), 0.0)) + transfer[min(s, other)]
                        free[rank, home] = arrived
                    came[kind][other][m] = arrived
                i += 1
            moved = moved or i > place[rank]
            place[rank], clock[rank] = i, now
    assert all(p == len(lane) for p, lane in zip(place, lanes, strict=True)), f"{pipeline} deadlocks"
    return max(clock)
