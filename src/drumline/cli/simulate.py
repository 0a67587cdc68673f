"""`drumline simulate`: a step under a plan, a collective or a pipeline order, replayed on a cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
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
    plan: str = typer.Option(None, "--plan", autocompletion=complete_plan, help="The plan of a job (dp=1)."),
    cluster: str = typer.Option(
        None,
        "--cluster",
        autocompletion=complete_cluster,
        help="A cluster file or catalogue name (default: this machine).",
    ),
    changes: Changes = None,
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks of a collective or a pipeline (4)."),
    size: str = typer.Option(None, "--bytes", help="Buffer size of a collective (1MiB)."),
    micro: int = typer.Option(None, "--micro", help="Micro-batches of a pipeline (8)."),
    virtual: int = typer.Option(None, "--virtual", help="Pipeline stages per rank (1)."),
    batch: int = typer.Option(None, "--batch", help="Samples per step of a job (default: its own)."),
    sequence: int = typer.Option(None, "--sequence", help="Tokens per sample of a zoo model."),
    devices: int = typer.Option(None, "--devices", help="Check that the plan takes this many devices."),
    slow: Slow = None,
    jitter: Jitter = None,
    slow_links: SlowLinks = None,
    mtbf: str = typer.Option(None, "--mtbf", help=f"Goodput with failures: {MTBF}"),
    restart: str = typer.Option(None, "--restart", help="With --mtbf: from a failure until training goes on (5min)."),
    days: float = typer.Option(None, "--days", help="With --mtbf: days to replay (30)."),
    seed: int = typer.Option(None, "--seed", help="Seed of jitter and failures (default: the cluster's, 0)."),
    sweep: str = typer.Option(None, "--sweep", metavar="N,N,...", help="Numbers of devices: the plan with other dp."),
    scaling: str = typer.Option(None, "--scaling", help="With --sweep: strong (same batch, the default) or weak."),
    no_corrections: NoCorrections = False,
    picture: str = typer.Option(None, "--picture", metavar="SVG", help="Draw the timeline."),
    page: str = typer.Option(
        None, "--page", metavar="HTML", help="Write a page: pictures of a step, or a schedule played round by round."
    ),
    trace: str = typer.Option(None, "--trace", metavar="FILE", help="Write the timeline for Perfetto."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Replay a step, a collective or a pipeline."""
    from ..loop.simulate import simulate as run

    start = time.perf_counter()
    asked: dict[str, Any] = {"plan": plan, "cluster": cluster, "changes": changes or (), "ranks": ranks, "size": size}
    asked |= {"micro": micro, "virtual": virtual, "batch": batch, "sequence": sequence, "devices": devices}
    asked |= {"slow": slow, "jitter": jitter, "slow_links": slow_links or (), "corrections": not no_corrections}
    asked |= {"seed": seed, "mtbf": mtbf, "restart": restart, "days": days}
    files = {"picture": picture, "page": page, "trace": trace}
    if target in ("pipeline", "all_reduce"):
        _compare(target, asked | {"sweep": sweep, "scaling": scaling}, files, as_json, start)
        return
    if scaling is not None and sweep is None:
        raise InputError(
            f"--scaling {scaling} without --sweep", rule="it says how a sweep scales", fix="--sweep 8,16,32"
        )
    with measuring(quiet=as_json) as progress:
        shown: dict[str, Any] = {"notify": warn, "progress": progress}
        if sweep is not None:
            _sweep(target, sweep, scaling, asked, files, shown, as_json)
            return
        replay = run(target, **asked, **shown)
    written = _write_files(replay, picture, page, trace)
    if as_json:
        print_json(_document(replay) | {"seconds": time.perf_counter() - start} | written)
    else:
        _print(replay)
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


def _compare(target: str, asked: dict[str, Any], files: Mapping[str, str | None], as_json: bool, start: float) -> None:
    """All pipeline orders, or all all-reduces."""
    from ..loop.simulate import MICRO, RANKS
    from ..loop.simulation_options import (
        ALL_COLLECTIVES,
        ALL_PIPELINES,
        MOST_COMPARED_PASSES,
        refuse_many_passes,
        refuse_other_options,
    )

    if name := next((name for name, value in files.items() if value), None):
        example = {"pipeline": "pipeline:1f1b", "all_reduce": "all_reduce:ring"}[target]
        raise InputError(f"--{name} of {target}", rule=f"a {name} is of one replay", fix=example)
    refuse_other_options(target, ALL_PIPELINES if target == "pipeline" else ALL_COLLECTIVES, asked)
    ranks = RANKS if asked["ranks"] is None else asked["ranks"]
    if target == "all_reduce":
        _print_growth(ranks, as_json, start)
        return
    micro = MICRO if asked["micro"] is None else asked["micro"]
    refuse_many_passes(target, ranks, micro, most=MOST_COMPARED_PASSES)
    _print_orders(ranks, micro, as_json, start)


def _sweep(
    target: str,
    sweep: str,
    scaling: str | None,
    asked: dict[str, Any],
    files: Mapping[str, str | None],
    shown: dict[str, Any],
    as_json: bool,
) -> None:
    """One plan on several numbers of devices."""
    from ..loop.simulation_options import refuse_other_options, target_kind

    refuse_other_options(target, target_kind(target), asked | {"sweep": sweep})
    once = ("devices", "mtbf", "restart", "days")
    given = [f"--{name}" for name in (*once, *files) if {**asked, **files}[name] is not None]
    if given:
        raise InputError(
            f"--sweep with {given[0]}", rule="a sweep is a table of step times", fix=f"leave out {given[0]}"
        )
    of_steps = ("changes", "batch", "sequence", "slow", "jitter", "slow_links", "seed", "corrections")
    options = {name: asked[name] for name in of_steps} | shown
    plan, cluster = asked["plan"] or "dp=1", asked["cluster"]
    print_sweep(target, plan, cluster, device_counts(sweep), scaling or "strong", options, as_json=as_json)


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


def _print(replay: Simulation) -> None:
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
        if replay.schedule.p <= 16:
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
