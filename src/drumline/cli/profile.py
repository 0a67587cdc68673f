"""`drumline profile`: the model as layers, with work, depth, bytes, parameters and kept activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from .corrections import NoCorrections, described, here

if TYPE_CHECKING:
    from ..costs import Estimate


def profile(
    target: str = typer.Argument(..., metavar="JOB", help="path.py, path.py:name, or a zoo name such as gpt:7b."),
    samples: int = typer.Option(None, "--samples", help="Show amounts for this many samples (default: the batch)."),
    recompute: str = typer.Option(
        None, "--recompute", metavar="cpu|cuda", help="Show what recompute=selective keeps on such a device."
    ),
    dry: str = typer.Option(
        None, "--dry-run", metavar="PLAN", help="Show every message of a step under a plan, and what its ranks hold."
    ),
    no_corrections: NoCorrections = False,
    output: str = typer.Option(None, "--output", "-o", help="Write the profile, so that planning needs no torch."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Trace a model, without allocating it."""
    from ..core import files
    from ..core.errors import InputError
    from ..core.units import format_seconds
    from ..reports.recompute import check_kind, recompute_rows, recompute_table, recompute_totals
    from ..reports.text import console, profile_table, profile_totals
    from .common import print_json, profile_of

    if samples is not None and samples < 1:
        raise InputError(f"--samples {samples}", rule="at least one sample")
    if recompute is not None:
        check_kind(recompute)
    if dry is not None:
        _dry_run(target, dry, output, as_json=as_json)
        return
    found = profile_of(target)
    n = found.batch_size if samples is None else samples
    rows = recompute_rows(found, recompute, n) if recompute is not None else []
    if output:
        found.save(output)
    step = here(found, use=not no_corrections)
    if as_json:
        depth = found.depth.at(n)
        work = found.flops().at(n)
        print_json(
            {
                "profile": files.to_plain(found),
                "samples": n,
                "parameters": found.parameters,
                "work": work,
                "depth": depth,
                "average_parallelism": work / depth if depth else None,
                "saved_bytes": sum(x.saved.at(n) * x.repeats for x in found.layers),
                **({"recompute": rows} if recompute is not None else {}),
                **({"here": _told(step)} if step else {}),
            }
        )
        return
    out = console()
    out.print(f"{found.name}: {n} sample{'s' if n > 1 else ''}, forward and backward ({found.origin})\n")
    out.print(profile_table(found, width=out.width, n=n))
    out.print("")
    out.print(profile_totals(found, n))
    if step:
        out.print(f"here: step {format_seconds(step.step_seconds)} on one device, {described(step)}")
    if recompute is not None:
        out.print("")
        out.print(recompute_table(rows, width=out.width))
        out.print("")
        out.print(recompute_totals(found, recompute, n))
    if output:
        out.print(f"written to {output}")


def _told(e: Estimate) -> dict[str, Any]:
    """The step on one device of this machine, with and without corrections."""
    return {
        "step_seconds": e.step_seconds,
        "uncorrected_step_seconds": e.uncorrected_seconds,
        "correction": e.correction,
    }


def _dry_run(target: str, plan: str, output: str | None, *, as_json: bool) -> None:
    """One step of a job under a plan, without its memory."""
    from ..reports.text import console
    from .common import plan_of, print_json
    from .dryrun import job_of, json_of, text_of

    chosen, job = plan_of(plan), job_of(target)
    from ..runtime.dry_run import dry_run

    run = dry_run(job, chosen)
    if output:
        run.save(output)
    if as_json:
        print_json({"dry_run": json_of(run)})
        return
    out = console()
    out.print(text_of(run), markup=False, highlight=False, soft_wrap=out.width >= 70)
    if output:
        out.print(f"written to {output}")
