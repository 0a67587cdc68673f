"""The search: every candidate scored, the best first, each loser with its reason in numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..clusters import Cluster
from ..core.errors import DoesNotFit, PlanError
from ..costs import Estimate
from ..models.profile import Op, Profile
from ..plans import Plan
from . import remedy
from .answer import Answer, Candidate
from .explain import alternatives, explain, reason
from .finalists import DryRun, passed
from .objectives import Scored, order
from .prices import by_fit, estimates, prices
from .space import candidates

if TYPE_CHECKING:
    from .prices import Prices

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
    by = prices(profile, cluster, base.precision)
    found = _offered(profile, cluster, base, by, score, objective, brief=brief)
    scored, interrupted = _scored(found.plans)
    interrupted = interrupted or found.interrupted
    if found.count and not interrupted and not any(e.fits for _, e in scored):
        scored.append(remedy.least(profile, cluster, base))  # what comes nearest, should the quick count have missed it
    fitting = passed(sorted((s for s in scored if s[1].fits), key=best_first), dry_run)
    others = sorted((s for s in scored if not s[1].fits), key=lambda s: s[1].memory_bytes)
    if not fitting:
        if interrupted:
            raise KeyboardInterrupt
        if not scored:
            raise PlanError("there is no candidate", rule=f"batch {profile.batch_size}, {cluster.devices} devices")
        raise _nothing_fits(profile, cluster, base, fleet or cluster, brief)
    ranked = fitting + others
    best = ranked[0][1]
    rows = tuple(
        Candidate(e.plan, e.step_seconds, e.memory_bytes, e.fits, reason(e, best, plan, objective))
        for plan, e in ranked
    )
    families = () if brief else alternatives(profile, cluster, ranked, objective, turns=turns)
    count = found.count or len(ranked)
    unfit = found.unfit if found.count else len(others)
    told = f"{unfit:,} of {count:,}" if unfit else ""
    text = explain(profile, cluster, ranked, families, objective, turns=turns, unfit=told)
    answer = Answer(rows, time.perf_counter() - start, text, objective, families, interrupted, count, found.says)
    return answer, {e.plan: e for _, e in ranked}


@dataclass(frozen=True, slots=True)
class _Offered:
    """The plans to look at, with their estimates, as they come."""

    plans: Iterator[Scored]
    count: int = 0
    """Of the whole space, where all of it was scored before; else 0."""
    unfit: int = 0
    """How many of them do not fit."""
    says: str = ""
    """Whose price it is."""
    interrupted: bool = False


def _offered(
    profile: Profile, cluster: Cluster, base: Plan, by: Prices, score: Score | None, objective: str, *, brief: bool
) -> _Offered:
    """The finalists of the whole space, where the closed form can price all of it at once; else every candidate."""
    sparing = objective == "memory"
    fitted = by_fit(by)
    if score is None and fitted is not None and fitted.whole:
        from .shortlist import Shortlist  # here, because they bring numpy along
        from .whole import scored_space

        space = scored_space(profile, cluster, base, fitted)
        finalists = Shortlist(space, fitted, base, objective).scored(cluster, sparing=sparing, brief=brief)
        return _Offered(finalists, len(space.seconds), space.unfit, fitted.says, space.interrupted)
    each = candidates(profile, cluster, base, by.fits, sparing=sparing)
    if score is not None:
        return _Offered((plan, score(profile, plan, cluster)) for plan in each)
    plans, same = itertools.tee(each)
    return _Offered(zip(plans, estimates(by, same), strict=True), says=fitted.says if fitted is not None else "")


def _shared(profile: Profile) -> Profile:
    """Equal layers of a trace have equal operators in tuples of their own; as one tuple they are priced once."""
    known: dict[tuple[Op, ...], tuple[Op, ...]] = {}
    return replace(profile, layers=tuple(replace(x, ops=known.setdefault(x.ops, x.ops)) for x in profile.layers))


def _scored(offered: Iterable[Scored]) -> tuple[list[Scored], bool]:
    """Every candidate with its estimate, and whether somebody stopped it before the end."""
    scored: list[Scored] = []
    try:
        for one in offered:
            scored.append(one)
    except KeyboardInterrupt:
        return scored, True
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
