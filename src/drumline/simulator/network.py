"""A network whose links are shared fairly: flows over paths of links, with max-min fair rates.

A rate is max-min fair if no flow can be faster without slowing one that is not faster. Rates change only when a flow
starts or ends, and only for flows that share a link with it, directly or through others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from ..core.errors import InputError
from ..theory.alpha_beta import Port, Topology
from .event_loop import EventLoop

SAME_RATE = 1e-12
"""Relative difference of rates that are equal up to rounding: then a flow keeps its rate and its end."""

MOST_RATES = 4_000_000
"""Rates that one network computes: about 20 s. Messages that share links with many others, and start and end at
different times, need one rate for each of them every time."""

Done = Callable[[], None]


class ReplayTooLarge(InputError):
    """A replay that would take minutes or more."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Use of the busiest link of one level, such as all network ports out of nodes."""

    name: str
    """The level."""
    busy_share: float
    """Share of the time in which the link carries something."""
    bytes: float
    """Bytes that it carried."""
    utilisation: float
    """These bytes over what it could have carried in all of the time."""


@dataclass(slots=True)
class _LinkState:
    """One link: its flows, in the order in which they started, and what it has carried."""

    capacity: float
    flows: dict[int, _Flow] = field(default_factory=dict)
    bytes: float = 0.0
    busy: float = 0.0
    since: float = 0.0
    """When its first flow started, while it has any."""

    def busy_until(self, now: float) -> float:
        return self.busy + (now - self.since if self.flows else 0.0)


@dataclass(slots=True)
class _Flow:
    """Bytes under way over some links."""

    number: int
    path: dict[Port, int]
    """Its links, and how often it passes each: a link that stands for several may be passed more than once."""
    left: float
    """Bytes left at the time `since`."""
    done: Done
    since: float
    rate: float = 0.0
    version: int = 0
    """Of its rate; an end that was computed for an earlier one does not count."""


class FairNetwork:
    """Flows on a topology, as events of a loop."""

    def __init__(self, topology: Topology, loop: EventLoop, *, most_rates: float | None = None) -> None:
        self._topology, self._loop = topology, loop
        self._most_rates = MOST_RATES if most_rates is None else most_rates
        self._links: dict[Port, _LinkState] = {}
        self._changed: dict[Port, None] = {}
        """Links whose flows changed since the rates were computed, in order."""
        self._count = self._rates = 0

    def send(self, path: Iterable[Port], size: float, done: Done) -> int:
        """Start a flow of `size` bytes; `done` is called when all of it has passed. Returns its number."""
        self._count += 1
        flow = _Flow(self._count, Counter(path), size, done, self._loop.now)
        if size <= 0:
            self._loop.at(self._loop.now, done)
            return flow.number
        for port, times in flow.path.items():
            link = self._links.get(port)
            if link is None:
                link = self._links[port] = _LinkState(self._topology.capacity(port))
            if not link.flows:
                link.since = self._loop.now
            link.flows[flow.number] = flow
            link.bytes += times * size
        self._touch(flow.path)
        return flow.number

    def use(self, seconds: float) -> tuple[LinkUse, ...]:
        """Use of each level of links over that many seconds, the busiest first."""
        return summarise_use(self.totals(), self._topology, seconds)

    def totals(self) -> dict[Port, tuple[float, float]]:
        """(bytes, busy seconds) of each link until now; bytes count when their flow starts."""
        return {port: (link.bytes, link.busy_until(self._loop.now)) for port, link in self._links.items()}

    def under_way(self) -> dict[int, tuple[float, float]]:
        """(bytes left, rate) of each flow, by its number."""
        now = self._loop.now
        flows = {n: flow for link in self._links.values() for n, flow in link.flows.items()}
        return {n: (flow.left - flow.rate * (now - flow.since), flow.rate) for n, flow in flows.items()}

    def _touch(self, path: Iterable[Port]) -> None:
        """Compute rates again after everything else that happens at this time."""
        if not self._changed:
            self._loop.at(self._loop.now, self._settle, priority=1)
        self._changed.update(dict.fromkeys(path))

    def _settle(self) -> None:
        """Give the flows that are affected by changes their fair rates."""
        changed, self._changed = list(self._changed), {}
        seen: set[Port] = set()
        for port in changed:
            if port not in seen:
                self._share(self._connected(port, seen))

    def _connected(self, first: Port, seen: set[Port]) -> dict[int, _Flow]:
        """The flows that share a link with those of `first`, directly or through others."""
        flows: dict[int, _Flow] = {}
        ports = [first]
        seen.add(first)
        while ports:
            for number, flow in self._links[ports.pop()].flows.items():
                if number not in flows:
                    flows[number] = flow
                    fresh = [port for port in flow.path if port not in seen]
                    seen.update(fresh)
                    ports += fresh
        return flows

    def _share(self, flows: dict[int, _Flow]) -> None:
        now = self._loop.now
        self._rates += len(flows)
        if self._rates > self._most_rates:
            raise ReplayTooLarge(
                f"a replay in which up to {len(flows)} messages at a time share links",
                rule=f"at most {self._most_rates:,} rates of messages are computed",
                fix="fewer ranks",
            )
        for flow, rate in fair_rates(flows, {p: self._links[p].capacity for f in flows.values() for p in f.path}):
            if math.isclose(rate, flow.rate, rel_tol=SAME_RATE):
                continue
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            flow.version += 1
            self._loop.at(now + flow.left / rate, partial(self._end, flow, flow.version))

    def _end(self, flow: _Flow, version: int) -> None:
        if flow.version != version:
            return
        for port in flow.path:
            link = self._links[port]
            link.busy = link.busy_until(self._loop.now)
            link.since = self._loop.now
            del link.flows[flow.number]
        self._touch(flow.path)
        flow.done()


def fair_rates(flows: dict[int, _Flow], capacity: dict[Port, float]) -> list[tuple[_Flow, float]]:
    """Max-min fair rates by progressive filling: the narrowest links fill first, and their flows keep that rate."""
    if len(flows) == 1:
        (flow,) = flows.values()
        return [(flow, min(capacity[port] / times for port, times in flow.path.items()))]
    on: dict[Port, dict[int, _Flow]] = {port: {} for port in capacity}
    passes = dict.fromkeys(capacity, 0)
    for number, flow in flows.items():
        for port, times in flow.path.items():
            on[port][number] = flow
            passes[port] += times
    rates: list[tuple[_Flow, float]] = []
    while on:
        share = min(capacity[port] / passes[port] for port in on)
        full = [port for port in on if capacity[port] / passes[port] <= share * (1 + SAME_RATE)]
        fixed = {number: flow for port in full for number, flow in on[port].items()}
        rates += [(flow, share) for flow in fixed.values()]
        for number, flow in fixed.items():
            for port, times in flow.path.items():
                capacity[port] -= times * share
                passes[port] -= times
                del on[port][number]
        on = {port: there for port, there in on.items() if there}
    return rates


def summarise_use(totals: dict[Port, tuple[float, float]], topology: Topology, seconds: float) -> tuple[LinkUse, ...]:
    """The busiest link of each level, from (bytes, busy seconds) of all links; the busiest level first."""
    if seconds <= 0:
        return ()
    levels: dict[str, LinkUse] = {}
    for port, (size, busy) in totals.items():
        use = LinkUse(port[0], min(1.0, busy / seconds), size, size / seconds / topology.capacity(port))
        levels[port[0]] = max(levels.get(port[0], use), use, key=lambda u: (u.utilisation, u.busy_share))
    return tuple(sorted(levels.values(), key=lambda u: (-u.utilisation, -u.busy_share, u.name)))
