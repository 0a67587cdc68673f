"""What `drumline plan` answers beside its table, if asked: each a key of the JSON document and something to print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError, PlanError

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..costs import Estimate
    from ..models import Profile
    from ..plans import Plan


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that ask for more than the best plan."""

    fit: bool = False
    what_if: Sequence[str] = ()
    scaling: bool = False
    pareto: bool = False
    formula: bool = False
    tokens: str | None = None
    epochs: float | None = None
    samples: int | None = None
    price: float = 0.0
    mtbf: str | None = None
    tuned: int | None = None

    def check(self) -> None:
        """Refuse what cannot be, before anything is traced or measured."""
        for name, value in (("--epochs", self.epochs), ("--samples", self.samples), ("--tuned-batch", self.tuned)):
            if value is not None and not 0 < value < 1e15:
                raise InputError(f"{name} {value:g}", rule="more than 0")
        if not 0 <= self.price < 1e9:
            raise InputError(f"--price {self.price:g}", rule="not negative, for one device and hour")
        if self.tokens is not None and self.epochs is not None:
            raise InputError("--tokens and --epochs", rule="both say how long the training is", fix="one of them")
        self.token_count()
        self.failure_seconds()

    def token_count(self) -> float:
        """`13T`, `300B`, `1.5e12`."""
        from ..core.units import parse_count

        try:
            found = parse_count(self.tokens) if self.tokens is not None else 0.0
        except ValueError as e:
            raise InputError(f"--tokens {self.tokens}", rule=str(e)) from None
        if self.tokens is not None and found <= 0:
            raise InputError(f"--tokens {self.tokens}", rule="more than 0")
        return found

    def failure_seconds(self) -> float:
        """The mean time between failures; a day where it was not given."""
        from ..core.units import parse_seconds

        try:
            found = parse_seconds(self.mtbf or "24h")
        except ValueError as e:
            raise InputError(f"--mtbf {self.mtbf}", rule=str(e)) from None
        if found <= 0:
            raise InputError(f"--mtbf {self.mtbf}", rule="more than no time")
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned, and for which machines."""

    target: str
    profile: Profile
    own_batch: int
    """Samples a step before `--batch`."""
    machines: Cluster
    fleet: Cluster
    precision: str | None
    objective: str


@dataclass(frozen=True, slots=True)
class Section:
    """One answer."""

    key: str
    value: Any
    """For the JSON document."""
    shown: Callable[[int], Any]
    """Width of the terminal -> what is printed; nothing where it is empty."""


def given_plan(text: str, question: Question) -> Plan:
    """A plan of the user's, if these machines and the engine can run it for this batch."""
    from ..plans import check
    from .common import plan_of

    plan, have, batch = plan_of(text), question.machines.devices, question.profile.batch_size
    if question.precision is not None and "precision" not in plan.table():
        plan = replace(plan, precision=question.precision)
    check(plan)
    if plan.ranks > have:
        raise PlanError(
            f"{plan} needs {plan.ranks} devices",
            rule=f"{plan.equation} = {plan.ranks} > {have} devices",
            fix=f"--devices {plan.ranks}, or a smaller plan",
        )
    if plan.dp * plan.micro > batch:
        raise PlanError(
            f"{plan} for batches of {batch}",
            rule=f"every replica has a sample in every micro-batch: dp({plan.dp}) x micro({plan.micro}) = "
            f"{plan.dp * plan.micro} > {batch} samples",
            fix=f"--batch {plan.dp * plan.micro}, or fewer replicas or micro-batches",
        )
    return plan


def fit_section(question: Question, plan: Plan | None) -> Section:
    """Will it fit, the largest batch, the single change."""
    from ..costs.tensor import tokens_of
    from ..models import zoo
    from ..planner import default_precision
    from ..planner.fit import first_plan, fit
    from ..reports.plans import fit_lines

    q, profile = question, question.profile
    shorter = None
    if zoo.is_zoo(q.target) and tokens_of(profile):
        shorter = lambda tokens: zoo.profile(q.target, batch_size=profile.batch_size, sequence=tokens)  # noqa: E731
    plan = plan or first_plan(profile, q.machines, q.precision or default_precision(q.machines))
    found = fit(profile, q.machines, plan, fleet=q.fleet, tokens=tokens_of(profile), shorter=shorter)
    return Section("fit", asdict(found), lambda _: fit_lines(found, profile.batch_size))


def sections(
    asked: Asked, question: Question, plan: Plan, e: Estimate, ranked: Sequence[tuple[Plan, Estimate]]
) -> Iterator[Section]:
    """Everything that was asked for, about the best plan (or the given one) and the others."""
    from ..planner.curve import scaling
    from ..planner.formula import formula
    from ..planner.objectives import pareto
    from ..planner.what_if import compare
    from ..reports import plans as show

    q = question
    if asked.pareto:
        front = pareto(ranked)
        rows = [{"plan": str(p), "step_seconds": x.step_seconds, "memory_bytes": x.memory_bytes} for p, x in front]
        yield Section("pareto", rows, lambda _: show.pareto_lines(front))
    if asked.formula:
        terms = formula(q.profile, plan, e, q.machines)
        yield Section("formula", [asdict(t) for t in terms], lambda _: show.formula_lines(terms))
    if asked.what_if:
        both = compare(q.profile, q.machines, q.fleet, asked.what_if, precision=q.precision, objective=q.objective)
        yield Section("what_if", asdict(both), lambda _: show.compared_table(both))
    if asked.scaling:
        points = scaling(q.profile, q.machines, precision=q.precision)
        yield Section("scaling", [asdict(p) for p in points], lambda width: show.scaling_chart(points, width))
    yield from _whole_training(asked, q, plan, e)


def _whole_training(asked: Asked, q: Question, plan: Plan, e: Estimate) -> Iterator[Section]:
    from ..planner.training import rates, saving, training
    from ..reports.plans import saving_lines, training_lines

    whole = asked.tokens is not None or asked.epochs is not None
    samples = asked.samples or (_dataset_size(q.target) if asked.epochs is not None else 0)
    if whole:
        found = training(
            q.profile,
            plan,
            e,
            tokens=asked.token_count(),
            epochs=asked.epochs or 0.0,
            samples=samples,
            price=asked.price,
        )
        yield Section("training", asdict(found), lambda _: training_lines(found, asked.price))
    elif asked.price:
        once = e.step_seconds * plan.ranks / 3600 * asked.price
        yield Section("price_of_1000_steps", 1000 * once, lambda _: f"1,000 steps cost {1000 * once:,.2f}")
    if whole or asked.mtbf is not None:
        safe = saving(q.profile, plan, e, q.machines, asked.failure_seconds())
        yield Section("saving", asdict(safe), lambda _: saving_lines(safe))
    rate = rates(q.profile, asked.tuned or q.own_batch, samples)
    if str(rate):
        yield Section("rates", asdict(rate), lambda _: f"learning rate: {rate}")


def _dataset_size(target: str) -> int:
    """Samples of a job's dataset; 0 where it is no job."""
    from ..core.job import Job, guard
    from .common import is_job

    if not is_job(target):
        return 0
    return len(guard(Job.load(target).data, f"{target}: data()"))
