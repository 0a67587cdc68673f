"""The search: every candidate scored, best first, each loser with its reason in numbers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from ..clusters import Cluster
from ..core.errors import DoesNotFit, PlanError
from ..costs import Estimate, cost_model
from ..costs.model import CostModel
from ..models.profile import Profile, ProfiledOp
from ..plans import Plan
from . import suggestions
from .answer import Answer, Candidate
from .dry_runs import DryRun, drop_failed
from .explain import compare_families, explain, idle_devices, is_tied, reason, tie_reference, winner_reason
from .gradient_algorithms import choose_algorithms
from .objectives import Scored, best_first, simplest_first, tie_width, value
from .reserve import Reserve, reserve_bytes, with_reserve, without_reserve
from .space import candidates
from .stale_plans import StaleVerdict, decide, stale_plans

Score = Callable[[Profile, Plan, Cluster], Estimate]


def price(profile: Profile, cluster: Cluster, plan: Plan) -> Estimate:
    """Time and memory of one given plan, by the cost model that a search would use; nothing is searched."""
    return cost_model(profile, cluster, plan.precision).estimate(plan)


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    precision: str | None = None,
    score: Score | None = None,
    fleet: Cluster | None = None,
    objective: str = "time",
    break_even: bool = False,
    brief: bool = False,
    dry_run: DryRun | None = None,
    allow_stale: bool = False,
    reserve: Reserve = None,
) -> tuple[Answer, dict[str, Estimate]]:
    """Score every plan for the cluster; return the answer, and the estimates by plan notation.

    `fleet` is the cluster that `cluster` was taken from: when nothing fits, more of its devices may help. Ctrl-C ends
    the search early; the answer then has the candidates scored so far and says so. `break_even` adds what would have to
    change for other families of plans to become the fastest. `brief` leaves out all but the best. Of the best plans,
    those whose `dry_run` fails are not proposed. `allow_stale` also prices plans whose replicas do not wait for each
    other, and says what became of them. Of each device the `reserve` stays free; plans that need it are proposed only
    if no other fits.
    """
    start = time.perf_counter()
    best_first(objective)  # refuses unknown objectives
    profile = _with_shared_operators(profile)
    base = Plan(precision=precision or default_precision(cluster))
    kept = reserve_bytes(reserve, cluster)
    rank = partial(_rank, profile, base, score, objective, brief=brief, dry_run=dry_run, allow_stale=allow_stale)
    limited = without_reserve(cluster, kept)
    ranking = rank(limited, kept, hidden=True)
    if ranking is None and kept:
        limited = cluster
        ranking = rank(cluster, kept, hidden=False)
    if ranking is None:
        raise _nothing_fits(profile, cluster, base, fleet or cluster, brief)
    ranked, scoring = ranking.plans, ranking.scoring
    best = ranked[0][1]
    least = tie_reference(ranked, objective)
    rows = tuple(
        Candidate(
            plan,
            e.step_seconds,
            e.memory_bytes,
            e.fits,
            winner_reason(ranked, objective) if e is best else reason(e, best, plan, objective, least),
            tie=e is not best and is_tied(e, best, plan, objective, least),
            in_reserve=e.in_reserve,
        )
        for plan, e in ranked
    )
    compared = partial(compare_families, break_even=break_even, allow_stale=allow_stale)
    families = () if brief else compared(profile, limited, ranked, objective)
    count = scoring.count or len(ranked)
    too_many = scoring.too_large if scoring.count else sum(not e.fits or e.in_reserve for _, e in ranked)
    too_large = f"{too_many:,} of {count:,}" if too_many and not best.in_reserve else ""
    explained = partial(explain, break_even=break_even, too_large=too_large, stale=ranking.stale)
    text = explained(profile, limited, ranked, families, objective)
    seconds = time.perf_counter() - start
    idle = idle_devices(ranked, limited, objective)
    answer = Answer(
        rows, seconds, text, objective, families, ranking.interrupted, count, scoring.source, ranking.stale, kept, idle
    )
    return answer, {e.plan: e for _, e in ranked}


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Scored plans, best first: those that fit, those that fit only into the reserve, those that do not fit."""

    plans: list[Scored]
    scoring: _Scoring
    stale: StaleVerdict | None
    interrupted: bool


def _rank(
    profile: Profile,
    base: Plan,
    score: Score | None,
    objective: str,
    cluster: Cluster,
    kept: float,
    *,
    hidden: bool,
    brief: bool,
    dry_run: DryRun | None,
    allow_stale: bool,
) -> _Ranking | None:
    """Score every plan for the cluster; None if none fits. `hidden`: its memory is without the `kept` bytes."""
    order = best_first(objective)
    model = cost_model(profile, cluster, base.precision)
    scoring = _score_candidates(profile, cluster, base, model, score, objective, brief=brief)
    approximate = stale_plans(profile, cluster, base, model) if allow_stale else ()
    scored, interrupted = _collect(itertools.chain(scoring.plans, approximate))
    interrupted = interrupted or scoring.interrupted
    if scoring.count and not interrupted and not any(e.fits for _, e in scored):
        # the approximate memory may have missed the plan that comes closest
        scored.append(suggestions.closest_plan(profile, cluster, base))
    shown = [(plan, with_reserve(e, kept, hidden=hidden)) for plan, e in scored]
    tight = sorted((s for s in shown if s[1].in_reserve), key=order)
    fitting = sorted((s for s in shown if s[1].fits and not s[1].in_reserve), key=order)
    if not fitting and not hidden:
        fitting, tight = tight, []
    if not fitting and interrupted:
        raise KeyboardInterrupt
    if not fitting:
        return None
    fitting = drop_failed(fitting, dry_run)
    if score is None:
        chosen = choose_algorithms(_simplest(fitting, objective), model, cluster)
        fitting = sorted(((plan, with_reserve(e, kept, hidden=hidden)) for plan, e in chosen), key=order)
    fitting = _simplest(fitting, objective)
    stale = None
    if allow_stale:
        fitting, stale = decide(profile, cluster, fitting)
    others = sorted((s for s in shown if not s[1].fits), key=lambda s: s[1].memory_bytes)
    return _Ranking(fitting + tight + others, scoring, stale, interrupted)


def _simplest(fitting: list[Scored], objective: str) -> list[Scored]:
    """Plans, best first, with the simplest of those that tie before them."""
    width = tie_width(fitting[0][1].error)
    return [fitting[i] for i in simplest_first([(p, value(p, e, objective)) for p, e in fitting], objective, width)]


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Candidates with their estimates, as they are computed."""

    plans: Iterator[Scored]
    count: int = 0
    """Size of the whole space, where it was scored on arrays first; else 0."""
    too_large: int = 0
    """How many of them do not fit."""
    source: str = ""
    """`CostModel.source`."""
    interrupted: bool = False


def _score_candidates(
    profile: Profile,
    cluster: Cluster,
    base: Plan,
    model: CostModel,
    score: Score | None,
    objective: str,
    *,
    brief: bool,
) -> _Scoring:
    """The finalists of the whole space where the cost model scores it at once, else every candidate."""
    save_memory = objective == "memory"
    if score is None and model.scores_whole_space:
        from .finalists import Finalists, score_space  # needs numpy

        space = score_space(profile, cluster, base, model)
        finalists = Finalists(space, model, base, objective).scored(cluster, save_memory=save_memory, brief=brief)
        return _Scoring(finalists, len(space.seconds), space.too_large, model.source, space.interrupted)
    plans = candidates(profile, cluster, base, model, save_memory=save_memory)
    if score is not None:
        return _Scoring((plan, score(profile, plan, cluster)) for plan in plans)
    plans, same = itertools.tee(plans)
    return _Scoring(zip(plans, model.estimates(same), strict=True), source=model.source)


def _with_shared_operators(profile: Profile) -> Profile:
    """The profile with equal operator tuples of a trace as one object, so that each is priced once."""
    known: dict[tuple[ProfiledOp, ...], tuple[ProfiledOp, ...]] = {}
    return replace(profile, layers=tuple(replace(x, ops=known.setdefault(x.ops, x.ops)) for x in profile.layers))


def _collect(plans: Iterable[Scored]) -> tuple[list[Scored], bool]:
    """Every candidate with its estimate, and whether the user stopped it before the end."""
    scored: list[Scored] = []
    try:
        for one in plans:
            scored.append(one)
    except KeyboardInterrupt:
        return scored, True
    return scored, False


def _nothing_fits(
    profile: Profile, cluster: Cluster, base: Plan, fleet: Cluster, brief: bool
) -> DoesNotFit | PlanError:
    if next(candidates(profile, cluster, base), None) is None:
        return PlanError("there is no candidate", rule=f"batch {profile.batch_size}, {cluster.devices} devices")
    plan, closest = suggestions.closest_plan(profile, cluster, base)
    return DoesNotFit(
        f"no plan for {profile.name} fits {cluster.devices} x {cluster.device.name}",
        rule=suggestions.broken_rule(profile, closest),
        fix="" if brief else suggestions.suggest(profile, cluster, (plan, closest), fleet),
    )


def default_precision(cluster: Cluster) -> str:
    """bf16 where a GPU has it, else fp32."""
    return "bf16" if cluster.device.kind == "cuda" and "bf16" in cluster.device.peak else "fp32"
