"""Does it fit: the plan to try first, its largest batch, and single changes that make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..core.errors import ClusterError, PlanError
from ..costs import OperatorCostModel, cost_model
from ..costs.model import CostModel
from ..models.profile import Profile
from ..plans import Plan
from ..plans.combinations import refusal
from .memory_saving import MAX_CHUNKS, chunks, offloads
from .search import price
from .space import powers, recomputations

MAX_BATCH = 2**24
"""Largest number of samples per step that is tried."""
MIN_TOKENS = 256
"""Sequences are not shortened further."""

Shorten = Callable[[int], Profile]
"""Tokens per sample -> the profile with sequences of that length, at the same batch size."""


@dataclass(frozen=True, slots=True)
class SingleChange:
    """One change on its own, and its effect."""

    change: str
    plan: str
    memory_bytes: float
    memory_limit: float
    fits: bool
    lacks_bytes: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class FitReport:
    """Whether a plan fits, its largest batch, and changes that would make it fit."""

    plan: str
    fits: bool
    memory_bytes: float
    memory_limit: float
    memory_parts: dict[str, float]
    lacks_bytes: float
    largest_batch: int
    """Most samples per step that fit with this plan; 0 where not even one per rank does."""
    largest_at_once: int
    """Most samples per step that fit in one micro-batch with any plan without offload."""
    largest_plan: str
    changes: tuple[SingleChange, ...]
    """Each tried on its own; those that make it fit first, fastest first."""


def first_plan(profile: Profile, cluster: Cluster, precision: str) -> Plan:
    """The plan to try first: a whole replica on every device, without micro-batches."""
    return Plan(dp=min(cluster.devices, profile.batch_size), precision=precision)


def fit_report(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    *,
    fleet: Cluster | None = None,
    tokens: int = 0,
    shorten: Shorten | None = None,
) -> FitReport:
    """Report on one plan. `tokens` and `shorten` are for models whose sequences can be shortened."""
    e = price(profile, cluster, plan)
    at_once, largest_plan = most_at_once(profile, cluster, plan.precision)
    changes = () if e.fits else tuple(_changes(profile, cluster, plan, fleet or cluster, tokens, shorten))
    return FitReport(
        plan=str(plan),
        fits=e.fits,
        memory_bytes=e.memory_bytes,
        memory_limit=e.memory_limit,
        memory_parts={k: v for k, v in e.memory_parts.items() if v},
        lacks_bytes=e.lacks[1],
        largest_batch=largest_batch(profile, cluster, plan),
        largest_at_once=at_once,
        largest_plan=largest_plan,
        changes=tuple(sorted(changes, key=lambda c: (not c.fits, c.step_seconds if c.fits else c.lacks_bytes))),
    )


def largest_batch(profile: Profile, cluster: Cluster, plan: Plan) -> int:
    """Most samples per step that fit with a plan, by bisection; 0 where none do."""

    def fits(batch: int) -> bool:
        return OperatorCostModel(replace(profile, batch_size=batch), cluster, plan.precision).fits(plan)

    low, high = 0, plan.dp * plan.micro
    while high <= MAX_BATCH and fits(high):
        low, high = high, 2 * high
    if not low or high > MAX_BATCH:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def most_at_once(profile: Profile, cluster: Cluster, precision: str) -> tuple[int, str]:
    """The largest batch in one micro-batch over all devices, and its plan."""
    best = (0, "")
    for zero in (0, 1, 2, 3) if cluster.devices > 1 else (0,):
        for recompute in recomputations(profile):
            plan = Plan(dp=cluster.devices, zero=zero, recompute=recompute, precision=precision)
            if not refusal(plan):
                # of equals the first: less sharding, less recomputation
                best = max(best, (largest_batch(profile, cluster, plan), str(plan)), key=lambda one: one[0])
    return best


def _changes(
    profile: Profile, cluster: Cluster, plan: Plan, fleet: Cluster, tokens: int, shorten: Shorten | None
) -> Iterator[SingleChange]:
    """Every single change; of a change that has a size, the smallest that fits, or else the largest."""
    trial = _Trial(profile, cluster, plan)
    for options in _plan_changes(profile, cluster, plan, trial.fits):
        option = trial.first_that_fits(options)
        if option is not None:
            yield trial.change(*option)
    yield from _more_devices(profile, cluster, plan, fleet)
    batch = largest_batch(profile, cluster, plan)
    if batch:
        yield _Trial(replace(profile, batch_size=batch), cluster, plan).change(f"batch {batch}", plan)
    while shorten is not None and tokens >= MIN_TOKENS:
        tokens //= 2
        trial = _Trial(shorten(tokens), cluster, plan)
        if trial.fits(plan) or tokens < MIN_TOKENS:
            yield trial.change(f"{tokens} tokens per sample", plan)
            return


def _plan_changes(
    profile: Profile, cluster: Cluster, plan: Plan, fits: Callable[[Plan], bool]
) -> Iterator[list[tuple[str, Plan]]]:
    """Changes of the plan, each with its sizes, smallest first."""
    for word in recomputations(profile):
        if word not in ("none", plan.recompute):
            yield [(f"recompute={word}", replace(plan, recompute=word))]
    sharded = replace(plan, zero=3, ep=1) if plan.dp > 1 else plan  # zero=3 gathers what ep distributes
    if plan.dp > 1:
        yield from ([(f"zero={z}", replace(plan, zero=z, ep=plan.ep if z < 3 else 1))] for z in range(plan.zero + 1, 4))
        cut = [*chunks(sharded, fits)] or [replace(sharded, chunk=MAX_CHUNKS)]
        yield [(f"zero=3,chunk={p.chunk}", p) for p in cut]
    for offloaded in offloads(sharded, cluster):
        yield [(f"offload={offloaded.offload}{',zero=3' if offloaded.zero == 3 != plan.zero else ''}", offloaded)]
        if offloaded.offload == "all":
            yield [(f"offload=all,chunk={p.chunk}", p) for p in chunks(offloaded, fits)]
    micros = [m for m in powers(profile.batch_size // plan.dp) if m > plan.micro]
    yield [(f"micro={m}", replace(plan, micro=m)) for m in micros]
    counts = [x.experts.count for x in profile.layers if x.experts]
    spread = [k for k in powers(min(counts, default=1)) if k > plan.ep and plan.dp % k == 0 and plan.zero < 3]
    yield [(f"ep={k}", replace(plan, ep=k)) for k in spread]
    n = 1 if counts else plan.dp  # the engine splits a mixture by its experts alone
    sizes = [k for k in range(2, n + 1) if n % k == 0 and k <= cluster.node.devices]
    yield [(f"tp={k}", replace(plan, dp=n // k, tp=k)) for k in sizes]
    depths = [k for k in range(2, n + 1) if n % k == 0 and (n // k) * k <= profile.batch_size]
    yield [(f"pp={k},micro={k}", replace(plan, dp=n // k, pp=k, micro=max(plan.micro, k))) for k in depths]
    if plan.precision == "fp32" and "bf16" in cluster.device.peak:
        yield [("precision=bf16", replace(plan, precision="bf16"))]


def _more_devices(profile: Profile, cluster: Cluster, plan: Plan, fleet: Cluster) -> Iterator[SingleChange]:
    """More devices as replicas: this helps where activations are too large."""
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
    """A profile on a cluster, for which plans are tried."""

    def __init__(self, profile: Profile, cluster: Cluster, first: Plan) -> None:
        self._profile, self._cluster = profile, cluster
        # changes are compared with the first plan, so they use the same kind of cost model in any precision
        self._fitted = bool(cost_model(profile, cluster, first.precision).source)
        self._models: dict[str, CostModel] = {}

    def model(self, precision: str) -> CostModel:
        """The cost model of a precision."""
        if precision not in self._models:
            make = cost_model if self._fitted else OperatorCostModel
            self._models[precision] = make(self._profile, self._cluster, precision)
        return self._models[precision]

    def fits(self, plan: Plan) -> bool:
        """Whether a plan fits."""
        return self.model(plan.precision).fits(plan)

    def first_that_fits(self, options: list[tuple[str, Plan]]) -> tuple[str, Plan] | None:
        """The first option that fits, else the last that can be priced."""
        last = None
        for name, plan in options:
            try:
                if refusal(plan) or plan.dp * plan.micro > self._profile.batch_size:
                    continue
                last = name, plan
                if self.fits(plan):
                    break
            except PlanError:  # the model cannot be divided like this
                last = None
        return last

    def change(self, name: str, plan: Plan) -> SingleChange:
        """The effect of a change."""
        e = self.model(plan.precision).estimate(plan)
        return SingleChange(name, str(plan), e.memory_bytes, e.memory_limit, e.fits, e.lacks[1], e.step_seconds)
