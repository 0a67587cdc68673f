"""Will it fit: the plan that one would try first, the largest batch that it holds, and the single change that helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..clusters import Cluster
from ..core.errors import ClusterError, PlanError
from ..costs import Steps
from ..models.profile import Profile
from ..plans import Plan
from ..plans.combinations import refusal
from .prices import by_fit, prices
from .space import MOST_CHUNKS, chunks, micro_batches, offloads, recomputations

if TYPE_CHECKING:
    from .prices import Prices

LARGEST = 2**24
"""Samples a step beyond which nobody asks."""

Shorter = Callable[[int], Profile]
"""Tokens a sample -> the model with sequences of that length, at the same batch."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change, alone, and what it does."""

    change: str
    plan: str
    memory_bytes: float
    memory_limit: float
    fits: bool
    lacks_bytes: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a plan fits, how large its batch may be, and what would make it fit."""

    plan: str
    fits: bool
    memory_bytes: float
    memory_limit: float
    memory_parts: dict[str, float]
    lacks_bytes: float
    largest_batch: int
    """Samples a step that the plan holds as it is; 0 where not even one a rank."""
    largest_at_once: int
    """The most samples a step that some plan holds in one micro-batch, nothing offloaded."""
    largest_plan: str
    changes: tuple[Change, ...]
    """Each tried alone; those that make it fit first, the fastest of them before the others."""


def first_plan(profile: Profile, cluster: Cluster, precision: str) -> Plan:
    """What one would try first: a whole replica on every device, the batch in one piece."""
    return Plan(dp=min(cluster.devices, profile.batch_size), precision=precision)


def fit(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    *,
    fleet: Cluster | None = None,
    tokens: int = 0,
    shorter: Shorter | None = None,
) -> Fit:
    """How a plan fits. `tokens` and `shorter` are given where sequences of the model can be cut shorter."""
    e = prices(profile, cluster, plan.precision).estimate(plan)
    at_once, by = most_at_once(profile, cluster, plan.precision)
    tried = () if e.fits else tuple(_tried(profile, cluster, plan, fleet or cluster, tokens, shorter))
    return Fit(
        plan=str(plan),
        fits=e.fits,
        memory_bytes=e.memory_bytes,
        memory_limit=e.memory_limit,
        memory_parts={k: v for k, v in e.memory_parts.items() if v},
        lacks_bytes=e.lacks[1],
        largest_batch=largest_batch(profile, cluster, plan),
        largest_at_once=at_once,
        largest_plan=by,
        changes=tuple(sorted(tried, key=lambda c: (not c.fits, c.step_seconds if c.fits else c.lacks_bytes))),
    )


def largest_batch(profile: Profile, cluster: Cluster, plan: Plan) -> int:
    """The most samples a step that fit under a plan as it is, found by bisection; 0 where none do."""

    def fits(batch: int) -> bool:
        return Steps(replace(profile, batch_size=batch), cluster, plan.precision).fits(plan)

    low, high = 0, plan.dp * plan.micro
    while high <= LARGEST and fits(high):
        low, high = high, 2 * high
    if not low or high > LARGEST:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def most_at_once(profile: Profile, cluster: Cluster, precision: str) -> tuple[int, str]:
    """The largest batch in one micro-batch over all devices, and the plan that holds it."""
    best = (0, "")
    for zero in (0, 1, 2, 3) if cluster.devices > 1 else (0,):
        for recompute in recomputations(profile):
            plan = Plan(dp=cluster.devices, zero=zero, recompute=recompute, precision=precision)
            if not refusal(plan):
                # of equals the first: less sharding, less computed again
                best = max(best, (largest_batch(profile, cluster, plan), str(plan)), key=lambda found: found[0])
    return best


def _tried(
    profile: Profile, cluster: Cluster, plan: Plan, fleet: Cluster, tokens: int, shorter: Shorter | None
) -> Iterator[Change]:
    """Every single change; of a change that has a size, the smallest that fits, or the largest that there is."""
    here = _Trial(profile, cluster, plan)
    for options in _plans(profile, cluster, plan, here.fits):
        found = here.first_that_fits(options)
        if found is not None:
            yield here.change(*found)
    yield from _devices(profile, cluster, plan, fleet)
    batch = largest_batch(profile, cluster, plan)
    if batch:
        yield _Trial(replace(profile, batch_size=batch), cluster, plan).change(f"batch {batch}", plan)
    while shorter is not None and tokens >= 256:
        tokens //= 2
        trial = _Trial(shorter(tokens), cluster, plan)
        if trial.fits(plan) or tokens < 256:
            yield trial.change(f"{tokens} tokens a sample", plan)
            return


def _plans(
    profile: Profile, cluster: Cluster, plan: Plan, fits: Callable[[Plan], bool]
) -> Iterator[list[tuple[str, Plan]]]:
    """Changes of the plan, each with its sizes from the gentlest on."""
    for word in recomputations(profile):
        if word not in ("none", plan.recompute):
            yield [(f"recompute={word}", replace(plan, recompute=word))]
    sharded = replace(plan, zero=3) if plan.dp > 1 else plan
    if plan.dp > 1:
        yield from ([(f"zero={z}", replace(plan, zero=z))] for z in range(plan.zero + 1, 4))
        cut = [*chunks(sharded, fits)] or [replace(sharded, chunk=MOST_CHUNKS)]
        yield [(f"zero=3,chunk={p.chunk}", p) for p in cut]
    for moved in offloads(sharded, cluster):
        yield [(f"offload={moved.offload}{',zero=3' if moved.zero == 3 != plan.zero else ''}", moved)]
        if moved.offload == "all":
            yield [(f"offload=all,chunk={p.chunk}", p) for p in chunks(moved, fits)]
    micros = [m for m in micro_batches(profile, plan.dp) if m > plan.micro]
    yield [(f"micro={m}", replace(plan, micro=m)) for m in micros]
    n = plan.dp
    ways = [k for k in range(2, n + 1) if n % k == 0 and k <= cluster.node.devices]
    yield [(f"tp={k}", replace(plan, dp=n // k, tp=k)) for k in ways]
    deep = [k for k in range(2, n + 1) if n % k == 0 and (n // k) * k <= profile.batch_size]
    yield [(f"pp={k},micro={k}", replace(plan, dp=n // k, pp=k, micro=max(plan.micro, k))) for k in deep]
    if plan.precision == "fp32" and "bf16" in cluster.device.peak:
        yield [("precision=bf16", replace(plan, precision="bf16"))]


def _devices(profile: Profile, cluster: Cluster, plan: Plan, fleet: Cluster) -> Iterator[Change]:
    """More of the same devices, as replicas: that helps where activations are what is too much."""
    if plan.splits_model:
        return
    n, last = cluster.devices, None
    while n * 2 <= min(profile.batch_size, fleet.devices):
        n *= 2
        try:
            trial = _Trial(profile, fleet.with_devices(n), plan)
        except ClusterError:
            break
        last = trial.change(f"--devices {n}", replace(plan, dp=n, shard=0))
        if last.fits:
            break
    if last is not None:
        yield last


class _Trial:
    """A model on machines, on which plans are tried."""

    def __init__(self, profile: Profile, cluster: Cluster, first: Plan) -> None:
        self._profile, self._cluster = profile, cluster
        # changes are compared with the plan that they change: its price model is theirs, in any precision
        fitted = by_fit(prices(profile, cluster, first.precision))
        self._prices: Callable[[Profile, Cluster, str], Prices] = Steps if fitted is None else prices
        self._steps: dict[str, Prices] = {}

    def steps(self, plan: Plan) -> Prices:
        """What prices it."""
        if plan.precision not in self._steps:
            self._steps[plan.precision] = self._prices(self._profile, self._cluster, plan.precision)
        return self._steps[plan.precision]

    def fits(self, plan: Plan) -> bool:
        """Whether it fits."""
        return self.steps(plan).fits(plan)

    def first_that_fits(self, options: list[tuple[str, Plan]]) -> tuple[str, Plan] | None:
        """The gentlest that fits, else the last that can be priced at all."""
        last = None
        for name, plan in options:
            try:
                if refusal(plan) or plan.dp * plan.micro > self._profile.batch_size:
                    continue
                last = name, plan
                if self.fits(plan):
                    break
            except PlanError:  # the model does not have what the plan divides
                last = None
        return last

    def change(self, name: str, plan: Plan) -> Change:
        """What a plan does."""
        e = self.steps(plan).estimate(plan)
        return Change(name, str(plan), e.memory_bytes, e.memory_limit, e.fits, e.lacks[1], e.step_seconds)
