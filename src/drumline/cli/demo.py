"""`drumline demo`: the whole loop on this machine, in a minute."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from ..core.errors import InputError


def demo(
    output: str = typer.Option("runs/demo", "--output", "-o", help="The run folder."),
    steps: int = typer.Option(60, "--steps", help="Optimizer steps."),
) -> None:
    """The whole loop on this machine, in a minute."""
    from ..core.job import Job
    from ..planner import search
    from ..plans import Plan
    from ..reports.text import console
    from ..tracing import trace
    from .common import cached, local_devices
    from .measure import measure_now
    from .train import train_now
    from .verify import failure, verify_now

    start = time.perf_counter()
    out = console()
    target = str(example("gpt.py"))
    ranks = local_devices()

    def heading(text: str) -> None:
        out.print(f"\n[{time.perf_counter() - start:4.1f} s] {text}", style="bold")

    heading(f"measure: this machine with {ranks} ranks")
    cluster = measure_now(ranks)
    path = cached(ranks)
    cluster.save(path)
    out.print(str(cluster))
    heading(f"plan: {target}")
    answer, _ = search(trace(Job.load(target)), cluster)
    out.print(answer.explanation)
    plan = Plan.parse(answer.candidates[0].plan)
    proved = plan if plan.ranks > 1 else Plan(dp=min(2, ranks))
    heading(f"verify: {proved} against one device")
    result = verify_now(target, proved, 3)
    if not result.passed:
        raise failure(result)
    out.print(", ".join(f"{k}: largest relative error {v:.1e}" for k, v in result.errors.items()))
    heading(f"train: {plan}")
    run, folder = train_now(target, plan=str(plan), steps=steps, cluster=str(path), output=output, overwrite=True)
    heading("report")
    out.print(f"the loss fell from {run.steps[0].loss:.3f} to {run.steps[-1].loss:.3f}")
    out.print(f"open {(folder / 'report.html').resolve()}")


def example(name: str) -> Path:
    """An example that ships with the package, or stands in the repository it is installed from."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "examples" / name, package.parents[1] / "examples" / name):
        if place.exists():
            return place
    raise InputError(f"the example {name} is not installed")
