"""`drumline simulate`: a step under a plan, or a collective or pipeline order, replayed on a cluster."""

from __future__ import annotations

import time

import typer

from ..core.errors import InputError, nearest
from .common import Changes


def simulate(
    target: str = typer.Argument(
        ...,
        metavar="JOB|SCHEDULE",
        help="A job, a zoo name, or a schedule: all_reduce:ring, pipeline:1f1b; pipeline or all_reduce alone: a table.",
    ),
    plan: str = typer.Option("dp=1", "--plan", help="The plan of a job."),
    cluster: str = typer.Option(None, "--cluster", help="A cluster file or a name of the catalogue (default: here)."),
    changes: Changes = None,
    ranks: int = typer.Option(4, "--ranks", "-n", help="Ranks of a collective or a pipeline."),
    size: str = typer.Option("1MiB", "--bytes", help="Bytes of a collective's buffer."),
    micro: int = typer.Option(8, "--micro", help="Micro-batches of a pipeline."),
    virtual: int = typer.Option(1, "--virtual", help="Stages a rank of a pipeline."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Replay a step, a collective or a pipeline."""
    start = time.perf_counter()
    kind, _, name = target.partition(":")
    if target == "pipeline":
        _orders(ranks, micro, as_json, start)
    elif target == "all_reduce":
        _growth(ranks, as_json, start)
    elif kind == "pipeline":
        _pipeline(name, ranks, micro, virtual, as_json, start)
    elif kind in _collectives():
        _collective(kind, name, ranks, size, cluster, changes, as_json, start)
    else:
        _step(target, plan, cluster, changes, as_json, start)


def _collectives() -> dict[str, dict[str, object]]:
    from ..schedules import ALGORITHMS

    return ALGORITHMS  # type: ignore[return-value]  # only its keys are looked at


def _pipeline(name: str, ranks: int, micro: int, virtual: int, as_json: bool, start: float) -> None:
    from ..reports.draw import draw_pipeline
    from ..reports.text import console
    from ..schedules import pipeline_order, prove_pipeline
    from ..simulator import bubble, replay_in_thirds
    from .common import print_json

    order = pipeline_order(name, ranks, micro, virtual)
    timeline = replay_in_thirds(order)
    share = bubble(timeline)
    held = max(prove_pipeline(order).held) / virtual
    if as_json:
        parts = {"compute": timeline.seconds * (1 - share), "bubble": timeline.seconds * share}
        print_json(
            {
                "step_seconds": timeline.seconds,
                "parts": parts,
                "critical_path": _last(timeline),
                "bubble": share,
                "held": held,
                "seconds": time.perf_counter() - start,
            }
        )
        return
    out = console()
    out.print(draw_pipeline(order, width=out.width))
    out.print(f"bubble {100 * share:.1f}% (a rank's forward 1, backward 2 units of time a micro-batch)")
    out.print(f"at most {held:g} micro-batches of a rank's activations at once")


def _orders(ranks: int, micro: int, as_json: bool, start: float) -> None:
    """All orders side by side, on the same work: the one table of the choice."""
    from ..reports.orders import order_rows, orders_table
    from ..reports.text import console
    from .common import print_json

    rows = order_rows(ranks, micro)
    if as_json:
        orders = [
            {"order": r.name, "virtual": r.virtual, "step_seconds": r.seconds, "bubble": r.bubble, "held": r.held}
            for r in rows
        ]
        print_json({"orders": orders, "seconds": time.perf_counter() - start})
        return
    console().print(orders_table(rows))
    console().print("time of a step, where a rank's forward takes 1 and its backward 2 a micro-batch;")
    console().print("held: the most micro-batches of a rank's activations at once")


def _growth(ranks: int, as_json: bool, start: float) -> None:
    """The classic all-reduces side by side: how they grow with the ranks, and exact counts for these."""
    from ..reports.text import console
    from ..theory.scaling import HEADS, growth_table
    from .common import print_json

    rows = growth_table(ranks)
    if as_json:
        found = [
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
        print_json({"all_reduce": found, "ranks": ranks, "seconds": time.perf_counter() - start})
        return
    out = console()
    for row in rows:
        name, *cells = row.cells()
        out.print(name)
        for head, cell in zip(HEADS[1:], cells, strict=True):
            out.print(f"  {head + ':':<23}{cell}")
    out.print(f"N bytes, P = {ranks} ranks; counted from the schedules")


def _collective(
    kind: str,
    name: str,
    ranks: int,
    size: str,
    cluster: str | None,
    changes: list[str] | None,
    as_json: bool,
    start: float,
) -> None:
    from ..core.units import format_seconds, parse_bytes
    from ..reports.draw import draw_collective
    from ..reports.text import console
    from ..schedules import ALGORITHMS, collective_schedule
    from ..simulator import replay
    from .common import cluster_of, print_json

    if name not in ALGORITHMS[kind]:
        known = tuple(ALGORITHMS[kind])
        rule = f"one of {', '.join(known)}"
        raise InputError(f"no algorithm {name!r} for {kind}", rule=rule, fix=nearest(name, known))
    if not 1 <= ranks <= 4096:
        raise InputError(f"--ranks {ranks}", rule="from 1 to 4096 ranks")
    try:
        m = int(parse_bytes(size))
    except ValueError as e:
        raise InputError(f"--bytes {size}", rule=str(e)) from None
    schedule = collective_schedule(kind, name, ranks)
    machines, _ = cluster_of(cluster, None, None, changes=changes, say=not as_json)
    timeline = replay(schedule, m, machines.node.link)
    if as_json:
        print_json(
            {
                "step_seconds": timeline.seconds,
                "parts": {"communication": timeline.seconds},
                "critical_path": _last(timeline),
                "seconds": time.perf_counter() - start,
            }
        )
        return
    out = console()
    if ranks <= 16:
        out.print(draw_collective(schedule, width=out.width))
    out.print(str(schedule))
    out.print(f"{size} on {machines.name}'s node link: {format_seconds(timeline.seconds)}")


def _step(target: str, plan: str, cluster: str | None, changes: list[str] | None, as_json: bool, start: float) -> None:
    from ..core.units import format_seconds
    from ..costs import estimate
    from ..planner.prices import by_fit, prices
    from ..plans import check
    from ..reports.text import console, estimate_lines
    from ..simulator.step import simulate_step
    from .common import cluster_of, plan_of, print_json, profile_of
    from .corrections import with_corrections

    chosen = plan_of(plan)
    check(chosen)
    machines, _ = cluster_of(cluster, chosen.ranks if cluster else None, None, changes=changes, say=not as_json)
    machines = with_corrections(machines, None, use=False)  # the replay knows none
    if chosen.ranks > machines.devices:
        raise InputError(
            f"{chosen} takes {chosen.ranks} ranks",
            rule=f"{machines.name} has {machines.devices} devices",
            fix=f"--cluster NAME, or a file from `drumline measure --ranks {chosen.ranks}`",
        )
    profile = profile_of(target)
    predicted = estimate(profile, chosen, machines)
    timeline = simulate_step(profile, chosen, machines, predicted)
    fitted = by_fit(prices(profile, machines, chosen.precision))
    planned = fitted.estimate(chosen).step_seconds if fitted is not None else predicted.step_seconds
    if as_json:
        print_json(
            {
                "step_seconds": timeline.seconds,
                "planned_seconds": planned,
                "parts": predicted.parts,
                "critical_path": _last(timeline),
                "seconds": time.perf_counter() - start,
            }
        )
        return
    out = console()
    out.print(f"{profile.name} with {chosen} on {machines.name}")
    out.print(estimate_lines(predicted))
    out.print(f"replayed: {format_seconds(timeline.seconds)}, {len(timeline.spans)} spans")
    if fitted is not None:
        told = f"`drumline plan` prices this step at {format_seconds(planned)}, by {fitted.says}"
        out.print(f"The replay goes operator by operator, at the rates of the data sheet; {told}.")


def _last(timeline: object) -> list[str]:
    """The names of the spans that the end waited for: from the last back, each starting when another ended."""
    from ..core.timeline import Timeline

    assert isinstance(timeline, Timeline)
    path = []
    moment = max((s.end for s in timeline.spans), default=0.0)
    spans = sorted(timeline.spans, key=lambda s: s.end)
    while spans:
        s = spans.pop()
        if abs(s.end - moment) <= 1e-12 + 1e-9 * moment:
            path.append(s.name)
            moment = s.start
    return path[::-1]
