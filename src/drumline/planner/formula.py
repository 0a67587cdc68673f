"""The formula of a step with its values: every term, and the numbers of the model and the machine behind it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from ..clusters import Cluster
from ..core.units import format_bytes, format_count, format_rate, format_seconds
from ..costs import Estimate, cost_model
from ..costs.data_parallel_comm import (
    CollectiveMessage,
    gradient_collectives,
    layer_collectives,
    parameter_collectives,
    reduces_every_micro_batch,
)
from ..costs.layer_time import largest_micro_batch
from ..costs.model_split import split_model
from ..costs.straggling import waiting_words
from ..models.profile import Profile
from ..plans import Plan
from ..theory.alpha_beta import level
from .worker_formula import worker_terms


@dataclass(frozen=True, slots=True)
class FormulaTerm:
    """One quantity: its formula with numbers, and its value."""

    name: str
    formula: str
    value: float
    unit: str
    """`s` or `B`."""

    def __str__(self) -> str:
        shown = format_seconds(self.value) if self.unit == "s" else format_bytes(self.value)
        return f"{self.name} = {self.formula} = {shown}"


def formula(profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> list[FormulaTerm]:
    """Step time, its parts, its messages and its memory. Symbols are those of docs/notation.md."""
    times = [(k, v) for k, v in e.parts.items() if v]
    sizes = [(k, v) for k, v in e.memory_parts.items() if v]
    total = " + ".join(f"{k} {format_seconds(v)}" for k, v in times)
    operators = _OperatorTerms(profile, plan, e, cluster)
    workers = plan.sync != "allreduce"
    fitted = None if workers else cost_model(profile, cluster, plan.precision).time_terms(plan, e)
    if workers:
        passes = [(k, v) for k, v in times if k in ("forward", "backward")]
        seconds = [FormulaTerm(k, operators.part(k), v, "s") for k, v in passes]
        seconds += [FormulaTerm(*term, "s") for term in worker_terms(profile, plan, e, cluster)]
    elif fitted is not None:
        seconds = [FormulaTerm(term.name, term.formula, term.seconds, "s") for term in fitted]
    else:
        seconds = [*(FormulaTerm(k, operators.part(k), v, "s") for k, v in times), *operators.messages()]
    return [
        FormulaTerm("step", total, e.step_seconds, "s"),
        *([FormulaTerm("before correction", e.correction, e.raw_seconds, "s")] if e.raw_seconds else []),
        *seconds,
        FormulaTerm("hidden", "communication behind compute", e.hidden_seconds, "s"),
        FormulaTerm("memory", " + ".join(f"{k} {format_bytes(v)}" for k, v in sizes), e.memory_bytes, "B"),
        *(FormulaTerm(f"memory of {k}", operators.memory(k), v, "B") for k, v in sizes),
    ]


class _OperatorTerms:
    """Formulas of one plan under the operator model."""

    def __init__(self, profile: Profile, plan: Plan, e: Estimate, cluster: Cluster) -> None:
        self._profile, self._plan, self._e, self._cluster = profile, plan, e, cluster.with_active_ranks(plan.ranks)
        self._local = split_model(profile, plan) if plan.splits_model else None
        self._mine = self._local.profile if self._local is not None else profile
        self._n = largest_micro_batch(profile.batch_size, plan)

    def part(self, part: str) -> str:
        """Formula of one part of the step."""
        plan, m = self._plan, self._plan.micro
        if part in ("forward", "backward"):
            return self._compute(part)
        text = {
            "recompute": f"{m} micro-batches x the forward of what was not kept (recompute={plan.recompute})",
            "bubble": f"{plan.schedule} with {plan.pp} x {plan.virtual} stages and {m} micro-batches, played action by "
            "action, less the compute of the busiest rank",
            "communication": f"messages {format_seconds(self._e.parts['communication'] + self._e.hidden_seconds)} - "
            f"hidden {format_seconds(self._e.hidden_seconds)}",
            "optimizer": self._update(),
            "overhead": f"{plan.ranks} ranks agree on the loss and read it before the next step",
            "waiting": f"{waiting_words(plan)} ({self._cluster.step_times})",
        }
        return text.get(part, "")

    def _compute(self, phase: str) -> str:
        plan, n, e = self._plan, self._n, self._e
        stage = f" / {plan.pp} stages, the busiest" if plan.pp > 1 else ""
        flops = self._mine.flops(phase).at(n)
        seconds = e.parts.get(phase, 0.0) * (plan.dp // plan.slices)  # of whole batches, dp are computed at once
        rate = plan.micro * flops / plan.pp / seconds if seconds else 0.0
        return (
            f"{plan.micro} x sum over operators of max(flops / rate, bytes / bandwidth, launch) for n = ceil(ceil("
            f"{self._profile.batch_size} / {plan.micro}) / {plan.slices}) = {n} samples: "
            f"{format_count(flops, 'FLOP')}{stage} at {format_count(rate, 'FLOP/s')}"
        )

    def _update(self) -> str:
        profile, plan = self._mine, self._plan
        share = profile.trained / plan.shards / plan.pp
        bandwidth = format_rate(self._cluster.device.bandwidth)
        where = "host memory" if plan.offload != "none" else f"device memory at {bandwidth}"
        return f"{format_count(share)} parameters x {profile.optimizer_bytes:g} bytes read and written, in {where}"

    def messages(self) -> list[FormulaTerm]:
        """Messages by collective, hidden or exposed."""
        plan, profile, cluster = self._plan, self._mine, self._cluster
        if plan.ranks == 1:
            return []
        reductions = plan.micro if reduces_every_micro_batch(plan) else 1
        every = [x for around in layer_collectives(profile, plan, cluster) for x in around if x is not None]
        gathers = 2 if plan.zero == 3 else 1  # before the forward, and again before the backward
        terms: list[FormulaTerm] = []
        for kind, times in (
            ("all_gather", gathers * reductions),
            ("reduce_scatter", reductions),
            ("all_reduce", reductions),
        ):
            terms += self._collective(kind, [x for x in every if x.collective == kind], times, "during the step")
        if plan.pp == 1:
            once = [*gradient_collectives(profile, plan, cluster), *parameter_collectives(profile, plan, cluster)]
            for kind in ("reduce_scatter", "all_reduce", "all_gather"):
                terms += self._collective(kind, [x for x in once if x.collective == kind], 1, "around the update")
        return terms + self._layer_messages()

    def _collective(self, kind: str, some: list[CollectiveMessage], times: int, when: str) -> list[FormulaTerm]:
        if not some:
            return []
        size, seconds = sum(x.bytes for x in some), sum(x.seconds for x in some)
        p = self._plan.dp if kind == "all_reduce" and not self._plan.zero else self._plan.shards
        text = f"{times} x {len(some)} messages {when}, {format_bytes(size)} in total, over {p} ranks"
        return [FormulaTerm(kind, text + self._ring(kind, p), times * seconds, "s")]

    def _ring(self, kind: str, p: int) -> str:
        """The closed form of a ring, where one link connects the ranks and nothing was measured."""
        link = level(p, self._cluster) if p <= self._cluster.devices else None
        if p < 2 or self._cluster.table(kind, p) is not None:
            return " (as measured)" if p > 1 else ""
        if link is None:
            return " (inside the nodes, then between them)"
        k = "2" if kind == "all_reduce" else ""
        return (
            f": each {k}(p-1) alpha + {k}(p-1)/p m beta, alpha {format_seconds(link.alpha)}, "
            f"beta 1 / ({format_rate(link.bandwidth)})"
        )

    def _layer_messages(self) -> list[FormulaTerm]:
        """Messages between the parts of split layers, in one step."""
        if self._local is None:
            return []
        counts: Counter[tuple[str, str]] = Counter()
        sizes: defaultdict[tuple[str, str], float] = defaultdict(float)
        for x, messages in zip(self._local.profile.layers, self._local.messages, strict=True):
            for message in messages:
                key = message.axis, message.collective
                counts[key] += x.repeats
                sizes[key] += message.size(self._n, self._plan.precision, self._profile) * x.repeats
        plan = self._plan
        return [
            FormulaTerm(
                f"{axis} {kind}",
                f"{plan.micro} x {count} messages of the layers, bytes per step and rank",
                plan.micro * sizes[axis, kind] / plan.pp,
                "B",
            )
            for (axis, kind), count in counts.items()
        ]

    def memory(self, part: str) -> str:
        """Formula of one part of the memory."""
        plan, profile = self._plan, self._mine
        width, over = profile.parameter_bytes, f" / {plan.pp} stages, the fullest" if plan.pp > 1 else ""
        p, t = format_count(profile.parameters), format_count(profile.trained)
        shared = {k: f" / {plan.shards} shards" if plan.zero >= k and plan.shards > 1 else "" for k in (1, 2, 3)}
        text = {
            "parameters": f"{p} x {width} bytes{shared[3]}{over} + buffers and copies in {plan.precision}",
            "gradients": f"{t} x {width} bytes{shared[2]}{over}, those alive at the peak",
            "optimizer": f"{t} x {profile.state_per_parameter:g} bytes{shared[1]}{over}",
            "activations": f"activations of {self._n} samples (recompute={plan.recompute}), and temporaries",
            "communication": "message buffers and gathered parameters",
            "workspace": "workspace of the libraries",
        }
        return text.get(part, "")
