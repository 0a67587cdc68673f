"""`drumline simulate`: a step under a plan, a collective or a pipeline order, replayed on a cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from .common import Changes, measuring, print_json, warn

if TYPE_CHECKING:
    from ..loop.simulate import Simulation


def simulate(
    target: str = typer.Argument(
        ...,
        metavar="JOB|SCHEDULE",
        help="A job, a zoo name, all_reduce:ring, pipeline:1f1b; pipeline or all_reduce alone compare all of them.",
    ),
    plan: str = typer.Option("dp=1", "--plan", help="The plan of a job."),
    cluster: str = typer.Option(None, "--cluster", help="A cluster file or catalogue name (default: this machine)."),
    changes: Changes = None,
    ranks: int = typer.Option(4, "--ranks", "-n", help="Ranks of a collective or a pipeline."),
    size: str = typer.Option("1MiB", "--bytes", help="Buffer size of a collective."),
    micro: int = typer.Option(8, "--micro", help="Micro-batches of a pipeline."),
    virtual: int = typer.Option(1, "--virtual", help="Pipeline stages per rank."),
    picture: str = typer.Option(None, "--picture", metavar="SVG", help="Draw the timeline."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Replay a step, a collective or a pipeline."""
    from ..loop.simulate import simulate as run

    start = time.perf_counter()
    if target == "pipeline":
        _print_orders(ranks, micro, as_json, start)
        return
    if target == "all_reduce":
        _print_growth(ranks, as_json, start)
        return
    with measuring(quiet=as_json) as progress:
        replay = run(
            target,
            plan,
            cluster,
            changes=changes or (),
            ranks=ranks,
            size=size,
            micro=micro,
            virtual=virtual,
            notify=warn,
            progress=progress,
        )
    if picture:
        from ..core.files import write_text
        from ..reports.svg_timeline import standalone_timeline

        write_text(picture, standalone_timeline(replay.timeline, replay.title))
    if as_json:
        print_json(_document(replay) | {"seconds": time.perf_counter() - start})
    else:
        _print(replay, ranks)
        if picture:
            print(f"picture: {picture}")


def _document(replay: Simulation) -> dict[str, Any]:
    """The JSON document."""
    value: dict[str, Any] = {
        "step_seconds": replay.step_seconds,
        "parts": replay.parts,
        "critical_path": replay.critical_path,
    }
    if replay.planned_seconds is not None:
        value["planned_seconds"] = replay.planned_seconds
    if replay.pipeline is not None:
        value |= {"bubble": replay.bubble, "held": replay.activations}
    return value


def _print(replay: Simulation, ranks: int) -> None:
    from ..core.units import format_seconds
    from ..reports.console import console
    from ..reports.plan_text import estimate_lines
    from ..reports.schedule_text import draw_collective, draw_pipeline

    out = console()
    if replay.pipeline is not None:
        assert replay.bubble is not None
        out.print(draw_pipeline(replay.pipeline, width=out.width))
        out.print(f"bubble {100 * replay.bubble:.1f}% (per micro-batch and rank: forward 1, backward 2 units of time)")
        out.print(f"at most {replay.activations:g} micro-batches of activations stored on a rank")
    elif replay.schedule is not None:
        if ranks <= 16:
            out.print(draw_collective(replay.schedule, width=out.width))
        out.print(str(replay.schedule))
        out.print(f"{replay.title}: {format_seconds(replay.step_seconds)}")
    elif replay.estimate is not None:
        out.print(replay.title)
        out.print(estimate_lines(replay.estimate))
        out.print(f"replayed: {format_seconds(replay.step_seconds)}, {len(replay.timeline.spans)} spans")
        if replay.planned_by:
            out.print(
                "The replay prices each operator at the rates of the data sheet; `drumline plan` predicts "
                f"{format_seconds(replay.planned_seconds or 0.0)} for this step, by {replay.planned_by}."
            )


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
    from ..theory.scaling import HEADS, growth_table

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
    out.print(f"N bytes, P = {ranks} ranks; counted from the schedules")
