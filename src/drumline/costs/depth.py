"""Work and depth of a schedule: all that is sent, and the longest chain of messages that need each other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..schedules import Schedule


@dataclass(frozen=True, slots=True)
class Depth:
    """What a schedule takes with as many wires as it likes (depth), and with one (work)."""

    rounds: int
    """Messages on the longest chain in which each carries what the one before brought: no fewer rounds can do."""
    bytes: int
    """Bytes on the chain that has most of them."""
    work: int
    """Bytes that all ranks send together."""

    @property
    def parallelism(self) -> float:
        """work / depth: how many wires it keeps busy at best."""
        return self.work / self.bytes if self.bytes else 0.0

    def __str__(self) -> str:
        return f"depth {self.rounds} messages, {self.bytes} bytes; work {self.work} bytes"


def schedule_depth(schedule: Schedule, message_bytes: int, *, itemsize: int = 1) -> Depth:
    """Follow each chunk: what a rank holds is as deep as the deepest message that went into it."""
    sizes = schedule.sizes(message_bytes, itemsize=itemsize)
    hops: defaultdict[tuple[int, int], int] = defaultdict(int)
    load: defaultdict[tuple[int, int], int] = defaultdict(int)
    work = deepest = longest = 0
    for sends in schedule.rounds:
        # All sends of a round read what stood before it.
        before = [(s, hops[s.src, s.chunk] + 1, load[s.src, s.chunk] + sizes[s.chunk]) for s in sends]
        for s, count, size in before:
            place = (s.dst, s.chunk)
            if s.reduce:
                count, size = max(count, hops[place]), max(size, load[place])
            hops[place], load[place] = count, size
            deepest, longest, work = max(deepest, count), max(longest, size), work + sizes[s.chunk]
    return Depth(deepest, longest, work)
