"""Work and depth of any graph of tasks: the bounds that they set for p processors, and a greedy order that keeps them.

W is the time on one processor (T1), D that of the longest chain (T-infinity). No order on p processors ends before
max(W/p, D); one in which no processor waits while a task is ready ends by W/p + D.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..core.errors import InputError
from ..schedules import Pipeline, Schedule


@dataclass(frozen=True, slots=True)
class Graph:
    """Tasks with their times, and the tasks that each of them needs first."""

    times: tuple[float, ...]
    """Of each task, on one processor."""
    needs: tuple[tuple[int, ...], ...]
    """Of each task, by number."""

    def __post_init__(self) -> None:
        n = len(self.times)
        if len(self.needs) != n:
            raise InputError(f"{n} times, but the needs of {len(self.needs)} tasks", rule="one of each for every task")
        for task, (time, needs) in enumerate(zip(self.times, self.needs, strict=True)):
            if not 0 <= time < float("inf"):
                raise InputError(f"task {task} takes {time}", rule="times are finite, not negative")
            unknown = [other for other in needs if not 0 <= other < n]
            if unknown:
                raise InputError(f"task {task} needs task {unknown[0]}", rule=f"there are tasks 0 to {n - 1}")
        self.order()

    @property
    def work(self) -> float:
        """W: the time of all tasks, one after the other."""
        return sum(self.times)

    @property
    def depth(self) -> float:
        """D: the time of the longest chain of tasks that need each other."""
        return max(self.ends(), default=0.0)

    @property
    def parallelism(self) -> float:
        """W / D: how many processors it keeps busy on average, if there are as many as it likes."""
        return self.work / self.depth if self.depth else 0.0

    def order(self) -> tuple[int, ...]:
        """The tasks in an order in which each comes after all that it needs; refuses a circle."""
        missing = [len(set(needs)) for needs in self.needs]
        users = self.users()
        ready = [task for task, count in enumerate(missing) if not count]
        done: list[int] = []
        while ready:
            done.append(ready.pop())
            for user in users[done[-1]]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        if len(done) < len(self.times):
            stuck = next(task for task, count in enumerate(missing) if count)
            raise InputError(f"task {stuck} needs itself, perhaps by way of others", rule="tasks form no circle")
        return tuple(done)

    def users(self) -> tuple[tuple[int, ...], ...]:
        """Of each task, the tasks that need it."""
        found: list[list[int]] = [[] for _ in self.times]
        for task, needs in enumerate(self.needs):
            for other in set(needs):
                found[other].append(task)
        return tuple(map(tuple, found))

    def ends(self) -> list[float]:
        """When each task ends if nothing but its needs holds it up."""
        ends = [0.0] * len(self.times)
        for task in self.order():
            ends[task] = self.times[task] + max((ends[other] for other in self.needs[task]), default=0.0)
        return ends

    def bounds(self, p: int) -> tuple[float, float]:
        """(max(W/p, D), W/p + D): what p processors take at least, and what a greedy order takes at most."""
        _check(p)
        return max(self.work / p, self.depth), self.work / p + self.depth


@dataclass(frozen=True, slots=True)
class Greedy:
    """When and where each task ran."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    processors: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Tp: when the last task ends."""
        return max(self.ends, default=0.0)


def greedy(graph: Graph, p: int) -> Greedy:
    """An order in which no processor is idle while a task is ready; of ready tasks the lowest number goes first."""
    _check(p)
    n = len(graph.times)
    missing, users = [len(set(needs)) for needs in graph.needs], graph.users()
    ready = [task for task in range(n) if not missing[task]]
    idle = list(range(p))
    starts, ends, places = [0.0] * n, [0.0] * n, [0] * n
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        while ready and idle:
            task, place = heapq.heappop(ready), heapq.heappop(idle)
            starts[task], ends[task], places[task] = now, now + graph.times[task], place
            heapq.heappush(running, (ends[task], task))
        now = running[0][0]
        while running and running[0][0] == now:
            _, task = heapq.heappop(running)
            heapq.heappush(idle, places[task])
            for user in users[task]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, user)
    return Greedy(tuple(starts), tuple(ends), tuple(places))


def reduction(n: int, *, associative: bool = True, time: float = 1.0) -> Graph:
    """The n-1 operations that make one value of n: W = n-1 either way.

    If the operation is associative they form a tree, D = ceil(log2 n); else a chain, D = n-1.
    """
    if n < 1:
        raise InputError(f"a reduction of {n} values", rule="at least one value")
    if not associative:
        return Graph((time,) * (n - 1), tuple((i - 1,) if i else () for i in range(n - 1)))
    needs: list[tuple[int, ...]] = []
    level: list[int | None] = [None] * n  # the operation that made a value; None where it was given
    while len(level) > 1:
        after: list[int | None] = []
        for left, right in zip(level[::2], level[1::2], strict=False):
            needs.append(tuple(x for x in (left, right) if x is not None))
            after.append(len(needs) - 1)
        level = after + level[len(level) - len(level) % 2 :]
    return Graph((time,) * len(needs), tuple(needs))


def layers(times: Sequence[float]) -> Graph:
    """Layers one behind the other: a chain, so nothing but what is inside of a layer runs in parallel."""
    return Graph(tuple(times), tuple((i - 1,) if i else () for i in range(len(times))))


def pipeline_graph(pipeline: Pipeline, f: float, b: float, w: float = 0.0, *, lanes: bool = True) -> Graph:
    """The actions of a pipeline order, with the seconds of one stage; with `lanes` a rank keeps its order, too.

    With lanes D is the time of the step. Without them it is that of one micro-batch, and the rest could be parallel.
    """
    times = {"F": f, "B": b, "W": w}
    actions = [action for lane in pipeline.lanes for action in lane]
    number = {action: i for i, action in enumerate(actions)}
    needs = [{number[other] for other in action.needs(pipeline.stages)} for action in actions]
    if lanes:
        for lane in pipeline.lanes:
            for before, after in pairwise(lane):
                needs[number[after]].add(number[before])
    return Graph(tuple(times[action.kind] for action in actions), tuple(tuple(sorted(found)) for found in needs))


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


def _check(p: int) -> None:
    if p < 1:
        raise InputError(f"{p} processors", rule="at least one")
