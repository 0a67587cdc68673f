"""`drumline profile`: the model as layers, with work, depth, bytes, parameters and saved activations."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import typer

from .common import NoCorrections, print_json, warn
from .completion import complete_cluster, complete_job, complete_plan
from .profile_graph import GraphOptions, show_graph

if TYPE_CHECKING:
    from ..runtime.dry_run import DryRun, DryRunRank


def profile(
    target: str = typer.Argument(
        ..., metavar="JOB", autocompletion=complete_job, help="path.py, path.py:name, or a zoo name such as gpt:7b."
    ),
    samples: int = typer.Option(None, "--samples", help="Show amounts for this many samples (default: the batch)."),
    recompute: str = typer.Option(
        None, "--recompute", metavar="cpu|cuda", help="Show what recompute=selective keeps on such a device."
    ),
    dry: str = typer.Option(
        None, "--dry-run", metavar="PLAN", help="Show the messages and memory of every rank in a step under a plan."
    ),
    graph: bool = typer.Option(False, "--graph", help="Show the model as a data-flow graph: bytes between its layers."),
    depth: int = typer.Option(None, "--depth", help="With --graph: 1 shows layers, 2 the modules inside of them, ..."),
    layer: str = typer.Option(None, "--layer", help="With --graph: show the operators of this layer."),
    plan: str = typer.Option(
        None, "--plan", autocompletion=complete_plan, help="With --graph: show where this plan cuts it."
    ),
    cluster: str = typer.Option(
        None,
        "--cluster",
        autocompletion=complete_cluster,
        help="With --graph: the machines (default: this one, if measured).",
    ),
    page: str = typer.Option(None, "--page", metavar="HTML", help="With --graph: write it as a page."),
    no_corrections: NoCorrections = False,
    output: str = typer.Option(None, "--output", "-o", help="Write the profile, so that planning needs no torch."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Trace a model without allocating it."""
    from ..core import files
    from ..core.errors import InputError
    from ..core.units import format_seconds
    from ..loop.corrections import estimate_here
    from ..loop.profile import profile as trace
    from ..reports.console import console
    from ..reports.plan_text import correction_line
    from ..reports.profile_text import (
        check_device_kind,
        profile_table,
        profile_totals,
        recompute_rows,
        recompute_table,
        recompute_totals,
    )

    if samples is not None and samples < 1:
        raise InputError(f"--samples {samples}", rule="at least one sample")
    if recompute is not None:
        check_device_kind(recompute)
    if dry is not None:
        _dry_run(target, dry, output, as_json=as_json)
        return
    drawing = GraphOptions(depth, layer, plan, cluster, page)
    if graph:
        show_graph(target, drawing, samples, output, as_json=as_json)
        return
    drawing.refuse_without_graph()
    model = trace(target)
    n = model.batch_size if samples is None else samples
    rows = recompute_rows(model, recompute, n) if recompute is not None else []
    if output:
        model.save(output)
    step = estimate_here(model, use=not no_corrections, notify=warn)
    if as_json:
        work, depth = model.flops().at(n), model.depth.at(n)
        document = {
            "profile": files.to_plain(model),
            "samples": n,
            "parameters": model.parameters,
            "work": work,
            "depth": depth,
            "average_parallelism": work / depth if depth else None,
            "saved_bytes": sum(x.saved.at(n) * x.repeats for x in model.layers),
        }
        if recompute is not None:
            document["recompute"] = rows
        if step:
            document["here"] = {
                "step_seconds": step.step_seconds,
                "uncorrected_step_seconds": step.uncorrected_seconds,
                "correction": step.correction,
            }
        print_json(document)
        return
    out = console()
    out.print(f"{model.name}: {n} sample{'s' if n > 1 else ''}, forward and backward ({model.origin})\n")
    out.print(profile_table(model, width=out.width, n=n))
    out.print("")
    out.print(profile_totals(model, n))
    if step:
        out.print(f"here: step {format_seconds(step.step_seconds)} on one device, {correction_line(step)}")
    if recompute is not None:
        out.print("")
        out.print(recompute_table(rows, width=out.width))
        out.print("")
        out.print(recompute_totals(model, recompute, n))
    if output:
        out.print(f"written to {output}")


def _dry_run(target: str, plan: str, output: str | None, *, as_json: bool) -> None:
    """One step of a job under a plan, without its memory."""
    from ..core import files
    from ..loop.finalists import job_to_dry_run
    from ..loop.inputs import load_plan
    from ..reports.console import console

    chosen, job = load_plan(plan), job_to_dry_run(target)
    from ..runtime.dry_run import dry_run

    run = dry_run(job, chosen)
    if output:
        run.save(output)
    if as_json:
        print_json({"dry_run": files.to_plain(run)})
        return
    out = console()
    out.print(_dry_run_text(run), markup=False, highlight=False, soft_wrap=out.width >= 70)
    if output:
        out.print(f"written to {output}")


def _dry_run_text(run: DryRun) -> str:
    """The memory and messages of each kind of rank."""
    lines = [f"{run.plan}: one step on {run.world} rank{'s' if run.world > 1 else ''}, as on a {run.device} device"]
    for rank in run.ranks:
        lines += ["", *_rank_lines(rank)]
    return "\n".join([*lines, *(f"note: {note}" for note in run.notes)])


def _rank_lines(rank: DryRunRank) -> list[str]:
    from ..core.units import format_bytes

    parts = (
        ("parameters", rank.parameters),
        ("buffers", rank.buffers),
        ("gradients", rank.gradients),
        ("optimizer", rank.optimizer),
        ("batch", rank.batch),
    )
    states = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts if n)
    host = f"; in host memory {format_bytes(rank.host)}" if rank.host else ""
    head = f"rank {rank.rank}: peak {format_bytes(rank.peak)} in {rank.peak_phase or 'the step'}{host}"
    lines = [head, f"  {states}"]
    counts = Counter((m.phase, m.name, m.bytes, m.ranks) for m in rank.messages)
    for (phase, name, size, ranks), n in counts.items():
        times = f" x {n}" if n > 1 else ""
        lines.append(f"  {phase or 'between'}: {name} {format_bytes(size)}{times}, {_ranks_text(name, ranks)}")
    return lines if rank.messages else [*lines, "  no messages"]


def _ranks_text(name: str, ranks: tuple[int, ...]) -> str:
    if name in ("send", "receive"):
        return f"rank {ranks[0]} to {ranks[1]}"
    if len(ranks) > 2 and len({b - a for a, b in pairwise(ranks)}) == 1:
        step = ranks[1] - ranks[0]
        return f"ranks {ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return f"ranks {', '.join(map(str, ranks))}"
