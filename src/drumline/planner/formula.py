"""The closed form of a step with its values: what is added up, from which numbers of the model and of the machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..clusters import Cluster
from ..core.units import format_bytes, format_count, format_rate, format_seconds
from ..costs import Estimate
from ..costs.divide import divide
from ..costs.layers import largest_share
from ..costs.traffic import Message, after_backward, after_update, messages, reduced_often
from ..models.profile import Profile
from ..plans import Plan
from ..theory.alpha_beta import level
from .prices import by_fit, prices


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity: how it comes about, with the numbers put in."""

    name: str
    formula: str
    value: float
    unit: str
    """`s` or `B`."""

    def __str__(self) -> str:
        shown = format_seconds(self.value) if self.unit == "s" else format_bytes(self.value)
        return f"{self.name} = {self.formula} = {shown}"


def formula(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> list[Term]:
    """The step's time, its parts, its messages and its memory. Symbols are those of docs/notation.md."""
    times = [(k, v) for k, v in e.parts.items() if v]
    sizes = [(k, v) for k, v in e.memory_parts.items() if v]
    total = " + ".join(f"{k} {format_seconds(v)}" for k, v in times)
    parts = _Parts(profile, plan, e, cluster)
    fitted = by_fit(prices(profile, cluster, plan.precision))
    words = None
    if fitted is not None and e.origin == fitted.origin:
        from .formula_fitted import FittedWords  # here, because it brings numpy along

        words = FittedWords(profile, plan, e, fitted)
    sent = parts.sent() if words is None else [Term(k, text, v, "s") for k, text, v in words.sent()]
    return [
        Term("step", total, e.step_seconds, "s"),
        *([Term("before correction", e.correction, e.raw_seconds, "s")] if e.raw_seconds else []),
        *(Term(k, (words or parts).of(k), v, "s") for k, v in times),
        *sent,
        Term("hidden", "messages that run behind computation", e.hidden_seconds, "s"),
        Term("memory", " + ".join(f"{k} {format_bytes(v)}" for k, v in sizes), e.memory_bytes, "B"),
        *(Term(f"memory of {k}", parts.held(k), v, "B") for k, v in sizes),
    ]


class _Parts:
    """The words of each part for one plan."""

    def __init__(self, profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> None:
        self._profile, self._plan, self._e, self._cluster = profile, plan, e, cluster.with_active_ranks(plan.ranks)
        self._local = divide(profile, plan) if plan.splits_model else None
        self._mine = self._local.profile if self._local is not None else profile
        self._n = largest_share(profile.batch_size, plan)

    def of(self, part: str) -> str:
        """Of one part of the step."""
        plan, m = self._plan, self._plan.micro
        if part in ("forward", "backward"):
            return self._work(part)
        words = {
            "recompute": f"{m} micro-batches x the forward of what was not kept (recompute={plan.recompute})",
            "bubble": f"the order {plan.schedule} of {plan.pp} x {plan.virtual} stages and {m} micro-batches, played, "
            "less what the busiest rank computes",
            "communication": f"messages {format_seconds(self._e.parts['communication'] + self._e.hidden_seconds)} - "
            f"hidden {format_seconds(self._e.hidden_seconds)}",
            "optimizer": self._update(),
            "overhead": f"the loss is agreed on by {plan.ranks} ranks and read, before the next step begins",
        }
        return words.get(part, "")

    def _work(self, phase: str) -> str:
        plan, n, e = self._plan, self._n, self._e
        stage = f" / {plan.pp} stages, the busiest" if plan.pp > 1 else ""
        work = self._mine.flops(phase).at(n)
        rate = plan.micro * work / plan.pp / e.parts[phase] if e.parts.get(phase) else 0.0
        return (
            f"{plan.micro} x sum over layers of max(work / rate, bytes / bandwidth, launch) for n = ceil(ceil("
            f"{self._profile.batch_size} / {plan.micro}) / {plan.dp}) = {n} samples: "
            f"work {format_count(work, 'FLOP')}{stage} at {format_count(rate, 'FLOP/s')}"
        )

    def _update(self) -> str:
        profile, plan = self._mine, self._plan
        share = profile.trained / plan.shards / plan.pp
        where = "host memory" if plan.offload != "none" else f"{format_rate(self._cluster.device.bandwidth)} of memory"
        return f"{format_count(share)} numbers x {profile.optimizer_bytes:g} bytes read and written, from {where}"

    def sent(self) -> list[Term]:
        """Messages by kind, hidden or not."""
        plan, profile, cluster = self._plan, self._mine, self._cluster
        if plan.ranks == 1:
            return []
        often = plan.micro if reduced_often(plan) else 1
        every = [x for around in messages(profile, plan, cluster) for x in around if x is not None]
        gathers = 2 if plan.zero == 3 else 1  # parameters come before the forward, and again before the backward
        found: list[Term] = []
        for kind, k in (("all_gather", gathers * often), ("reduce_scatter", often), ("all_reduce", often)):
            found += self._kind(kind, [x for x in every if x.collective == kind], k, "during the step")
        once = [*after_backward(profile, plan, cluster), *after_update(profile, plan, cluster)] if plan.pp == 1 else []
        for kind in ("reduce_scatter", "all_reduce", "all_gather"):
            found += self._kind(kind, [x for x in once if x.collective == kind], 1, "around the update")
        return found + self._talks()

    def _kind(self, kind: str, some: list[Message], times: int, when: str) -> list[Term]:
        if not some:
            return []
        size, seconds = sum(x.bytes for x in some), sum(x.seconds for x in some)
        p = self._plan.dp if kind == "all_reduce" and not self._plan.zero else self._plan.shards
        return [
            Term(
                kind,
                f"{times} x {len(some)} messages {when}, {format_bytes(size)} in all, over {p} ranks"
                f"{self._ring(kind, p)}",
                times * seconds,
                "s",
            )
        ]

    def _ring(self, kind: str, p: int) -> str:
        """The closed form of a ring, where one link joins the ranks and nothing was measured."""
        link = level(p, self._cluster) if p <= self._cluster.devices else None
        if p < 2 or self._cluster.table(kind, p) is not None:
            return " (as measured)" if p > 1 else ""
        if link is None:
            return " (in the nodes, then between them)"
        k = "2" if kind == "all_reduce" else ""
        return (
            f": each {k}(p-1) alpha + {k}(p-1)/p m beta, alpha {format_seconds(link.alpha)}, "
            f"beta 1 / ({format_rate(link.bandwidth)})"
        )

    def _talks(self) -> list[Term]:
        """What the layers of a split model tell each other in one step."""
        if self._local is None:
            return []
        counts: Counter[tuple[str, str]] = Counter()
        sizes: dict[tuple[str, str], float] = {}
        for x, talks in zip(self._local.profile.layers, self._local.talks, strict=True):
            for t in talks:
                key = t.axis, t.collective
                counts[key] += x.repeats
                size = t.size(self._n, self._plan.precision, self._profile)
                sizes[key] = sizes.get(key, 0.0) + size * x.repeats
        plan = self._plan
        return [
            Term(
                f"{axis} {kind}",
                f"{plan.micro} x {count} messages of the layers, bytes a step and rank",
                plan.micro * sizes[axis, kind] / plan.pp,
                "B",
            )
            for (axis, kind), count in counts.items()
        ]

    def held(self, part: str) -> str:
        """Of one part of the memory."""
        plan, profile = self._plan, self._mine
        width, over = profile.parameter_bytes, f" / {plan.pp} stages, the fullest" if plan.pp > 1 else ""
        p, t = format_count(profile.parameters), format_count(profile.trained)
        shared = {k: f" / {plan.shards} shards" if plan.zero >= k and plan.shards > 1 else "" for k in (1, 2, 3)}
        words = {
            "parameters": f"{p} x {width} bytes{shared[3]}{over} + buffers and copies in {plan.precision}",
            "gradients": f"{t} x {width} bytes{shared[2]}{over}, those alive at the worst moment",
            "optimizer": f"{t} x {profile.state_per_parameter:g} bytes{shared[1]}{over}",
            "activations": f"what {self._n} samples keep (recompute={plan.recompute}), and temporaries",
            "communication": "buffers of messages, parameters that are gathered",
            "workspace": "what the libraries take",
        }
        return words.get(part, "")
