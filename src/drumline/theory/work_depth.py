"""Work and depth of task graphs and schedules: bounds for p processors, and a greedy schedule within them.

W is the time on one processor (T1), D that of the longest chain (T-infinity). No schedule on p processors ends before
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
class TaskGraph:
    """Tasks with their times and dependencies."""

    times: tuple[float, ...]
    """Time of each task on one processor."""
    needs: tuple[tuple[int, ...], ...]
    """Tasks that each task depends on, by number."""

    def __post_init__(self) -> None:
        n = len(self.times)
        if len(self.needs) != n:
            raise InputError(
                f"{n} times, but dependencies of {len(self.needs)} tasks", rule="one of each for every task"
            )
        for task, (time, needs) in enumerate(zip(self.times, self.needs, strict=True)):
            if not 0 <= time < float("inf"):
                raise InputError(f"task {task} takes {time}", rule="times are finite, not negative")
            unknown = [other for other in needs if not 0 <= other < n]
            if unknown:
                raise InputError(f"task {task} needs task {unknown[0]}", rule=f"there are tasks 0 to {n - 1}")
        self.order()

    @property
    def work(self) -> float:
        """W: time of all tasks, one after the other."""
        return sum(self.times)

    @property
    def depth(self) -> float:
        """D: time of the longest chain of dependent tasks."""
        return max(self.ends(), default=0.0)

    @property
    def parallelism(self) -> float:
        """W / D: processors that it keeps busy on average, if there is no limit."""
        return self.work / self.depth if self.depth else 0.0

    def order(self) -> tuple[int, ...]:
        """The tasks in topological order; refuses a cycle."""
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
            raise InputError(f"task {stuck} depends on itself, perhaps through others", rule="tasks form no cycle")
        return tuple(done)

    def users(self) -> tuple[tuple[int, ...], ...]:
        """Tasks that depend on each task."""
        users: list[list[int]] = [[] for _ in self.times]
        for task, needs in enumerate(self.needs):
            for other in set(needs):
                users[other].append(task)
        return tuple(map(tuple, users))

    def ends(self) -> list[float]:
        """End of each task if nothing but its dependencies delays it."""
        ends = [0.0] * len(self.times)
        for task in self.order():
            ends[task] = self.times[task] + max((ends[other] for other in self.needs[task]), default=0.0)
        return ends

    def bounds(self, p: int) -> tuple[float, float]:
        """(max(W/p, D), W/p + D): lower bound for p processors, and upper bound of a greedy schedule."""
        _check(p)
        return max(self.work / p, self.depth), self.work / p + self.depth


@dataclass(frozen=True, slots=True)
class GreedySchedule:
    """Start, end and processor of each task."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    processors: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Tp: end of the last task."""
        return max(self.ends, default=0.0)


def greedy(graph: TaskGraph, p: int) -> GreedySchedule:
    """A schedule in which no processor is idle while a task is ready; ready tasks run by number."""
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
    return GreedySchedule(tuple(starts), tuple(ends), tuple(places))


def reduction(n: int, *, associative: bool = True, time: float = 1.0) -> TaskGraph:
    """The n-1 operations that reduce n values to one: W = n-1.

    An associative operation forms a tree, D = ceil(log2 n); any other a chain, D = n-1.
    """
    if n < 1:
        raise InputError(f"a reduction of {n} values", rule="at least one value")
    if not associative:
        return TaskGraph((time,) * (n - 1), tuple((i - 1,) if i else () for i in range(n - 1)))
    needs: list[tuple[int, ...]] = []
    level: list[int | None] = [None] * n  # the operation that made a value; None for an input
    while len(level) > 1:
        after: list[int | None] = []
        for left, right in zip(level[::2], level[1::2], strict=False):
            needs.append(tuple(x for x in (left, right) if x is not None))
            after.append(len(needs) - 1)
        level = after + level[len(level) - len(level) % 2 :]
    return TaskGraph((time,) * len(needs), tuple(needs))


def layers(times: Sequence[float]) -> TaskGraph:
    """Layers as a chain: only operations inside a layer run in parallel."""
    return TaskGraph(tuple(times), tuple((i - 1,) if i else () for i in range(len(times))))


def pipeline_graph(pipeline: Pipeline, f: float, b: float, w: float = 0.0, *, lanes: bool = True) -> TaskGraph:
    """The actions of a pipeline schedule, with the seconds of one stage; with `lanes` a rank keeps its order.

    With lanes D is the time of the step. Without them it is that of one micro-batch, and the rest is parallel.
    """
    times = {"F": f, "B": b, "W": w}
    actions = [action for lane in pipeline.lanes for action in lane]
    number = {action: i for i, action in enumerate(actions)}
    needs = [{number[other] for other in action.needs(pipeline.stages)} for action in actions]
    if lanes:
        for lane in pipeline.lanes:
            for before, after in pairwise(lane):
                needs[number[after]].add(number[before])
    return TaskGraph(tuple(times[action.kind] for action in actions), tuple(tuple(sorted(own)) for own in needs))


@dataclass(frozen=True, slots=True)
class ScheduleDepth:
    """Work and depth of a schedule: with one link, and with unlimited links."""

    rounds: int
    """Messages on the longest chain of dependent messages: a lower bound on the rounds."""
    bytes: int
    """Bytes on the chain with the most bytes."""
    work: int
    """Bytes that all ranks send."""

    @property
    def parallelism(self) -> float:
        """work / depth: links that it keeps busy at best."""
        return self.work / self.bytes if self.bytes else 0.0

    def __str__(self) -> str:
        return f"depth {self.rounds} messages, {self.bytes} bytes; work {self.work} bytes"


def schedule_depth(schedule: Schedule, message_bytes: int, *, itemsize: int = 1) -> ScheduleDepth:
    """Follow each chunk: its depth is that of the deepest message that went into it."""
    sizes = schedule.sizes(message_bytes, itemsize=itemsize)
    hops: defaultdict[tuple[int, int], int] = defaultdict(int)
    load: defaultdict[tuple[int, int], int] = defaultdict(int)
    work = deepest = longest = 0
    for sends in schedule.rounds:
        # all sends of a round read the state before it
        before = [(s, hops[s.src, s.chunk] + 1, load[s.src, s.chunk] + sizes[s.chunk]) for s in sends]
        for s, count, size in before:
            place = (s.dst, s.chunk)
            if s.reduce:
                count, size = max(count, hops[place]), max(size, load[place])
            hops[place], load[place] = count, size
            deepest, longest, work = max(deepest, count), max(longest, size), work + sizes[s.chunk]
    return ScheduleDepth(deepest, longest, work)


def _check(p: int) -> None:
    if p < 1:
        raise InputError(f"{p} processors", rule="at least one")
