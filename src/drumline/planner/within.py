"""The best plan within what a config fixes: "auto" is decided by price, the rest stays as it was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..core.errors import InputError, PlanError
from ..costs import Estimate
from ..models.profile import Profile
from ..plans import Plan, check
from ..plans.combinations import refusal
from ..plans.imported import Imported
from .prices import prices
from .search import default_precision

OPEN: dict[str, tuple[object, ...]] = {"zero": (0, 1, 2, 3), "offload": ("none", "optimizer", "all")}
"""What is tried for keys of words and stages."""

AXES = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True)
class Within:
    """What was chosen: the plans that the config allows, best first."""

    profile: Profile
    """With the batch that the config and the job agree on."""
    ranked: tuple[tuple[Plan, Estimate], ...]

    @property
    def plan(self) -> Plan:
        """The best of them."""
        return self.ranked[0][0]


def batch_of(asked: Imported, own: int, option: int | None) -> int:
    """Samples a step: the config's, where it states them; else those of `--batch`, or the job's own."""
    open_batch = "batch_size" not in asked.stated and ("micro" in asked.free or "micro_size" not in asked.stated)
    if open_batch or asked.batch_size is None:
        return option or own
    if option is not None and option != asked.batch_size:
        raise InputError(
            f"--batch {option} beside a config for {asked.batch_size} samples",
            rule=f"samples a step: --batch({option}) != the config's({asked.batch_size})",
        )
    return asked.batch_size


def choose(
    profile: Profile, cluster: Cluster, asked: Imported, *, batch: int | None = None, precision: str | None = None
) -> Within:
    """Price every plan that the config allows; those that fit come first, by time."""
    profile = replace(profile, batch_size=batch_of(asked, profile.batch_size, batch))
    plans = list(allowed(profile, cluster, asked, precision))
    if len(plans) == 1:
        check(plans[0])
        steps = prices(profile, cluster, plans[0].precision)
        return Within(profile, ((plans[0], steps.estimate(plans[0])),))
    found, reason = [], None
    steps_by = {p.precision: prices(profile, cluster, p.precision) for p in plans}
    for plan in plans:
        try:
            if not refusal(plan):
                found.append((plan, steps_by[plan.precision].estimate(plan)))
        except PlanError as e:  # more tensor parallelism than heads, and the like: another choice may do
            reason = e
    if not found:
        raise reason or PlanError(
            "nothing that the config leaves open gives a plan",
            where=f"plan {asked.plan}",
            rule=f"a batch of {profile.batch_size} on {asked.plan.ranks} ranks",
        )
    found.sort(key=lambda x: (not x[1].fits, x[1].step_seconds if x[1].fits else x[1].memory_bytes, x[0].ranks))
    return Within(profile, tuple(found))


def allowed(profile: Profile, cluster: Cluster, asked: Imported, precision: str | None = None) -> Iterator[Plan]:
    """Every plan that agrees with what the config fixes."""
    base = replace(asked.plan, precision=precision_of(asked, cluster, precision))
    words = [OPEN.get(key, ()) if key in asked.free else (getattr(base, key),) for key in OPEN]
    ranks = base.ranks
    axes = [_powers(ranks) if key in asked.free else [getattr(base, key)] for key in AXES]
    for (zero, offload), (tp, pp, cp, ep) in itertools.product(itertools.product(*words), itertools.product(*axes)):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or dp % ep or (base.shard and dp % base.shard):
            continue
        plan = replace(base, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, offload=offload)
        yield from _in_micro_batches(plan, profile, asked)


def precision_of(asked: Imported, cluster: Cluster, option: str | None) -> str:
    """The type that the config fixes; of those that it leaves open, the one asked for, or the cluster's own."""
    if "precision" not in asked.free:
        if option is not None and option != asked.plan.precision:
            raise InputError(
                f"--precision {option} beside a config in {asked.plan.precision}", rule="a step computes in one type"
            )
        return asked.plan.precision
    kinds = ["fp32", *(kind for kind in ("bf16", "fp16") if f"{kind}.enabled" in asked.auto)]
    wanted = option or default_precision(cluster)
    if wanted in kinds:
        return wanted
    if option is not None:
        raise InputError(f"--precision {option}", rule=f"the config leaves open {', '.join(kinds)}")
    return kinds[-1] if cluster.device.kind == "cuda" else "fp32"


def _in_micro_batches(plan: Plan, profile: Profile, asked: Imported) -> Iterator[Plan]:
    """The number of micro-batches that the samples give; where they leave it open, powers of two."""
    batch = profile.batch_size
    if "micro" not in asked.free:
        yield plan
        return
    if "micro_size" in asked.stated and asked.micro_size:
        micro, rest = divmod(batch, asked.micro_size * plan.dp)
        if rest or not micro:
            raise InputError(
                f"a batch of {batch} on {plan.dp} data-parallel ranks",
                rule=f"batch({batch}) != micro-batch({asked.micro_size}) x a whole number x dp({plan.dp})",
                fix=f"--batch {asked.micro_size * plan.dp * max(1, round(batch / asked.micro_size / plan.dp))}",
            )
        yield replace(plan, micro=micro)
        return
    micro = 1
    while micro * plan.dp <= batch:
        yield replace(plan, micro=micro)
        micro *= 2


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
