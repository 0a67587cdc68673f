"""Replays workers and parameter servers: the update rule that the servers run, event by event, in predicted times.

A worker asks for a task, pulls the weights, computes, pushes its gradient, and asks again. All workers share the
servers' ports, one for each direction, equally. The servers answer one request after the other: they add a gradient to
its step, and make the updates that the rule allows; who asks meanwhile waits. The servers are alike and drawn as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from ..clusters import StepTimeDistribution
from ..costs.worker_times import ServerTransfer, TaskCompute, WorkerTimes
from ..schedules.update_rules import UpdateRule
from ..theory.shared_port import port_rate
from .event_loop import EventLoop
from .worker_replay import ReplayLog

Done = Callable[[], None]


class SharedPort:
    """A port that messages under way share equally (theory/shared_port.py), as events."""

    def __init__(self, loop: EventLoop, transfer: ServerTransfer) -> None:
        self._loop, self._transfer = loop, transfer
        self._under_way: deque[tuple[float, Done]] = deque()
        """What the port had done for every message when this one began, and whom to call."""
        self._done, self._since, self._plans = 0.0, 0.0, 0
        self.busy = 0.0
        """Seconds of its time that were used."""

    def send(self, done: Done) -> None:
        """Start a message; its latency comes first."""
        self._loop.after(self._transfer.latency, partial(self._enter, done))

    def _enter(self, done: Done) -> None:
        if self._transfer.service <= 0:
            self._loop.after(self._transfer.own, done)
            return
        self._advance()
        self._under_way.append((self._done, done))
        self._plan()

    def _rate(self) -> float:
        return port_rate(len(self._under_way), self._transfer.service, self._transfer.own)

    def _advance(self) -> None:
        passed = (self._loop.now - self._since) * self._rate()
        self._done += passed
        self.busy += passed * len(self._under_way)
        self._since = self._loop.now

    def _plan(self) -> None:
        """Let the first message end; a later change of the rate makes another plan."""
        self._plans += 1
        if self._under_way:
            left = self._under_way[0][0] + self._transfer.service - self._done
            self._loop.after(max(0.0, left) / self._rate(), partial(self._end, self._plans))

    def _end(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._advance()
        begun, done = self._under_way.popleft()
        self._done = max(self._done, begun + self._transfer.service)
        done()
        self._plan()


class ServerReplay:
    """The state of one replay: the rule, the servers' ports and their queue, and what every worker does."""

    def __init__(self, rule: UpdateRule, times: WorkerTimes, spread: StepTimeDistribution, *, shared: bool) -> None:
        self.rule, self.times, self.loop = rule, times, EventLoop()
        self.log = ReplayLog(len(rule.workers))
        self._shared = shared
        """hogwild: no messages, and workers update the shared weights themselves."""
        self._draws = {w: spread.draws(w, len(rule.workers)) for w in rule.workers}
        self.pulls, self.pushes = SharedPort(self.loop, times.pull), SharedPort(self.loop, times.push)
        self._requests: deque[Done] = deque()
        self._serving = False
        self._waiting: list[int] = []
        self.updating = 0.0
        """Seconds in which the servers add gradients and update."""

    def run(self, stagger: float = 0.0) -> ReplayLog:
        """Run to the end of the rule's steps; worker i begins `i * stagger` seconds late."""
        for worker in sorted(self.rule.workers):
            self.loop.at(worker * stagger, partial(self._request, partial(self._ask, worker)))
        self.loop.run()
        assert self.rule.done, "a replay ends when all updates are made"
        return self.log

    # -- the servers: one request after the other

    def _request(self, serve: Done) -> None:
        self._requests.append(serve)
        self._next_request()

    def _next_request(self) -> None:
        while self._requests and not self._serving:
            self._requests.popleft()()

    def _busy(self, seconds: float, name: str, then: Done) -> None:
        """Occupy the servers, then go on with the next request."""
        self._serving = True
        start = self.loop.now

        def end() -> None:
            self._serving = False
            self.updating += seconds
            self.log.add(self.log.workers, "compute", name, start, self.loop.now)
            then()
            self._next_request()

        self.loop.after(seconds, end)

    def _ask(self, worker: int) -> None:
        task = self.rule.next_task(worker)
        if task is None:
            self._waiting.append(worker)
            return
        start = self.loop.now
        self.loop.after(self.times.ask, partial(self._pull, worker, start))

    def _hand_in(self, worker: int) -> None:
        """Add a gradient to its step, and make the updates that are due."""
        task = self.rule.running[worker]
        self._busy(self.times.accumulate, f"update: add {worker}.{task.step}", partial(self._collect, worker))

    def _collect(self, worker: int) -> None:
        made = self.rule.hand_in(worker)
        if made:
            self._busy(len(made) * self.times.update, f"update {made[-1].number}", self._release)
            for update in made:
                self.log.staleness.append([c.staleness for c in update.contributions])
        # a gradient that completes nothing frees no worker

    def _release(self) -> None:
        """An update is complete: those who waited ask again."""
        done = len(self.log.staleness) - len(self.log.updates)
        self.log.updates += [self.loop.now] * done
        waiting, self._waiting = self._waiting, []
        for worker in waiting:
            self._request(partial(self._ask, worker))

    # -- a worker's task

    def _pull(self, worker: int, start: float) -> None:
        self.rule.read(worker, self.rule.version)
        if self._shared:
            self.log.add(worker, "communication", "ask", start, self.loop.now)
            self._compute(worker)
            return
        self.pulls.send(partial(self._pulled, worker, start))

    def _pulled(self, worker: int, start: float) -> None:
        self.log.add(worker, "communication", "pull weights", start, self.loop.now, self.times.message_bytes)
        self._compute(worker)

    def _compute(self, worker: int) -> None:
        factor, step = next(self._draws[worker]), self.rule.running[worker].step
        end = draw_compute(self.log, worker, self.loop.now, self.times.compute, factor, f"step {step}")
        if self._shared:
            start, end = end, end + factor * self.times.compute.update
            self.log.add(worker, "compute", f"optimizer step {step}", start, end)
            self.loop.at(end, partial(self._pushed, worker, end))
            return
        self.loop.at(end, partial(self._push, worker))

    def _push(self, worker: int) -> None:
        self.pushes.send(partial(self._pushed, worker, self.loop.now))

    def _pushed(self, worker: int, start: float) -> None:
        self.log.add(worker, "communication", "push gradients", start, self.loop.now, self.times.message_bytes)
        self._request(partial(self._hand_in, worker))
        self._request(partial(self._ask, worker))


def draw_compute(log: ReplayLog, rank: int, start: float, compute: TaskCompute, factor: float, label: str) -> float:
    """Add the spans of one task's compute; when it ends."""
    now = start
    for name, seconds in (
        ("forward", compute.forward),
        ("recompute", compute.recompute),
        ("backward", compute.backward),
        ("overhead", compute.overhead),
    ):
        log.add(rank, "compute", f"{name} {label}", now, now + factor * seconds)
        now += factor * seconds
    return now
