"""The search: every candidate scored, the best first, each loser with its reason in numbers."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..cluster import Cluster
from ..cost import Estimate, Steps
from ..errors import DoesNotFit, PlanError
from ..model.profile import Profile
from ..plan import Plan
from . import remedy
from .answer import Answer, Candidate
from .explain import explain, reason
from .space import candidates

Score = Callable[[Profile, Plan, Cluster], Estimate]


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    precision: str | None = None,
    score: Score | None = None,
    fleet: Cluster | None = None,
) -> tuple[Answer, dict[str, Estimate]]:
    """Score every plan for the cluster; the answer, and the estimates behind it by plan.

    `fleet` is what the cluster was taken from: when nothing fits, more of it may be the way out.
    """
    start = time.perf_counter()
    base = Plan(precision=precision or default_precision(cluster))
    steps = Steps(profile, cluster, base.precision)
    priced = score or (lambda _, plan, __: steps.estimate(plan))
    scored = [(plan, priced(profile, plan, cluster)) for plan in candidates(profile, cluster, base, steps.fits)]
    if not scored:
        raise PlanError("there is no candidate", rule=f"batch {profile.batch_size}, {cluster.devices} devices")
    fitting = sorted((s for s in scored if s[1].fits), key=lambda s: (s[1].step_seconds, *_effort(s[0])))
    others = sorted((s for s in scored if not s[1].fits), key=lambda s: s[1].memory_bytes)
    if not fitting:
        plan, least = remedy.least(profile, cluster, base)
        raise DoesNotFit(
            f"no plan for {profile.name} fits {cluster.devices} x {cluster.device.name}",
            rule=remedy.rule(least),
            fix=remedy.change(profile, cluster, (plan, least), fleet or cluster),
        )
    ranked = fitting + others
    best = ranked[0][1]
    rows = tuple(
        Candidate(e.plan, e.step_seconds, e.memory_bytes, e.fits, reason(e, best, plan))
        for plan, e in ranked
    )
    text = explain(profile, cluster, ranked)
    return Answer(rows, time.perf_counter() - start, text), {e.plan: e for _, e in ranked}


def _effort(plan: Plan) -> tuple[int, ...]:
    """Of plans that are equally fast the one with fewer ranks, micro-batches and less sharding stands first."""
    split = plan.ranks // plan.dp
    return plan.ranks, split, plan.micro, plan.zero, plan.shards


def default_precision(cluster: Cluster) -> str:
    """bf16 where a GPU has it, else fp32."""
    return "bf16" if cluster.device.kind == "cuda" and "bf16" in cluster.device.peak else "fp32"
