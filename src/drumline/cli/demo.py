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
    """Run the whole loop on this machine, in a minute."""
    from ..core.streams import tolerant_output
    from ..loop.measure import cached_cluster, local_devices, measure
    from ..loop.plan import plan as find_plan
    from ..loop.train import train
    from ..loop.verify import verify
    from ..plans import Plan
    from ..reports.console import console
    from .common import measuring, warn
    from .screen import Screen
    from .verify import failure

    start = time.perf_counter()
    out = console()
    job = str(example("gpt.py"))
    ranks = local_devices()

    def heading(text: str) -> None:
        out.print(f"\n[{time.perf_counter() - start:4.1f} s] {text}", style="bold")

    heading(f"measure: this machine with {ranks} ranks")
    with measuring(quiet=False) as progress:
        cluster = measure(ranks=ranks, notify=warn, progress=progress)
    out.print(str(cluster))
    heading(f"plan: {job}")
    answer = find_plan(job, cluster)
    out.print(answer.explanation)
    best = answer.best.plan
    proved = best if best.ranks > 1 else Plan(dp=min(2, ranks))
    heading(f"verify: {proved} against one device")
    result = verify(job, proved, steps=3)
    if not result.passed:
        raise failure(result)
    out.print(", ".join(f"{k}: largest relative error {v:.1e}" for k, v in result.errors.items()))
    heading(f"train: {best}")
    path = cached_cluster(ranks)
    with tolerant_output():
        run = train(
            job,
            best,
            steps=steps,
            cluster=path,
            output=output,
            overwrite=True,
            compare=True,
            corrections=False,
            observer=Screen(quiet=False),
        )
    heading("report")
    out.print(f"the loss fell from {run.losses[0]:.3f} to {run.losses[-1]:.3f}")
    out.print(f"open {(Path(output) / 'report.html').resolve()}")


def example(name: str) -> Path:
    """An example from the installed package, or from the repository that it is installed from."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "examples" / name, package.parents[1] / "examples" / name):
        if place.exists():
            return place
    raise InputError(f"the example {name} is not installed")
