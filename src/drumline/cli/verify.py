"""`drumline verify`: prove that a plan computes what one device would."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from ..core.errors import VerificationError
from .completion import complete_cluster, complete_job_file, complete_plan

if TYPE_CHECKING:
    from ..plans import Plan
    from ..runtime.verification.verify import Verification


def verify(
    target: str = typer.Argument(..., metavar="JOB", autocompletion=complete_job_file, help="path.py or path.py:name."),
    plan: str = typer.Option(
        "auto",
        "--plan",
        autocompletion=complete_plan,
        help="The notation, a TOML file, or `auto`, what `train` would choose.",
    ),
    ranks: int = typer.Option(None, "--ranks", "-n", help="Local ranks (default: as many as the plan needs)."),
    cluster: str = typer.Option(
        None,
        "--cluster",
        autocompletion=complete_cluster,
        help="The cluster that `auto` plans for (default: this machine).",
    ),
    steps: int = typer.Option(10, "--steps", help="Optimizer steps to compare."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Prove that a plan computes what one device would."""
    from ..loop.verify import verify as run
    from .common import measuring, print_json, warn

    with measuring(quiet=as_json) as progress:
        result = run(target, plan, steps=steps, ranks=ranks, cluster=cluster, notify=warn, progress=progress)
    if as_json:
        print_json(dataclasses.asdict(result))
    else:
        print_verification(result)
    if not result.passed:
        raise failure(result)


def print_verification(result: Verification) -> None:
    """Errors by dtype, the reference, notes, and the verdict."""
    from ..plans import Plan
    from ..reports.console import console

    out, plan = console(), Plan.parse(result.plan)
    for name, error in result.errors.items():
        sign = "<=" if error <= result.bounds[name] else ">"
        parts = ", ".join(f"{k} {v:.1e}" for k, v in result.parts[name].items())
        out.print(f"{name}: largest relative error {error:.1e} {sign} {result.bounds[name]:g} ({parts})")
    out.print(f"reference: {result.reference}; {_count(result.steps, 'step')} on {workers(plan)}")
    for note in (*result.notes, *(result.division.lines() if result.division else ())):
        out.print(f"note: {note}")
    if result.passed:
        what = "computes what one device computes" if plan.exact else "is within the bounds of an approximate plan"
        if plan.keeps_batches_in_flight:
            what = "computes what one device with these delays computes"
        out.print(f"passed: {result.plan} {what}")


def workers(plan: Plan) -> str:
    """`2 ranks`, or `2 threads` if the replicas are threads of one process."""
    return _count(plan.ranks, "thread" if plan.backend == "threads" else "rank")


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def failure(result: Verification) -> VerificationError:
    """The error for a plan that diverges."""
    name = max(result.errors, key=lambda k: result.errors[k] / result.bounds[k])
    return VerificationError(
        f"{result.plan} diverges from the reference in {result.first_divergence!r} ({result.phase})",
        rule=f"{name}: relative error {result.errors[name]:.1e} > {result.bounds[name]:g}",
        fix=result.explanation,
    )
