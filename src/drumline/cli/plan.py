"""`drumline plan`: the fastest plan that fits, why it wins, and why the alternatives lose."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import DoesNotFit, InputError
from .common import MTBF, Changes, Jitter, NoCorrections, Slow, host_bytes, measuring, print_json, warn
from .completion import complete_cluster, complete_job, complete_plan

if TYPE_CHECKING:
    from ..costs import Estimate
    from ..costs.estimate import Throughput
    from ..loop.finalists import FinalistDryRuns
    from ..loop.plan import PlanQuestion, PlanSearch
    from ..loop.plan_details import PlanDetails
    from ..planner.fit_report import FitReport
    from ..plans import Plan

INTERRUPTED = 130
"""Exit code after Ctrl-C: the printed answer does not cover all candidates."""

_CLUSTERS = typer.Option(
    [],
    "--cluster",
    autocompletion=complete_cluster,
    help="A cluster file or catalogue name (default: this machine); several are compared.",
)
_WHAT_IF = typer.Option(
    [], "--what-if", metavar="KEY=VALUE", help="Compare with a change: link, network, memory, devices, batch, ..."
)


def plan(
    target: str = typer.Argument(
        None, metavar="JOB", autocompletion=complete_job, help="path.py, path.py:name, profile.json or a zoo name."
    ),
    listing: bool = typer.Option(False, "--list", help="List the models of the zoo and the clusters, and stop."),
    clusters: list[str] = _CLUSTERS,
    devices: int = typer.Option(None, "--devices", help="Number of devices."),
    memory: str = typer.Option(None, "--memory", help="Memory per device, such as 40GB."),
    changes: Changes = None,
    precision: str = typer.Option(
        None,
        "--precision",
        help="fp32, tf32, bf16, fp16; bf16-pure or fp8, which are approximate (default: bf16 on GPUs that have it).",
    ),
    batch: int = typer.Option(None, "--batch", help="Samples per step (default: the job's or the model's)."),
    sequence: int = typer.Option(None, "--sequence", help="Tokens per sample of a zoo model."),
    reserve: str = typer.Option(
        None, "--reserve", help="Memory to keep free: 10%, 8GB, 0 (default: 10% of a GPU, none of a CPU)."
    ),
    given: str = typer.Option(
        None, "--plan", autocompletion=complete_plan, help="Your own plan, compared with the best one."
    ),
    source: str = typer.Option(None, "--from", help="A DeepSpeed or Accelerate config to complete."),
    emit: str = typer.Option(None, "--emit", help="Write the plan as deepspeed's, accelerate's, ... config."),
    objective: str = typer.Option("time", "--objective", help="Minimize time, memory or cost (device hours)."),
    fit: bool = typer.Option(False, "--fit", help="Show whether it fits, the largest batch, and what would help."),
    what_if: list[str] = _WHAT_IF,
    scaling: bool = typer.Option(False, "--scaling", help="Show throughput over the number of devices."),
    pareto: bool = typer.Option(False, "--pareto", help="List the plans on the time-memory Pareto front."),
    formula: bool = typer.Option(False, "--formula", help="Show the cost formula of the best plan with its values."),
    tokens: str = typer.Option(None, "--tokens", help="Time and cost of training on this many tokens (13T)."),
    epochs: float = typer.Option(None, "--epochs", help="Time and cost of training for this many epochs."),
    samples: int = typer.Option(None, "--samples", help="Dataset size for --epochs (default: the job's)."),
    price: str = typer.Option("0", "--price", help="Price of one device hour: 2.5, 2.50EUR or '$2.50'."),
    mtbf: str = typer.Option(None, "--mtbf", help=f"How often to save: {MTBF}"),
    tuned: int = typer.Option(None, "--tuned-batch", help="The batch size that the learning rate was tuned for."),
    dry: bool = typer.Option(False, "--dry-run", help="Dry-run the finalists; drop plans that fail."),
    slow: Slow = None,
    jitter: Jitter = None,
    stale: bool = typer.Option(
        False, "--allow-stale", help="Also offer plans whose replicas do not wait for each other (approximate)."
    ),
    no_corrections: NoCorrections = False,
    top: int = typer.Option(10, "--top", help="Number of candidates to show."),
    output: str = typer.Option(None, "--output", "-o", help="Write the best plan to a TOML file."),
    page: str = typer.Option(None, "--page", metavar="HTML", help="Write a page about the answer, with pictures."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Find the fastest plan that fits, and explain why."""
    from ..loop.plan import ask
    from ..loop.plan_details import PlanDetails

    if listing:
        from .plan_list import print_names

        print_names(as_json=as_json)
        return
    if target is None:
        raise InputError(
            "plan without JOB",
            rule="path.py, path.py:name, profile.json or a zoo name such as gpt:7b",
            fix="drumline plan --list shows the zoo and the clusters",
        )
    details = PlanDetails(fit, what_if, scaling, pareto, formula, tokens, epochs, samples, price, mtbf, tuned)
    several, cluster = len(clusters) > 1, clusters[0] if clusters else None
    if top < 1:
        raise InputError(f"--top {top}", rule="at least one candidate")
    inputs: dict[str, Any] = {
        "devices": devices,
        "memory": memory,
        "changes": changes or (),
        "precision": precision,
        "batch": batch,
        "objective": objective,
        "reserve": reserve,
        "sequence": sequence,
        "corrections": not no_corrections,
        "notify": warn,
    }
    with measuring(quiet=as_json) as progress:
        details.check()
        inputs["progress"] = progress
        if source is not None or emit is not None:
            from .plan_tools import plan_for_tools

            if details != PlanDetails(what_if=what_if[:0]) or slow or jitter is not None or stale or page:
                raise InputError(
                    "--from and --emit with another question",
                    rule="they answer with a plan and nothing else",
                    fix="ask the other question with --plan",
                )
            if several:
                raise InputError("--from and --emit with several clusters", rule="a config is of one cluster")
            plan_for_tools(target, cluster, source, given, emit, inputs, output=output, as_json=as_json)
            return
        spread = {"slow": slow, "jitter": jitter, "allow_stale": stale}
        if several:
            from .plan_compare import compare_clusters

            if details != PlanDetails(what_if=what_if[:0]) or dry or page or output:
                raise InputError(
                    "several clusters with another question or an output",
                    rule="clusters are compared by their best plans",
                    fix="ask for one --cluster",
                )
            compare_clusters(target, clusters, inputs | spread | {"given": given}, as_json=as_json)
            return
        question = ask(target, cluster, given=given, dry_run=dry, **spread, **inputs)
    _answer(question, details, top=top, output=output, page=page, as_json=as_json)


def _answer(
    question: PlanQuestion, details: PlanDetails, *, top: int, output: str | None, page: str | None, as_json: bool
) -> None:
    """Search, and print."""
    from ..loop.plan import search_plans
    from ..loop.plan_details import fit_of, plan_details

    fit = fit_of(question) if details.fit else None
    try:
        search = search_plans(question)
    except DoesNotFit:
        if as_json and fit:
            print_json({"plans": [], "fit": dataclasses.asdict(fit)})
        elif fit:
            _print_fit(fit, question)
        raise
    if output:
        where = f"{question.target} on {question.cluster.name}"
        search.best.save(output, comment=f"{where}: {search.answer.explanation}")
    more = list(plan_details(details, search))
    if page:
        from ..loop.prediction_pages import write_search

        page = str(write_search(search, page))
    if as_json:
        document = _document(search, top) | ({"fit": dataclasses.asdict(fit)} if fit else {})
        document |= {"given": _given_json(search)} if question.given else {}
        document |= {"stale": dataclasses.asdict(search.answer.stale)} if search.answer.stale else {}
        document |= {"dry_run": question.dry_runs.to_json()} if question.dry_runs else {}
        document |= {"page": page} if page else {}
        print_json(document | {key: _detail_json(key, value) for key, value in more})
    else:
        if fit:
            _print_fit(fit, question)
        _print(search, more, details, top, output)
        if page:
            print(f"page: {page}")
    if search.answer.interrupted:
        raise typer.Exit(INTERRUPTED)


# ---- JSON


def _document(search: PlanSearch, top: int) -> dict[str, Any]:
    """The JSON document of the search itself."""
    from ..planner.bottlenecks import bottlenecks

    q, answer, estimates = search.question, search.answer, search.estimates
    best = estimates[str(search.best)]
    unfit = [c for c in answer.candidates if not c.fits]
    limits = bottlenecks(q.profile, search.best, best, q.cluster)
    return {
        "plans": [
            {
                "plan": str(c.plan),
                "step_seconds": c.step_seconds,
                "memory_bytes": c.memory_bytes,
                "fits": c.fits,
                "reason": c.reason,
                "tie": c.tie,
                "in_reserve": c.in_reserve,
                **host_bytes(estimates[str(c.plan)]),
                "uncorrected_step_seconds": estimates[str(c.plan)].uncorrected_seconds,
            }
            for c in answer.candidates[:top]
        ],
        "candidates": answer.scored,
        "finalists": len(answer.candidates),
        "scored_by": answer.scored_by,
        "seconds": answer.seconds,
        "explanation": answer.explanation,
        "idle": answer.idle,
        "objective": answer.objective,
        "interrupted": answer.interrupted,
        "families": [dataclasses.asdict(f) for f in answer.families],
        "unfit": {"count": len(unfit), "nearest": [_missing_memory(estimates[str(c.plan)]) for c in unfit[:top]]},
        "bounds": limits.shares,
        "utilisation": limits.utilisation,
        "cluster": q.cluster.name,
        "devices": q.cluster.devices,
        "batch_size": q.profile.batch_size,
        "parts": best.parts,
        "throughput": _throughput_json(search, search.best),
        "memory_parts": best.memory_parts,
        "memory_limit": best.memory_limit,
        "memory_left": best.memory_limit - best.memory_bytes,
        "reserve_bytes": best.reserve_bytes,
        **host_bytes(best),
        "correction": best.correction,
        "staleness": best.staleness,
        **_input_json(best),
    }


def _input_json(e: Estimate) -> dict[str, Any]:
    if not e.input_text:
        return {}
    return {"data_seconds": e.data_seconds, "data_wait_seconds": e.data_wait_seconds, "input": e.input_text}


def _missing_memory(e: Estimate) -> dict[str, Any]:
    where, size = e.lacks
    return {"plan": e.plan, "where": where, "lacks_bytes": size}


def _given_json(search: PlanSearch) -> dict[str, Any]:
    """The user's own plan compared with the best."""
    from ..planner.explain import explain_plan

    given = search.question.given
    assert given is not None
    e = search.estimates[str(given)]
    return {
        "plan": e.plan,
        "step_seconds": e.step_seconds,
        "memory_bytes": e.memory_bytes,
        "fits": e.fits,
        "reason": _given_reason(search),
        "explanation": explain_plan(search.question.profile, given, e, search.question.cluster),
        "parts": e.parts,
        "throughput": _throughput_json(search, search.question.given),
        "memory_parts": e.memory_parts,
        **host_bytes(e),
        "uncorrected_step_seconds": e.uncorrected_seconds,
        "correction": e.correction,
        "notes": list(e.notes),
        "staleness": e.staleness,
        **_input_json(e),
    }


def _throughput(search: PlanSearch, plan: Plan) -> Throughput | None:
    from ..costs.estimate import Throughput

    q = search.question
    return Throughput.of(q.profile, plan, q.cluster, search.estimates[str(plan)].step_seconds)


def _throughput_json(search: PlanSearch, plan: Plan | None) -> dict[str, Any] | None:
    rates = _throughput(search, plan) if plan is not None else None
    return rates.to_json() if rates else None


def _given_reason(search: PlanSearch) -> str:
    from ..planner.explain import reason

    given = search.question.given
    assert given is not None
    e, best = search.estimates[str(given)], search.estimates[str(search.best)]
    return "the best" if e.plan == best.plan else reason(e, best, given, search.answer.objective)


def _detail_json(key: str, value: Any) -> Any:
    if key == "pareto":
        return [{"plan": str(p), "step_seconds": e.step_seconds, "memory_bytes": e.memory_bytes} for p, e in value]
    if isinstance(value, list | tuple):
        return [dataclasses.asdict(x) for x in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


# ---- for a person


def _print_fit(fit: FitReport, question: PlanQuestion) -> None:
    from ..reports.console import console
    from ..reports.plan_text import fit_lines

    out = console()
    out.print(fit_lines(fit, question.profile.batch_size))
    out.print("")


def _print(search: PlanSearch, more: list[tuple[str, Any]], details: PlanDetails, top: int, output: str | None) -> None:
    from ..planner.explain import explain_plan
    from ..plans.precision_conflicts import APPROXIMATE_PRECISIONS, approximate_note
    from ..reports.console import console
    from ..reports.plan_text import detail_text, estimate_lines, families_list, plans_table

    out, q, answer, cluster = console(), search.question, search.answer, search.question.cluster
    where = f"{cluster.devices} x {cluster.device.name} ({cluster.name})"
    out.print(f"{q.profile.name}, batches of {q.profile.batch_size}, on {where}")
    out.print(f"{answer.idle}\n" if answer.idle else "")
    if answer.interrupted:
        out.print(f"Interrupted: the best of {len(answer.candidates)} candidates so far; the others were not scored.\n")
    out.print(plans_table(answer, top=top, width=out.width))
    out.print("")
    out.print(estimate_lines(search.estimates[str(search.best)]))
    out.print(f"throughput {_throughput(search, search.best)}")
    out.print("")
    out.print(answer.explanation.removeprefix(answer.idle).lstrip())
    out.print("")
    out.print(families_list(answer.families))
    if answer.scored_by:
        out.print(f"{answer.scored:,} candidates scored in {answer.seconds:.2f} s by {answer.scored_by}.")
        out.print(f"The memory of {len(answer.candidates)} finalists was counted tensor by tensor.")
    else:
        origin = cluster.origin_of("device.peak")
        out.print(f"{answer.scored:,} candidates in {answer.seconds:.2f} s; rates: {origin}")
    if answer.candidates[0].plan.precision in APPROXIMATE_PRECISIONS:
        out.print(f"note: {approximate_note(answer.candidates[0].plan.precision)}")
    if output:
        out.print(f"written to {output}")
    if q.given is not None:
        e = search.estimates[str(q.given)]
        out.print(f"\nYour plan {e.plan}: {_given_reason(search)}\n{estimate_lines(e)}")
        out.print(f"throughput {_throughput(search, q.given)}")
        out.print(explain_plan(q.profile, q.given, e, cluster))
        out.print("\n".join(f"note: {note}" for note in e.notes) if e.notes else "", end="\n" if e.notes else "")
    if q.dry_runs is not None:
        out.print("\n" + "\n".join(_dry_run_lines(q.dry_runs)))
    for key, value in more:
        out.print("")
        out.print(detail_text(key, value, width=out.width, price=details.money()))


def _dry_run_lines(dry_runs: FinalistDryRuns) -> list[str]:
    from ..core.units import format_bytes

    lines = ["Dry run of the finalists: the peak of live tensors, and the closed form's estimate"]
    for name, (run, e) in dry_runs.runs.items():
        off = e.memory_bytes / run.peak - 1
        lines.append(f"  {name}: {format_bytes(run.peak)}, closed form {format_bytes(e.memory_bytes)} ({off:+.0%})")
    lines += [f"  dropped {name}: {why}" for name, why in dry_runs.dropped.items()]
    return [*lines, *(f"  not run, {name}: {why}" for name, why in dry_runs.unknown.items())]
