"""`drumline simulate`: a step under a plan, a collective or a pipeline order, replayed on a cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import InputError
from .common import MTBF, Changes, Jitter, NoCorrections, Slow, SlowLinks, measuring, print_json, warn
from .completion import complete_cluster, complete_plan
from .simulated_step import device_counts, print_step, print_sweep, step_document

if TYPE_CHECKING:
    from ..loop.simulate import Simulation


def simulate(
    target: str = typer.Argument(
        ...,
        metavar="JOB|SCHEDULE",
        help="A job, a zoo name, all_reduce:ring, pipeline:1f1b; pipeline or all_reduce alone compare all of them.",
    ),
    plan: str = typer.Option("dp=1", "--plan", autocompletion=complete_plan, help="The plan of a job."),
    cluster: str = typer.Option(
        None,
        "--cluster",
        autocompletion=complete_cluster,
        help="A cluster file or catalogue name (default: this machine).",
    ),
    changes: Changes = None,
    ranks: int = typer.Option(4, "--ranks", "-n", help="Ranks of a collective or a pipeline."),
    size: str = typer.Option("1MiB", "--bytes", help="Buffer size of a collective."),
    micro: int = typer.Option(8, "--micro", help="Micro-batches of a pipeline."),
    virtual: int = typer.Option(1, "--virtual", help="Pipeline stages per rank."),
    batch: int = typer.Option(None, "--batch", help="Samples per step of a job (default: its own)."),
    slow: Slow = None,
    jitter: Jitter = None,
    slow_links: SlowLinks = None,
    mtbf: str = typer.Option(None, "--mtbf", help=f"Goodput with failures: {MTBF}"),
    restart: str = typer.Option(None, "--restart", help="With --mtbf: from a failure until training goes on (5min)."),
    days: float = typer.Option(None, "--days", help="With --mtbf: days to replay (30)."),
    seed: int = typer.Option(None, "--seed", help="Of jitter and failures (default: the cluster's, 0)."),
    sweep: str = typer.Option(None, "--sweep", metavar="N,N,...", help="Numbers of devices: the plan with other dp."),
    scaling: str = typer.Option("strong", "--scaling", help="Of --sweep: strong (same batch) or weak."),
    no_corrections: NoCorrections = False,
    picture: str = typer.Option(None, "--picture", metavar="SVG", help="Draw the timeline."),
    page: str = typer.Option(
        None, "--page", metavar="HTML", help="Write a page: pictures of a step, or a schedule played round by round."
    ),
    trace: str = typer.Option(None, "--trace", metavar="FILE", help="Write the timeline for Perfetto."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Replay a step, a collective or a pipeline."""
    from ..loop.simulate import refuse_options_of_jobs
    from ..loop.simulate import simulate as run

    start = time.perf_counter()
    if target in ("pipeline", "all_reduce"):
        files = {"picture": picture, "page": page, "trace": trace}
        if name := next((name for name, value in files.items() if value), None):
            example = {"pipeline": "pipeline:1f1b", "all_reduce": "all_reduce:ring"}[target]
            raise InputError(f"--{name} of {target}", rule=f"a {name} is of one replay", fix=example)
        given = {"--batch": batch, "--slow-link": slow_links, "--mtbf": mtbf, "--restart": restart, "--days": days}
        refuse_options_of_jobs(target, given | {"--sweep": sweep})
    if target == "pipeline":
        _print_orders(ranks, micro, as_json, start)
        return
    if target == "all_reduce":
        _print_growth(ranks, as_json, start)
        return
    if scaling != "strong" and sweep is None:
        raise InputError(
            f"--scaling {scaling} without --sweep", rule="it says how a sweep scales", fix="--sweep 8,16,32"
        )
    with measuring(quiet=as_json) as progress:
        options: dict[str, Any] = {
            "changes": changes or (),
            "batch": batch,
            "slow": slow,
            "jitter": jitter,
            "slow_links": slow_links or (),
            "seed": seed,
            "corrections": not no_corrections,
            "notify": warn,
            "progress": progress,
        }
        if sweep is not None:
            _refuse_with_sweep(mtbf=mtbf, picture=picture, page=page, trace=trace)
            print_sweep(target, plan, cluster, device_counts(sweep), scaling, options, as_json=as_json)
            return
        days_lost = {"mtbf": mtbf, "restart": restart, "days": days}
        shape = {"ranks": ranks, "size": size, "micro": micro, "virtual": virtual}
        replay = run(target, plan, cluster, **shape, **days_lost, **options)
    written = _write_files(replay, picture, page, trace)
    if as_json:
        print_json(_document(replay) | {"seconds": time.perf_counter() - start} | written)
    else:
        _print(replay, ranks)
        for key, value in written.items():
            print(f"{key}: {value}")


def _write_files(replay: Simulation, picture: str | None, page: str | None, trace: str | None) -> dict[str, str]:
    """Write what was asked for; the files."""
    from ..core.files import write_text

    if picture:
        from ..reports.svg_timeline import standalone_timeline

        write_text(picture, standalone_timeline(replay.timeline, replay.title))
    if page:
        from ..loop.prediction_pages import write_simulation

        page = str(write_simulation(replay, output=page))
    if trace:
        write_text(trace, replay.timeline.to_chrome())
    return {key: value for key, value in (("picture", picture), ("page", page), ("trace", trace)) if value}


def _refuse_with_sweep(**options: object) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise InputError(
            f"--sweep with {given[0]}", rule="a sweep is a table of step times", fix=f"leave out {given[0]}"
        )


def _document(replay: Simulation) -> dict[str, Any]:
    """The JSON document."""
    value: dict[str, Any] = {
        "step_seconds": replay.step_seconds,
        "parts": replay.parts,
        "critical_path": [part.name for part in replay.critical_path],
    }
    if replay.pipeline is not None:
        value |= {"bubble": replay.bubble, "held": replay.activations}
    if replay.collective is not None:
        from ..reports.collective_text import collective_table

        value |= collective_table(replay.collective)
    if (workers := replay.workers) is not None:
        value["workers"] = {
            "updates": workers.updates,
            "samples_per_second": workers.samples_per_second,
            "waiting": list(workers.waiting),
            "staleness": {str(k): n for k, n in workers.staleness.items()},
            "mean_staleness": workers.mean_staleness,
            "dropped": workers.dropped,
            "server_use": dict(workers.server_use),
        }
    if replay.estimate is not None:
        value |= step_document(replay)
    if replay.updates is not None:
        value |= {"versions": replay.updates.versions, "staleness": replay.updates.staleness}
    return value


def _print(replay: Simulation, ranks: int) -> None:
    from ..reports.collective_text import collective_lines
    from ..reports.console import console
    from ..reports.schedule_text import draw_collective, draw_pipeline

    out = console()
    if replay.pipeline is not None:
        assert replay.bubble is not None
        out.print(draw_pipeline(replay.pipeline, width=out.width))
        out.print(f"bubble {100 * replay.bubble:.1f}% (per micro-batch and rank: forward 1, backward 2 units of time)")
        if replay.updates is not None:
            out.print("the bubble is that of the picture, which fills and drains; a full pipeline has none")
        out.print(f"at most {replay.activations:g} micro-batches of activations stored on a rank")
        if replay.updates is not None:
            out.print(f"versions of the weights, by stage: {', '.join(map(str, replay.updates.versions))}")
            out.print(f"staleness, by stage: {', '.join(str(max(s)) for s in replay.updates.staleness)}")
    elif replay.schedule is not None:
        if ranks <= 16:
            out.print(draw_collective(replay.schedule, width=out.width))
        assert replay.collective is not None
        out.print(collective_lines(replay.collective, replay.title))
    elif replay.estimate is not None:
        print_step(replay)


def _print_orders(ranks: int, micro: int, as_json: bool, start: float) -> None:
    """Compare all pipeline orders on the same work."""
    from ..reports.console import console
    from ..reports.schedule_text import order_rows, orders_table

    rows = order_rows(ranks, micro)
    if as_json:
        orders = [
            {
                "order": r.name,
                "virtual": r.virtual,
                "step_seconds": r.seconds,
                "bubble": r.bubble,
                "held": r.activations,
            }
            for r in rows
        ]
        print_json({"orders": orders, "seconds": time.perf_counter() - start})
        return
    out = console()
    out.print(orders_table(rows))
    out.print("time: of a step; per micro-batch and rank, forward takes 1 and backward 2")
    out.print("stored: most micro-batches of activations on a rank")


def _print_growth(ranks: int, as_json: bool, start: float) -> None:
    """Compare the classic all-reduces: how they grow with the ranks, and exact counts for these."""
    from ..reports.console import console
    from ..theory.scaling import COUNTED_RANKS, HEADS, growth_table

    rows = growth_table(ranks)
    if as_json:
        counts = [
            {
                "algorithm": r.algorithm,
                "rounds": r.counts.rounds,
                "round_share": float(r.counts.round_bytes),
                "all_share": float(r.counts.all_bytes),
                "fan_in": r.counts.fan_in,
                "orders": list(r.orders),
            }
            for r in rows
        ]
        print_json({"all_reduce": counts, "ranks": ranks, "seconds": time.perf_counter() - start})
        return
    out = console()
    for row in rows:
        name, *cells = row.cells()
        out.print(name)
        for head, cell in zip(HEADS[1:], cells, strict=True):
            out.print(f"  {head + ':':<23}{cell}")
    origin = "counted from the schedules" if ranks <= COUNTED_RANKS else "formulas from the schedules of fewer ranks"
    out.print(f"N bytes, P = {ranks} ranks; {origin}")
