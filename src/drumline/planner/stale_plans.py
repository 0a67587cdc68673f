"""Plans whose replicas do not wait for each other (`--allow-stale`): candidates, and whether one of them is chosen.

They are approximate: gradients of older weights, dropped gradients, or weights that drift apart. They need more steps
to the same loss, by a number that no cost model knows. So one of them must save a stated share of the step to win, and
be faster than an exact plan that leaves the slow ranks out. `hogwild` is not offered: its replicas overwrite each
other, which suits sparse gradients; `--plan` prices it. Nor are pipelines that do not drain: they save a bubble,
which more micro-batches of an exact schedule fill, too, and they gain nothing where a rank is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import ConfigDict

from ..clusters import Cluster
from ..core.units import format_seconds
from ..costs import cost_model
from ..costs.model import CostModel
from ..models.profile import Profile
from ..plans import Plan
from ..plans.combinations import refusal
from ..plans.sync_caveats import sync_caveat
from .objectives import LEAST_SAVING, Scored, value
from .space import powers, recomputations, replicas

WORDS = ("async", "stale:4", "local:8", "gossip")
"""Values of `sync` that are offered, and `server` with one backup worker."""

WORTH_A_SERVER = 0.02
"""Share of the step that twice as many servers must save: each is one more process."""


@dataclass(frozen=True, slots=True)
class StaleVerdict:
    """The fastest plan whose replicas do not wait, against the best exact one."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    chosen: bool
    plan: str = ""
    """Empty where none fits."""
    step_seconds: float = 0.0
    """Per batch of samples that count."""
    exact_plan: str = ""
    """Empty where no exact plan fits."""
    exact_seconds: float = 0.0
    exact_waiting: float = 0.0
    """Seconds of it in which ranks wait for slower ones."""
    smaller_plan: str = ""
    """The exact plan without the slow ranks; empty where none are slow, or it does not fit."""
    smaller_seconds: float = 0.0
    staleness: float = 0.0
    caveat: str = ""
    """The property that the plan gives up, and the remedy."""
    sentence: str = ""
    """The verdict with its numbers."""

    @property
    def saving(self) -> float:
        """Share of the exact step that the plan saves; negative if it is slower."""
        return 1 - self.step_seconds / self.exact_seconds if self.exact_seconds else 0.0


def stale_plans(profile: Profile, cluster: Cluster, base: Plan, model: CostModel) -> Iterator[Scored]:
    """Plans on all devices: each word, in the fewest micro-batches that fit, with as many servers as pay off."""
    dp = next(replicas(profile, cluster.devices))
    if dp == 1:
        return
    for plan in (*(replace(base, dp=dp, sync=word) for word in WORDS), replace(base, dp=dp, sync="server", backup=1)):
        before = float("inf")
        for servers in powers(dp) if plan.has_coordinator else (1,):
            sized = _that_fits(replace(plan, servers=servers), profile, model)
            if sized is None or refusal(sized):
                continue
            e = model.estimate(sized)
            if e.step_seconds > (1 - WORTH_A_SERVER) * before:
                break
            before = e.step_seconds
            yield sized, e


def _that_fits(plan: Plan, profile: Profile, model: CostModel) -> Plan | None:
    """The plan with the fewest micro-batches, then the least recomputation, that fits."""
    for recompute in recomputations(profile):
        for micro in powers(profile.batch_size // plan.slices):
            sized = replace(plan, micro=micro, recompute=recompute)
            if model.fits(sized):
                return sized
    return None


def is_stale(plan: Plan) -> bool:
    """Whether its replicas, or its stages, do not wait for each other, at a price."""
    return bool(sync_caveat(plan))


def decide(profile: Profile, cluster: Cluster, fitting: Sequence[Scored]) -> tuple[list[Scored], StaleVerdict]:
    """The plans that fit, best first, with an approximate one in front only if it is chosen; and the verdict."""
    stale = min((s for s in fitting if is_stale(s[0])), key=lambda s: value(s[0], s[1], "time"), default=None)
    exact = next((s for s in fitting if not is_stale(s[0])), None)
    if stale is None:
        text = "No plan whose replicas do not wait for each other runs here: there is one replica, or none fits."
        return list(fitting), StaleVerdict(False, sentence=text)
    plan, e = fitting[0] if is_stale(fitting[0][0]) else stale
    facts = StaleVerdict(
        chosen=is_stale(fitting[0][0]),
        plan=str(plan),
        step_seconds=value(plan, e, "time"),
        staleness=e.staleness,
        caveat=sync_caveat(plan),
    )
    if exact is None:
        return list(fitting), replace(facts, sentence=_sentence(facts, cluster))
    waiting = exact[1].parts.get("waiting", 0.0)
    facts = replace(facts, exact_plan=str(exact[0]), exact_seconds=exact[1].step_seconds, exact_waiting=waiting)
    # the best exact plan may be a pipeline, which hides a part of the slow rank but cannot leave it out
    candidates = (_without_slow_ranks(profile, cluster, p) for p, _ in fitting if not is_stale(p))
    smaller = next((s for s in candidates if s is not None), None)
    if smaller is not None:
        facts = replace(facts, smaller_plan=str(smaller[0]), smaller_seconds=smaller[1].step_seconds)
    order = list(fitting)
    if facts.chosen and smaller is not None and smaller[1].step_seconds <= facts.step_seconds:
        facts = replace(facts, chosen=False)
        order = [*(s for s in fitting if not is_stale(s[0])), *(s for s in fitting if is_stale(s[0]))]
    return order, replace(facts, sentence=_sentence(facts, cluster))


def _without_slow_ranks(profile: Profile, cluster: Cluster, plan: Plan) -> Scored | None:
    """The exact plan on fewer replicas, none of them slow."""
    slow = sum(f > 1.0 for f in cluster.step_times.factors(plan.ranks))
    if not slow or plan.splits_model or plan.shard or slow >= plan.dp:
        return None
    even = replace(cluster, step_times=cluster.step_times.without_slow_ranks())
    smaller = replace(plan, dp=plan.dp - slow, zero=plan.zero if plan.dp - slow > 1 else 0)
    e = cost_model(profile, even, plan.precision).estimate(smaller)
    return (smaller, e) if e.fits else None


def _sentence(v: StaleVerdict, cluster: Cluster) -> str:
    """The verdict in words."""
    own, exact = format_seconds(v.step_seconds), format_seconds(v.exact_seconds)
    ranks = str(cluster.step_times)
    if v.chosen and not v.exact_plan:
        return f"Its replicas do not wait for each other; no exact plan fits. It is {v.caveat}."
    if v.chosen:
        waiting = f", {format_seconds(v.exact_waiting)} of it waiting ({ranks})" if v.exact_waiting else f" ({ranks})"
        times = v.exact_seconds / v.step_seconds
        left_out = f"; without the slow ranks, {v.smaller_plan} takes {format_seconds(v.smaller_seconds)}"
        return (
            f"Its replicas do not wait for each other: the best exact plan, {v.exact_plan}, takes {exact}, {times:.2g} "
            f"times as long{waiting}{left_out if v.smaller_plan else ''}. It is {v.caveat}."
        )
    change = -v.saving
    compared = f"{abs(100 * change):.{0 if abs(change) >= 0.01 else 1}f}% {'less' if change < 0 else 'more'} than"
    if abs(change) < 1e-3:
        compared = "as long as"
    why = f"it is approximate and needs more steps, so it would have to save {100 * LEAST_SAVING:.0f}%"
    if v.smaller_plan and v.smaller_seconds <= v.step_seconds:
        why = (
            f"it is approximate, and an exact plan without the slow ranks is faster: {v.smaller_plan} takes "
            f"{format_seconds(v.smaller_seconds)}"
        )
    return (
        f"Replicas that do not wait for each other are not chosen: the fastest such plan, {v.plan}, takes {own} per "
        f"batch, {compared} the {exact} of the best exact plan ({ranks}); {why}."
    )
