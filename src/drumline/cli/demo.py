"""`drumline demo`: the whole loop on this machine, in a minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..core.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from ..validation.case_studies import CaseStudy


def demo(
    topic: str = typer.Argument(
        None, metavar="case-studies[:NAME]", help="Answer sizing questions with the cost models instead."
    ),
    output: str = typer.Option("runs/demo", "--output", "-o", help="The run folder."),
    steps: int = typer.Option(60, "--steps", help="Optimizer steps."),
    as_json: bool = typer.Option(False, "--json", help="With case-studies: print one JSON document."),
) -> None:
    """Run the whole loop on this machine, in a minute."""
    if topic is not None:
        _case_studies(topic, as_json=as_json)
        return
    if as_json:
        raise InputError("--json of the whole loop", rule="--json is for case studies", fix="demo case-studies --json")
    _whole_loop(output, steps)


def _whole_loop(output: str, steps: int) -> None:
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


def _case_studies(topic: str, *, as_json: bool) -> None:
    """Print one case study, or all of them."""
    from dataclasses import asdict

    from ..reports.console import console
    from ..validation.case_studies import STUDIES, case_study
    from .common import print_json

    kind, _, name = topic.partition(":")
    if kind != "case-studies":
        raise InputError(f"demo {topic}", rule="`demo` runs the whole loop; `demo case-studies` answers questions")
    studies = [case_study(key) for key in ([name] if name else STUDIES)]
    if as_json:
        print_json({"case_studies": {study.name: asdict(study) for study in studies}})
        return
    out = console()
    for i, study in enumerate(studies):
        if i:
            out.print("")
        _print_study(study, out)


def _print_study(study: CaseStudy, out: Console) -> None:
    from ..reports.console import wrap

    for line in wrap(study.question, out.width):
        out.print(line, style="bold")
    for text in study.lines:
        out.print("\n".join(wrap(text, out.width)))
    if study.rows:
        out.print("")
        _print_rows(study, out)
        out.print("")
    for note in filter(None, study.notes):
        out.print("\n".join(wrap(f"- {note}", out.width, indent=2)))


def _print_rows(study: CaseStudy, out: Console) -> None:
    """A table; where it does not fit, one paragraph per row."""
    from ..reports.console import borderless_table

    columns = zip(study.heads, *study.rows, strict=True)
    if sum(max(map(len, column)) + 1 for column in columns) > out.width:
        for name, *cells in study.rows:
            out.print(name)
            for head, cell in zip(study.heads[1:], cells, strict=True):
                out.print(f"  {head}: {cell}")
        return
    table = borderless_table(gap=2 if out.width >= 70 else 1)
    for k, head in enumerate(study.heads):
        table.add_column(head, justify="left" if k == 0 else "right", no_wrap=True)
    for row in study.rows:
        table.add_row(*row)
    out.print(table)


def example(name: str) -> Path:
    """An example from the installed package, or from the repository that it is installed from."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "examples" / name, package.parents[1] / "examples" / name):
        if place.exists():
            return place
    raise InputError(f"the example {name} is not installed")
