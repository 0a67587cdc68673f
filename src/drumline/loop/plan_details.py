"""More questions about a plan: will it fit, what if, scaling, formula, the whole training's time and price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from .inputs import describe, is_job, load_job

if TYPE_CHECKING:
    from ..core.money import Money
    from ..planner.fit_report import FitReport
    from ..theory.checkpoint_interval import FailureRate
    from .inputs import ModelInput
    from .plan import PlanQuestion, PlanSearch


@dataclass(frozen=True, slots=True)
class PlanDetails:
    """Which details to compute besides the best plan."""

    fit: bool = False
    what_if: Sequence[str] = ()
    scaling: bool = False
    pareto: bool = False
    formula: bool = False
    tokens: str | None = None
    epochs: float | None = None
    samples: int | None = None
    price: str | float = "0"
    """Price of one device hour: `2.5`, `2.50EUR`, `$2.50`."""
    mtbf: str | None = None
    """`50000h` of one device, or `12h/run`."""
    tuned: int | None = None

    def check(self) -> None:
        """Refuse bad values before anything is traced or measured."""
        for name, value in (("--epochs", self.epochs), ("--samples", self.samples), ("--tuned-batch", self.tuned)):
            if value is not None and not 0 < value < 1e15:
                raise InputError(f"{name} {value:g}", rule="more than 0")
        self.money()
        if self.tokens is not None and self.epochs is not None:
            raise InputError("--tokens and --epochs", rule="both set the length of the training", fix="use one of them")
        self.token_count()
        self.failure_rate()

    def token_count(self) -> float:
        """`13T`, `300B`, `1.5e12`; 0 if none were given."""
        from ..core.units import parse_count

        try:
            tokens = parse_count(self.tokens) if self.tokens is not None else 0.0
        except ValueError as e:
            raise InputError(f"--tokens {self.tokens}", rule=str(e)) from None
        if self.tokens is not None and tokens <= 0:
            raise InputError(f"--tokens {self.tokens}", rule="more than 0")
        return tokens

    def failure_rate(self) -> FailureRate:
        """How often devices, or the run, fail."""
        from .checkpoints import parse_failures

        return parse_failures(self.mtbf)

    def money(self) -> Money:
        """The price of a device hour, in the user's currency."""
        from ..core.money import Money

        try:
            price = Money.parse(self.price)
        except ValueError as e:
            raise InputError(f"--price {self.price}", rule=str(e)) from None
        if not 0 <= price.amount < 1e9:
            raise InputError(f"--price {self.price}", rule="not negative, for one device and hour")
        return price


def fit_of(question: PlanQuestion) -> FitReport:
    """Whether the plan fits, the largest batch, and each single change that helps."""
    from ..costs.rank_model import tokens_of
    from ..models import zoo
    from ..planner import default_precision
    from ..planner.fit_report import first_plan, fit_report

    q, profile = question, question.profile
    shorten, name = None, describe(q.target)
    if isinstance(q.target, str) and zoo.is_zoo(name) and tokens_of(profile):

        def shorten(tokens: int) -> Any:
            return zoo.profile(name, batch_size=profile.batch_size, sequence=tokens)

    plan = q.given or first_plan(profile, q.cluster, q.precision or default_precision(q.cluster))
    return fit_report(profile, q.cluster, plan, fleet=q.fleet, tokens=tokens_of(profile), shorten=shorten)


def plan_details(details: PlanDetails, search: PlanSearch) -> Iterator[tuple[str, Any]]:
    """(key, value) of every detail asked for, about the chosen plan."""
    from ..planner.formula import formula
    from ..planner.objectives import pareto
    from ..planner.scaling_curve import scaling_curve
    from ..planner.what_if import compare

    q, plan = search.question, search.chosen
    e = search.estimates[str(plan)]
    if details.pareto:
        yield "pareto", pareto(search.ranked)
    if details.formula:
        yield "formula", formula(q.profile, plan, e, q.cluster)
    if details.what_if:
        yield (
            "what_if",
            compare(
                q.profile,
                q.cluster,
                q.fleet,
                details.what_if,
                precision=q.precision,
                objective=q.objective,
                reserve=q.reserve,
            ),
        )
    if details.scaling:
        yield "scaling", scaling_curve(q.profile, q.cluster, precision=q.precision, reserve=q.reserve)
    yield from _whole_training(details, search)


def _whole_training(details: PlanDetails, search: PlanSearch) -> Iterator[tuple[str, Any]]:
    from ..planner.training import checkpoint_interval, scale_learning_rate, training_cost

    q, plan = search.question, search.chosen
    e, price = search.estimates[str(plan)], details.money()
    whole = details.tokens is not None or details.epochs is not None
    samples = details.samples or (_dataset_size(q.target) if details.epochs is not None else 0)
    if whole:
        yield (
            "training",
            training_cost(
                q.profile,
                plan,
                e,
                tokens=details.token_count(),
                epochs=details.epochs or 0.0,
                samples=samples,
                price=price.amount,
                currency=price.currency,
            ),
        )
    elif price.amount:
        yield "price_of_1000_steps", 1000 * (e.step_seconds * plan.ranks / 3600 * price.amount)
    if whole or details.mtbf is not None:
        yield "saving", checkpoint_interval(q.profile, plan, e, q.cluster, details.failure_rate())
    rate = scale_learning_rate(q.profile, details.tuned or q.own_batch, samples)
    if str(rate):
        yield "rates", rate


def _dataset_size(target: ModelInput) -> int:
    """Samples of a job's dataset; 0 for a model without one."""
    if not is_job(target):
        return 0
    from ..datasets.sources import open_data

    job = load_job(target)
    return open_data(job).length or 0
