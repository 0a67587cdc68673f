"""`drumline plan`: the fastest plan that fits, why it wins, and why each other lost."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import DoesNotFit, InputError
from .common import Changes
from .corrections import NoCorrections, cluster_file, with_corrections
from .dryrun import Finalists
from .emit import Wanted, elsewhere
from .plan_sections import Asked, Question, Section, fit_section, given_plan, sections

if TYPE_CHECKING:
    from ..clusters import Cluster
    from ..costs import Estimate
    from ..planner import Answer

INTERRUPTED = 130
"""As a shell says it: the answer that was printed is not of all candidates."""

_WHAT_IF = typer.Option([], "--what-if", help="Before and after KEY=VALUE: link, network, memory, devices, batch, ...")


def plan(
    target: str = typer.Argument(..., metavar="JOB", help="path.py, path.py:name, profile.json or a zoo name."),
    cluster: str = typer.Option(None, "--cluster", help="A cluster file or a name of the catalogue (default: here)."),
    devices: int = typer.Option(None, "--devices", help="How many devices there are."),
    memory: str = typer.Option(None, "--memory", help="Memory of a device, such as 40GB."),
    changes: Changes = None,
    precision: str = typer.Option(None, "--precision", help="fp32 or bf16 (default: bf16 on GPUs that have it)."),
    batch: int = typer.Option(None, "--batch", help="Samples per step, instead of the job's or the model's own."),
    given: str = typer.Option(None, "--plan", help="A plan of your own, priced beside the best."),
    source: str = typer.Option(None, "--from", help="A DeepSpeed or Accelerate config: the best within what it fixes."),
    emit: str = typer.Option(None, "--emit", help="Write deepspeed's, accelerate's, ... configuration for the plan."),
    objective: str = typer.Option("time", "--objective", help="time, memory or cost (device hours)."),
    fit: bool = typer.Option(False, "--fit", help="Will it fit, the largest batch, the one change that helps."),
    what_if: list[str] = _WHAT_IF,
    scaling: bool = typer.Option(False, "--scaling", help="The curve over numbers of devices."),
    pareto: bool = typer.Option(False, "--pareto", help="The plans that nothing beats in both time and memory."),
    formula: bool = typer.Option(False, "--formula", help="The formula of the best plan, with its values."),
    tokens: str = typer.Option(None, "--tokens", help="Time and price of a training on so many, such as 13T."),
    epochs: float = typer.Option(None, "--epochs", help="Time and price of a training of so many passes."),
    samples: int = typer.Option(None, "--samples", help="Size of the dataset, where it is not the job's."),
    price: float = typer.Option(0.0, "--price", help="Of one device for one hour."),
    mtbf: str = typer.Option(None, "--mtbf", help="Mean time between failures, for how often to save (24h)."),
    tuned: int = typer.Option(None, "--tuned-batch", help="The batch that the learning rate was tuned with."),
    dry: bool = typer.Option(False, "--dry-run", help="Run the finalists' steps without memory; drop those that fail."),
    no_corrections: NoCorrections = False,
    top: int = typer.Option(10, "--top", help="How many candidates to show."),
    output: str = typer.Option(None, "--output", "-o", help="Write the best plan to a TOML file."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Find the fastest plan that fits, and say why."""
    from ..planner.objectives import order
    from ..plans.plan import CHOICES
    from .common import cluster_of, profile_of

    asked = Asked(fit, what_if, scaling, pareto, formula, tokens, epochs, samples, price, mtbf, tuned)
    asked.check()
    order(objective)  # refuses what is none
    if batch is not None and not 1 <= batch <= 10_000_000:
        raise InputError(f"--batch {batch}", rule="from 1 to 10,000,000 samples")
    if top < 1:
        raise InputError(f"--top {top}", rule="at least one candidate")
    if precision is not None and precision not in CHOICES["precision"]:
        raise InputError(f"--precision {precision}", rule=f"one of {', '.join(CHOICES['precision'])}")
    if source is not None or emit is not None:
        wanted = Wanted(
            target,
            source,
            given,
            emit,
            cluster,
            devices,
            memory,
            changes,
            precision,
            batch,
            objective,
            output,
            as_json,
            not no_corrections,
        )
        elsewhere(wanted, alone=asked == Asked(what_if=what_if[:0]))
        return
    known = None  # this machine may have to be measured first: then the job is traced before, to fail early
    if cluster is not None:
        known = cluster_of(cluster, devices, memory, changes=changes, say=not as_json)
    way = (_computed_in(given, precision, known[0]), known[0].device.kind) if known else ("", "cpu")
    own = profile_of(target, precision=way[0], device=way[1])
    found = own if batch is None else dataclasses.replace(own, batch_size=batch)
    machines, fleet = known or cluster_of(cluster, devices, memory, changes=changes, say=not as_json)
    file = cluster_file(cluster, devices)
    machines = with_corrections(machines, file, use=not no_corrections)
    fleet = dataclasses.replace(fleet, corrections=machines.corrections)
    question = Question(target, found, own.batch_size, machines, fleet, precision, objective)
    finalists = Finalists(target, batch, machines.device.kind) if dry else None
    _answer(question, asked, given, top=top, output=output, as_json=as_json, finalists=finalists)


def _computed_in(given: str | None, precision: str | None, machines: Cluster) -> str:
    """The precision that is asked for: of the user's own plan, of the option, or what these machines are good at."""
    from ..planner import default_precision
    from .common import plan_of

    own = plan_of(given) if given is not None else None
    if own is not None and (precision is None or "precision" in own.table()):
        return own.precision
    return precision or default_precision(machines)


def _answer(
    q: Question,
    asked: Asked,
    given: str | None,
    *,
    top: int,
    output: str | None,
    as_json: bool,
    finalists: Finalists | None,
) -> None:
    """Search, and print."""
    from ..planner import default_precision, search
    from ..planner.prices import prices
    from ..plans import Plan
    from .common import print_json, profile_in

    mine = given_plan(given, q) if given is not None else None
    precision = mine.precision if mine is not None else q.precision
    profile = profile_in(q.target, q.profile, precision or default_precision(q.machines), q.machines.device.kind)
    q = dataclasses.replace(q, precision=precision, profile=profile)
    first = [fit_section(q, mine)] if asked.fit else []
    extra: list[Section] = []
    try:
        answer, estimates = search(
            q.profile,
            q.machines,
            precision=precision,
            fleet=q.fleet,
            objective=q.objective,
            turns=True,
            dry_run=finalists,
        )
    except DoesNotFit:
        if as_json and first:
            print_json({"plans": [], **{s.key: s.value for s in first}})
        else:
            _print(first)
        raise
    best = Plan.parse(answer.candidates[0].plan)
    if output:
        best.save(output, comment=f"{q.target} on {q.machines.name}: {answer.explanation}")
    ranked = [(Plan.parse(c.plan), estimates[c.plan]) for c in answer.candidates]
    if mine is not None:
        estimates[str(mine)] = prices(q.profile, q.machines, mine.precision).estimate(mine)
        extra.append(_yours(mine, estimates[str(mine)], answer, estimates))
    chosen = mine or best
    extra += [finalists.section] if finalists else []
    extra += sections(asked, q, chosen, estimates[str(chosen)], ranked)
    if as_json:
        print_json(_document(q, answer, estimates, top) | {s.key: s.value for s in (*first, *extra)})
    else:
        _print(first)
        _show(q, answer, estimates, top, output)
        _print(extra, before=True)
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


def _yours(mine: Any, e: Estimate, answer: Answer, estimates: dict[str, Estimate]) -> Section:
    """The user's own plan beside the best."""
    from ..planner.explain import reason
    from ..reports.text import estimate_lines

    best = estimates[answer.candidates[0].plan]
    told = "the best" if e.plan == best.plan else reason(e, best, mine, answer.objective)
    value = {
        "plan": e.plan,
        "step_seconds": e.step_seconds,
        "memory_bytes": e.memory_bytes,
        "fits": e.fits,
        "reason": told,
        "parts": e.parts,
        "memory_parts": e.memory_parts,
        **host_bytes(e),
        "uncorrected_step_seconds": e.uncorrected_seconds,
        "correction": e.correction,
    }
    return Section("given", value, lambda _: f"Your plan {e.plan}: {told}\n{estimate_lines(e)}")


def _document(q: Question, answer: Answer, estimates: dict[str, Estimate], top: int) -> dict[str, Any]:
    """The JSON document."""
    from ..planner.bounds import bounds
    from ..plans import Plan

    best = estimates[answer.candidates[0].plan]
    unfit = [c for c in answer.candidates if not c.fits]
    found = bounds(q.profile, Plan.parse(best.plan), best, q.machines)
    return {
        "plans": [
            {
                "plan": c.plan,
                "step_seconds": c.step_seconds,
                "memory_bytes": c.memory_bytes,
                "fits": c.fits,
                "reason": c.reason,
                **host_bytes(estimates[c.plan]),
                "uncorrected_step_seconds": estimates[c.plan].uncorrected_seconds,
            }
            for c in answer.candidates[:top]
        ],
        "candidates": answer.scored,
        "finalists": len(answer.candidates),
        "scored_by": answer.scored_by,
        "seconds": answer.seconds,
        "explanation": answer.explanation,
        "objective": answer.objective,
        "interrupted": answer.interrupted,
        "families": [dataclasses.asdict(f) for f in answer.families],
        "unfit": {"count": len(unfit), "nearest": [_lacking(estimates[c.plan]) for c in unfit[:top]]},
        "bounds": found.shares,
        "utilisation": found.utilisation,
        "cluster": q.machines.name,
        "devices": q.machines.devices,
        "batch_size": q.profile.batch_size,
        "parts": best.parts,
        "memory_parts": best.memory_parts,
        **host_bytes(best),
        "correction": best.correction,
    }


def _lacking(e: Estimate) -> dict[str, Any]:
    where, size = e.lacks
    return {"plan": e.plan, "where": where, "lacks_bytes": size}


def _show(q: Question, answer: Answer, estimates: dict[str, Estimate], top: int, output: str | None) -> None:
    """For a person."""
    from ..reports.plans import families_list
    from ..reports.text import console, estimate_lines, plans_table

    out, machines = console(), q.machines
    where = f"{machines.devices} x {machines.device.name} ({machines.name})"
    out.print(f"{q.profile.name}, batches of {q.profile.batch_size}, on {where}\n")
    if answer.interrupted:
        out.print(f"Interrupted: the best of {len(answer.candidates)} candidates so far; others were not looked at.\n")
    out.print(plans_table(answer, top=top, width=out.width))
    out.print("")
    out.print(estimate_lines(estimates[answer.candidates[0].plan]))
    out.print("")
    out.print(answer.explanation)
    out.print("")
    out.print(families_list(answer.families))
    origin = machines.origin_of("device.peak")
    if answer.scored_by:
        out.print(f"{answer.scored:,} candidates scored in {answer.seconds:.2f} s by {answer.scored_by}.")
        out.print(f"Of {len(answer.candidates)} finalists the memory was counted tensor by tensor.")
    else:
        out.print(f"{answer.scored:,} candidates in {answer.seconds:.2f} s; rates: {origin}")
    if output:
        out.print(f"written to {output}")


def _print(extra: list[Section], *, before: bool = False) -> None:
    """Each with an empty line after it, or before it."""
    from ..reports.text import console

    out = console()
    for section in extra:
        if before:
            out.print("")
        out.print(section.shown(out.width))
        if not before:
            out.print("")


def host_bytes(e: Estimate) -> dict[str, float]:
    """What a rank has in host memory and may have, where something is offloaded."""
    return {"host_bytes": e.host_bytes, "host_limit": e.host_limit} if e.host_bytes else {}
