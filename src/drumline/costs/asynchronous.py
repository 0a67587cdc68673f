"""Steps whose replicas do not meet (`sync`), in closed form: seconds per batch in parts that add up, and staleness.

P workers, C seconds of compute of a task at the usual speed, f_i the factor of worker i; s seconds of a server's port
for one worker's message, o the worker's own seconds for it, u an update. The simulator replays the same times with the
update rules themselves; without jitter and with even workers both agree.

- `server`: all slices of a step make one update. Workers pull together, in max(P s, o); the last gradient arrives after
  the slowest compute, and those that arrive together share the port. `backup=b`: the same for all but the b slowest.
- `stale:k`: workers that are even on average drift out of phase, and hardly wait for jitter. A worker that is always
  slow holds up all others nevertheless, which then begin together with it.
- `async`, `hogwild`: worker i needs T_i = ask + pull + f_i C + push + u for a batch, so a batch is done every
  1 / sum(1 / T_i) seconds, or every s or u, if the servers are the bottleneck. Its gradients are P - 1 updates old.
- `local:k`: k steps of the slowest, then an average. `across=m` averages inside a host every k and over all every m.
- `gossip`: a step of the slowest in the neighbourhood, then the exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..clusters import Cluster, StepTimeDistribution
from ..core.units import format_seconds
from ..models.profile import Profile
from ..plans import Plan
from ..theory.closed_queue import cycle_seconds
from ..theory.order_statistics import expected_largest, expected_order_statistic, typical_arrivals
from ..theory.shared_port import shared_port_ends
from .estimate import Estimate
from .memory import PeakMemory
from .model import plan_notes
from .worker_memory import server_memory
from .worker_times import WorkerTimes

RING_NEIGHBOURHOOD, RANDOM_NEIGHBOURHOOD = 5, 3
"""Ranks whose slowest a step of gossip waits for under jitter, about: a rank waits for its neighbours, which waited for
theirs. By replays of 2 to 64 ranks: within 5% of the step for jitter up to 30%."""

NEARLY_ALWAYS = 0.9
"""Share of the time from which on servers count as busy all the time."""


@dataclass(frozen=True, slots=True)
class WorkersPrice:
    """Seconds per batch by part, and the mean staleness of its gradients."""

    parts: dict[str, float]
    staleness: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds per batch."""
        return sum(self.parts.values())


def price_workers(plan: Plan, times: WorkerTimes, cluster: Cluster) -> WorkersPrice:
    """The closed form of a plan with `sync` other than `allreduce`."""
    spread = cluster.step_times
    if plan.sync in ("async", "hogwild"):
        return _batches(plan, times, spread)
    if plan.has_coordinator:
        return _steps(plan, times, spread)
    return _local(plan, times, spread, cluster) if plan.sync_mode == "local" else _gossip(plan, times, spread)


def workers_estimate(
    plan: Plan,
    price: WorkersPrice,
    profile: Profile,
    cluster: Cluster,
    memory: PeakMemory,
    *,
    error: float,
    origin: str,
) -> Estimate:
    """The estimate of a plan from its price and the memory of a worker."""
    needed, available = server_memory(profile, plan, cluster, memory.total)
    return Estimate(
        plan=str(plan),
        step_seconds=price.step_seconds,
        parts=price.parts,
        memory_bytes=memory.total,
        memory_parts=memory.parts(),
        memory_limit=max(0.0, cluster.device.memory - cluster.device.context),
        error=error,
        origin=origin,
        notes=(*plan_notes(plan, cluster), *price.notes),
        host_bytes=needed,
        host_limit=available,
        staleness=price.staleness,
    )


# -- with a coordinator


def _steps(plan: Plan, t: WorkerTimes, spread: StepTimeDistribution) -> WorkersPrice:
    """One update per step, when enough of its slices are there."""
    factors, counted = spread.factors(plan.dp), plan.dp - plan.backup
    ahead = plan.sync_steps if plan.sync_mode == "stale" else 0
    last = _slowest(factors, spread.jitter, counted, ahead)
    optimizer = t.accumulate + t.update
    if ahead and len(set(factors)) == 1:
        step = _out_of_phase(plan, t, last)
    else:
        step = _in_phase(t, factors, spread.jitter, counted, last)
    waiting = max(0.0, last - 1.0) * t.compute.passes
    parts = {k: min(1.0, last) * v for k, v in t.compute.parts().items()}
    parts |= {"communication": step - sum(parts.values()) - waiting - optimizer, "waiting": waiting}
    parts["optimizer"] = optimizer
    return WorkersPrice(parts, ahead * (plan.dp - 1) / plan.dp if spread else 0.0)


def _slowest(factors: Sequence[float], jitter: float, counted: int, ahead: int) -> float:
    """The factor of the worker that completes a step. One that may run ahead waits for jitter the less, the further.

    Replays of 2 to 16 workers, jitter up to 30%: m / (1 + 2 k / m) instead of m, within 3% of the step.
    """
    last = expected_order_statistic(factors, jitter, counted)
    usual = sorted(factors)[counted - 1]
    m = last / usual - 1.0
    return usual * (1.0 + m * m / (m + 2 * ahead)) if ahead and m > 0 else last


def _in_phase(t: WorkerTimes, factors: Sequence[float], jitter: float, counted: int, last: float) -> float:
    """Workers that begin a step together: they share the ports whenever they come at the same time."""
    # those that are late for every step do not begin together with the others
    starters = tuple(f for f in factors if f <= sorted(factors)[counted - 1])
    pull = t.pull.latency + max(t.pull.own, len(starters) * t.pull.service)
    typical = typical_arrivals(starters, jitter)
    arrivals = [min(x, last) for x in typical[: counted - 1]] + [last] + [max(x, last) for x in typical[counted:]]
    ends = shared_port_ends([t.compute.passes * x for x in arrivals], t.push.service, t.push.own)[:counted]
    collected = max(at + (counted - i) * t.accumulate for i, at in enumerate(ends))
    return t.ask + pull + t.push.latency + collected + t.update


def _out_of_phase(plan: Plan, t: WorkerTimes, factor: float) -> float:
    """Even workers that may run ahead do not begin together: a step takes as long as each worker's own cycle."""
    alone, stations = _alone(t, factor * t.compute.passes)
    # one in P gradients completes a step, and its worker waits for the update
    (cycle,) = cycle_seconds([plan.dp], [alone], [*stations, t.accumulate + t.update / plan.dp])
    return max(cycle, alone + sum(stations) + t.accumulate + t.update)


def _alone(t: WorkerTimes, compute: float) -> tuple[float, list[float]]:
    """(seconds of a task that no other worker delays, seconds at the servers' ports)."""
    ends = [max(0.0, x.own - x.service) + x.latency for x in (t.pull, t.push)]
    return t.ask + compute + sum(ends), [t.pull.service, t.push.service]


def _batches(plan: Plan, t: WorkerTimes, spread: StepTimeDistribution) -> WorkersPrice:
    """One update per gradient of a whole batch, as soon as it is there."""
    own_update = t.compute.update if plan.sync == "hogwild" else 0.0
    factors = spread.factors(plan.dp)
    kinds = sorted(Counter(factors).items())
    # a worker's own update is as slow as its compute; the servers' is not
    tasks = [_alone(t, f * (t.compute.passes + own_update)) for f, _ in kinds]
    stations = [*tasks[0][1], t.update]
    if spread:
        cycles = cycle_seconds([n for _, n in kinds], [alone for alone, _ in tasks], stations)
    else:  # perfectly regular workers take turns
        cycles = [max(alone + sum(stations), plan.dp * max(stations)) for alone, _ in tasks]
    rate = sum(n / cycle for (_, n), cycle in zip(kinds, cycles, strict=True))
    # shares of the updates, P of which go on at once
    shares = [n / cycle / rate / plan.dp for (_, n), cycle in zip(kinds, cycles, strict=True)]
    stretched = sum(share * f for share, (f, _) in zip(shares, kinds, strict=True))
    parts = {k: stretched * v for k, v in t.compute.parts().items()}
    parts["communication"] = sum(shares) * (t.ask + t.pull.alone + t.push.alone)
    parts["waiting"] = 0.0
    parts["optimizer"] = sum(shares) * t.update + stretched * own_update
    parts["waiting"] = max(0.0, 1 / rate - sum(parts.values()))
    return WorkersPrice(parts, float(plan.dp - 1), _bottleneck(plan, t, rate))


def _bottleneck(plan: Plan, t: WorkerTimes, rate: float) -> tuple[str, ...]:
    """A note about servers that cannot keep up with their workers."""
    message = max(t.pull.service, t.push.service)
    if max(message, t.update) * rate < NEARLY_ALWAYS:
        return ()
    what = f"the update of a batch takes {format_seconds(t.update)}"
    if message > t.update:
        what = f"the messages of a batch take {format_seconds(message)} each way"
    more = "more servers share it" if plan.servers < plan.dp else "local:k sends less"
    return (f"the servers are the bottleneck: {what}; {more} (servers={plan.servers})",)


# -- without


def _local(plan: Plan, t: WorkerTimes, spread: StepTimeDistribution, cluster: Cluster) -> WorkersPrice:
    """k steps on one's own, then an average over the host or over all."""
    k, factors = plan.sync_steps, spread.factors(plan.dp)
    a = t.averaging
    if plan.across and plan.dp > cluster.node.devices:
        host = cluster.node.devices
        hosts = [factors[i : i + host] for i in range(0, plan.dp, host)]
        largest = max(expected_largest(own, spread.jitter, steps=k) for own in hosts)
        averages = a.inside * (1 / k - 1 / plan.across) + a.across / plan.across
    else:
        largest = expected_largest(factors, spread.jitter, steps=k)
        averages = (a.inside * (1 / k - 1 / plan.across) + a.across / plan.across) if plan.across else a.inside / k
    note = f"the first {plan.sync_first} steps average after every step, and are not counted here"
    return WorkersPrice(_own_steps(t, largest, averages), 0.0, (note,) if plan.sync_first else ())


def _gossip(plan: Plan, t: WorkerTimes, spread: StepTimeDistribution) -> WorkersPrice:
    """A step on one's own, then an exchange with the neighbours, who must have finished theirs."""
    near = RANDOM_NEIGHBOURHOOD if plan.sync == "gossip:random" else RING_NEIGHBOURHOOD
    slowest = sorted(spread.factors(plan.dp))[-near:]
    return WorkersPrice(_own_steps(t, expected_largest(slowest, spread.jitter), t.averaging.inside))


def _own_steps(t: WorkerTimes, largest: float, communication: float) -> dict[str, float]:
    """The parts of a step that every worker ends with its own update."""
    base = min(1.0, largest)
    parts = {k: base * v for k, v in t.compute.parts().items()}
    parts["communication"] = communication
    parts["waiting"] = max(0.0, largest - 1.0) * (t.compute.passes + t.compute.update)
    parts["optimizer"] = base * t.compute.update
    return parts
