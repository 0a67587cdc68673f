"""The search: every candidate scored, the best first, each loser with its reason in numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from ..cluster import Cluster
from ..cost import Estimate, Steps
from ..errors import DoesNotFit, PlanError
from ..model.profile import Op, Profile
from ..plan import Plan
from . import remedy
from .answer import Answer, Candidate
from .explain import alternatives, explain, reason
from .finalists import DryRun, passed
from .objectives import Scored, order
from .space import candidates

Score = Callable[[Profile, Plan, Cluster], Estimate]


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    precision: str | None = None,
    score: Score | None = None,
    fleet: Cluster | None = None,
    objective: str = "time",
    turns: bool = False,
    brief: bool = False,
    dry_run: DryRun | None = None,
) -> tuple[Answer, dict[str, Estimate]]:
    """Score every plan for the cluster; the answer, and the estimates behind it by plan.

    `fleet` is what the cluster was taken from: when nothing fits, more of it may be the way out. Ctrl-C ends the search
    early: what has been scored until then is the answer, and it says so. With `turns` it also says what would have to
    change for other families of plans to win, by closed form. `brief` leaves out all that is not about the best.
    `dry_run` looks at the finalists: those that fail there are not proposed.
    """
    start = time.perf_counter()
    best_first = order(objective)
    profile = _shared(profile)
    base = Plan(precision=precision or default_precision(cluster))
    steps = Steps(profile, cluster, base.precision)
    priced = score or (lambda _, plan, __: steps.estimate(plan))
    offered = candidates(profile, cluster, base, steps.fits, sparing=objective == "memory")
    scored, interrupted = _scored(profile, cluster, offered, priced)
    fitting = passed(sorted((s for s in scored if s[1].fits), key=best_first), dry_run)
    others = sorted((s for s in scored if not s[1].fits), key=lambda s: s[1].memory_bytes)
    if not fitting:
        if interrupted:
            raise KeyboardInterrupt
        raise _nothing_fits(profile, cluster, base, fleet or cluster, brief)
    ranked = fitting + others
    best = ranked[0][1]
    rows = tuple(
        Candidate(e.plan, e.step_seconds, e.memory_bytes, e.fits, reason(e, best, plan, objective))
        for plan, e in ranked
    )
    families = () if brief else alternatives(profile, cluster, ranked, objective, turns=turns)
    text = explain(profile, cluster, ranked, families, objective, turns=turns)
    answer = Answer(rows, time.perf_counter() - start, text, objective, families, interrupted)
    return answer, {e.plan: e for _, e in ranked}


def _shared(profile: Profile) -> Profile:
    """Equal layers of a trace have equal operators in tuples of their own; as one tuple they are priced once."""
    known: dict[tuple[Op, ...], tuple[Op, ...]] = {}
    return replace(profile, layers=tuple(replace(x, ops=known.setdefault(x.ops, x.ops)) for x in profile.layers))


def _scored(
    profile: Profile, cluster: Cluster, offered: Iterable[Plan], score: Score
) -> tuple[list[Scored], bool]:
    """Every candidate with its estimate, and whether somebody stopped it before the end."""
    scored: list[Scored] = []
    try:
        for plan in offered:
            scored.append((plan, score(profile, plan, cluster)))
    except KeyboardInterrupt:
        return scored, True
    if not scored:
        raise PlanError("there is no candidate", rule=f"batch {profile.batch_size}, {cluster.devices} devices")
    return scored, False


def _nothing_fits(profile: Profile, cluster: Cluster, base: Plan, fleet: Cluster, brief: bool) -> DoesNotFit:
    plan, least = remedy.least(profile, cluster, base)
    return DoesNotFit(
        f"no plan for {profile.name} fits {cluster.devices} x {cluster.device.name}",
        rule=remedy.rule(profile, least),
        fix="" if brief else remedy.change(profile, cluster, (plan, least), fleet),
    )


def default_precision(cluster: Cluster) -> str:
    """bf16 where a GPU has it, else fp32."""
    return "bf16" if cluster.device.kind == "cuda" and "bf16" in cluster.device.peak else "fp32"
