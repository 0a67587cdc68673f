"""`drumline verify`: proof that a plan computes what one device would."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from ..core.errors import InputError, PlanError, VerificationError

if TYPE_CHECKING:
    from ..plans import Plan
    from ..runtime.verification.verify import Verification


def verify(
    target: str = typer.Argument(..., metavar="JOB", help="path.py or path.py:name."),
    plan: str = typer.Option(..., "--plan", help="The notation, a TOML file, or `auto`: what `train` takes."),
    ranks: int = typer.Option(None, "--ranks", "-n", help="How many ranks there are (default: what the plan takes)."),
    cluster: str = typer.Option(None, "--cluster", help="What auto plans for, as in `train` (default: this machine)."),
    steps: int = typer.Option(10, "--steps", help="Optimizer steps to compare."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Prove that a plan computes what one device would."""
    from ..reports.text import console
    from .common import is_job, plan_of, print_json

    if not is_job(target):
        raise InputError(f"{target!r} is no job", rule="a job is path.py or path.py:name")
    if steps < 1:
        raise InputError(f"--steps {steps}", rule="at least one step")
    if plan == "auto":
        chosen = _chosen(target, ranks, cluster, quiet=as_json)
    else:
        chosen = plan_of(plan)
        check_ranks(chosen, ranks)
    result = verify_now(target, chosen, steps)
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        out = console()
        for name, error in result.errors.items():
            sign = "<=" if error <= result.bounds[name] else ">"
            parts = ", ".join(f"{k} {v:.1e}" for k, v in result.parts[name].items())
            out.print(f"{name}: largest relative error {error:.1e} {sign} {result.bounds[name]:g} ({parts})")
        out.print(f"reference: {result.reference}; {_many(steps, 'step')} on {workers(chosen)}")
        for note in (*result.notes, *(result.division.lines() if result.division else ())):
            out.print(f"note: {note}")
        if result.passed:
            what = "computes what one device computes" if chosen.exact else "keeps the bounds of an approximate plan"
            out.print(f"passed: {result.plan} {what}")
    if not result.passed:
        raise failure(result)


def _chosen(target: str, ranks: int | None, cluster: str | None, *, quiet: bool) -> Plan:
    """The plan that `train` would choose."""
    from ..core.job import Job
    from .foreseen import foresee

    return foresee(Job.load(target), "auto", ranks, cluster, corrections=True, quiet=quiet).plan


def workers(plan: Plan) -> str:
    """`2 ranks`, or `2 threads` where the replicas are threads of one process."""
    return _many(plan.ranks, "thread" if plan.backend == "threads" else "rank")


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def failure(result: Verification) -> VerificationError:
    """The error for a plan that diverges."""
    name = max(result.errors, key=lambda k: result.errors[k] / result.bounds[k])
    return VerificationError(
        f"{result.plan} diverges from the reference in {result.first_divergence!r} ({result.phase})",
        rule=f"{name}: relative error {result.errors[name]:.1e} > {result.bounds[name]:g}",
    )


def verify_now(target: str, plan: Plan, steps: int) -> Verification:
    """Start the plan's ranks and compare."""
    from ..launchers import run_ranks
    from ..plans import check
    from .ranks import verify_rank

    check(plan)
    result: Verification = run_ranks(verify_rank, target, str(plan), steps, ranks=plan.processes)[0]
    return result  # named, so that its type is


def check_ranks(plan: Plan, ranks: int | None) -> None:
    """Refuse a plan for another number of ranks than there are."""
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}", rule="at least one rank")
    if ranks is not None and ranks != plan.ranks:
        raise PlanError(
            f"the plan {plan} is for {plan.ranks} rank{'s' if plan.ranks > 1 else ''}, not {ranks}",
            rule=f"{plan.equation} != {ranks} ranks",
            fix=f"--ranks {plan.ranks}, or dp={ranks}",
        )
