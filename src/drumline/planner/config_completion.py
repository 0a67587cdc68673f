"""Complete a config of another library: its "auto" values are chosen by cost, the rest stays as given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..clusters import Cluster
from ..core.errors import InputError, PlanError
from ..costs import Estimate, cost_model
from ..interop.imported import ImportedConfig
from ..models.profile import Profile
from ..plans import Plan, check
from ..plans.combinations import refusal
from .reserve import Reserve, reserve_bytes, with_reserve
from .search import default_precision, price
from .space import powers

OPEN_VALUES: dict[str, tuple[object, ...]] = {"zero": (0, 1, 2, 3), "offload": ("none", "optimizer", "all")}
"""Values that are tried for open keys."""

AXES = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True, slots=True)
class CompletedConfig:
    """Plans that the config allows, best first."""

    profile: Profile
    """With the batch size of the config."""
    ranked: tuple[tuple[Plan, Estimate], ...]

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.ranked[0][0]


def batch_size_of(config: ImportedConfig, own: int, option: int | None) -> int:
    """Samples per step: those of the config where it gives them, else those of `--batch`, or the job's own."""
    open_batch = "batch_size" not in config.given_sizes and (
        "micro" in config.open_keys or "micro_size" not in config.given_sizes
    )
    if open_batch or config.batch_size is None:
        return option or own
    if option is not None and option != config.batch_size:
        raise InputError(
            f"--batch {option} with a config for {config.batch_size} samples",
            rule=f"samples per step: --batch({option}) != config({config.batch_size})",
        )
    return config.batch_size


def complete(
    profile: Profile,
    cluster: Cluster,
    config: ImportedConfig,
    *,
    batch: int | None = None,
    precision: str | None = None,
    reserve: Reserve = None,
) -> CompletedConfig:
    """Price every plan that the config allows; those that fit and keep the reserve free come first, by time."""
    profile = replace(profile, batch_size=batch_size_of(config, profile.batch_size, batch))
    plans = list(allowed_plans(profile, cluster, config, precision))
    if len(plans) == 1:
        check(plans[0])
        _check_samples(plans[0], profile.batch_size)
        return CompletedConfig(profile, ((plans[0], price(profile, cluster, plans[0])),))
    scored: list[tuple[Plan, Estimate]] = []
    reason: PlanError | None = None
    models = {p.precision: cost_model(profile, cluster, p.precision) for p in plans}
    for plan in plans:
        try:
            if not refusal(plan):
                _check_samples(plan, profile.batch_size)
                scored.append((plan, models[plan.precision].estimate(plan)))
        except PlanError as e:  # such as more tensor parallelism than heads: another value may work
            reason = e
    if not scored:
        raise reason or PlanError(
            "no value of the open keys of the config gives a plan",
            where=f"plan {config.plan}",
            rule=f"a batch of {profile.batch_size} on {config.plan.ranks} ranks",
        )
    kept = reserve_bytes(reserve, cluster)
    scored = [(plan, with_reserve(e, kept, hidden=False)) for plan, e in scored]

    def order(plan: Plan, e: Estimate) -> tuple[float, ...]:
        return not e.fits, e.in_reserve, e.step_seconds if e.fits else e.memory_bytes, plan.ranks

    scored.sort(key=lambda x: order(*x))
    return CompletedConfig(profile, tuple(scored))


def allowed_plans(
    profile: Profile, cluster: Cluster, config: ImportedConfig, precision: str | None = None
) -> Iterator[Plan]:
    """Every plan that agrees with the fixed keys of the config."""
    base = replace(config.plan, precision=precision_of(config, cluster, precision))
    words = [OPEN_VALUES.get(key, ()) if key in config.open_keys else (getattr(base, key),) for key in OPEN_VALUES]
    ranks = base.ranks
    axes = [list(powers(ranks)) if key in config.open_keys else [getattr(base, key)] for key in AXES]
    for (zero, offload), (tp, pp, cp, ep) in itertools.product(itertools.product(*words), itertools.product(*axes)):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or dp % ep or (base.shard and dp % base.shard):
            continue
        plan = replace(base, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, offload=offload)
        yield from _in_micro_batches(plan, profile, config)


def precision_of(config: ImportedConfig, cluster: Cluster, option: str | None) -> str:
    """The precision that the config fixes; else `--precision`, or the default of the cluster."""
    if "precision" not in config.open_keys:
        if option is not None and option != config.plan.precision:
            raise InputError(
                f"--precision {option} with a config in {config.plan.precision}", rule="a step has one precision"
            )
        return config.plan.precision
    kinds = ["fp32", *(kind for kind in ("bf16", "fp16") if f"{kind}.enabled" in config.auto)]
    wanted = option or default_precision(cluster)
    if wanted in kinds:
        return wanted
    if option is not None:
        raise InputError(f"--precision {option}", rule=f"the config leaves open {', '.join(kinds)}")
    return kinds[-1] if cluster.device.kind == "cuda" else "fp32"


def _in_micro_batches(plan: Plan, profile: Profile, config: ImportedConfig) -> Iterator[Plan]:
    """The number of micro-batches that the sizes determine; powers of two where they do not."""
    batch = profile.batch_size
    if "micro" not in config.open_keys:
        yield from _with_given_sizes(plan, batch, config)
        return
    if "micro_size" in config.given_sizes and config.micro_size:
        micro, rest = divmod(batch, config.micro_size * plan.dp)
        if rest or not micro:
            raise InputError(
                f"a batch of {batch} on {plan.dp} data-parallel ranks",
                rule=f"batch({batch}) != micro-batch({config.micro_size}) x a whole number x dp({plan.dp})",
                fix=f"--batch {config.micro_size * plan.dp * max(1, round(batch / config.micro_size / plan.dp))}",
            )
        yield replace(plan, micro=micro)
        return
    if plan.dp <= batch:
        yield from (replace(plan, micro=micro) for micro in powers(batch // plan.dp))


def _with_given_sizes(plan: Plan, batch: int, config: ImportedConfig) -> Iterator[Plan]:
    """The plan with the micro-batches that the config's sizes give for its replicas; none if they give no number."""
    if "micro_size" in config.given_sizes and config.micro_size and plan.dp != config.plan.dp:
        micro, rest = divmod(batch, config.micro_size * plan.dp)
        if rest or not micro or ("micro" in config.given_sizes and micro != plan.micro):
            return
        plan = replace(plan, micro=micro)
    yield plan


def _check_samples(plan: Plan, batch: int) -> None:
    """Refuse more micro-batches than samples, as the engine does."""
    if plan.micro > batch:
        raise PlanError(
            f"micro={plan.micro} for batches of {batch} samples",
            where=f"plan {plan}",
            rule="every micro-batch has at least one sample",
            fix=f"--batch {plan.micro * plan.dp} or more",
        )
