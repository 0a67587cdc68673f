"""`drumline bench`: how long collectives take over sizes, algorithms and transports, beside what was predicted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import InputError
from ..core.units import format_bytes, format_rate, format_seconds
from .benchargs import TRANSPORTS, algorithms_of, cluster_of, collectives_of, dtype_of, parse_sizes, transports_of

if TYPE_CHECKING:
    from ..measurement.benchconfig import Config, Outcome
    from ..reports.bench import Result


def bench(
    collectives: Annotated[
        list[str] | None, typer.Argument(help="Such as all_reduce, latency, bandwidth (default: all).")
    ] = None,
    ranks: int = typer.Option(2, "--ranks", "-n", help="Ranks to start."),
    sizes: str = typer.Option("8..16MiB", "--sizes", help="8..16MiB (times 8), 8..16MiB:2 (times 2), or 8,1MiB."),
    algorithms: str = typer.Option("all", "--algorithms", help="all, or names: ring,halving,ring*4,native,auto."),
    transports: str = typer.Option("gloo", "--transports", help=f"Of {', '.join(TRANSPORTS)}."),
    dtype: str = typer.Option("float32", "--dtype", help="Type of the elements."),
    seconds: float = typer.Option(20.0, "--seconds", help="About how long to measure in all."),
    cluster: str = typer.Option(None, "--cluster", help="What auto chooses by (default: the links measured first)."),
    save: str = typer.Option(None, "--save", help="Write the measured tables into this cluster file, for auto."),
    pairs: bool = typer.Option(False, "--pairs", help="Also measure the link of every pair of ranks."),
    picture: str = typer.Option(None, "--picture", help="Write a page with time over size."),
    details: bool = typer.Option(False, "--details", help="Print every algorithm, not only the best."),
    listing: bool = typer.Option(False, "--list", help="Only list the algorithms: rounds, bytes, messages, fan-in."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Measure collectives and messages between ranks (20 s)."""
    if ranks < 1 or seconds <= 0:
        raise InputError(f"--ranks {ranks} --seconds {seconds:g}", rule="at least one rank, more than 0 seconds")
    names = collectives_of(collectives or [])
    if listing:
        _list(names, ranks, as_json=as_json)
        return
    from ..measurement.benchconfig import Config

    config = Config(
        names,
        parse_sizes(sizes),
        algorithms_of(algorithms, names),
        transports_of(transports),
        dtype_of(dtype),
        seconds,
        cluster_of(cluster),
        pairs,
    )
    outcome = measured(config, ranks, quiet=as_json)
    if outcome is None:
        return  # another rank prints
    _write(outcome, ranks, save, picture, quiet=as_json)
    if as_json:
        from .common import print_json

        print_json(document(outcome))
    else:
        _print(outcome, details=details or algorithms not in ("all", "auto"))


def measured(config: Config, ranks: int, *, quiet: bool) -> Outcome | None:
    """Start the ranks, or be one of those that a launcher started; None on all but the first of these."""
    from dataclasses import replace

    from ..comm.environment import disconnect, place
    from ..launchers import run_ranks
    from ..measurement.bench import bench_rank, bench_threads
    from ..measurement.benchconfig import Outcome

    outcome, where = Outcome(), place()
    between = tuple(t for t in config.transports if t != "threads")
    share = config.seconds / len(config.transports)
    if where.size > 1:
        outcome = bench_rank(_nothing, replace(config, transports=between))
        disconnect()
        return outcome if where.rank == 0 else None
    if "mpi" in between:
        raise InputError(
            "transport mpi without mpiexec",
            rule="MPI's ranks are started by MPI",
            fix=f"mpiexec -n {ranks} drumline bench --transports mpi",
        )
    with _Progress(quiet=quiet) as progress:
        if "threads" in config.transports:
            outcome.add(bench_threads(progress, replace(config, transports=("threads",), seconds=share), ranks))
        if between:
            part = replace(config, transports=between, seconds=share * len(between))
            outcome.add(run_ranks(bench_rank, part, ranks=ranks, on_event=lambda rank, event: progress(event))[0])
    return outcome


def document(outcome: Outcome) -> dict[str, Any]:
    """What `--json` prints."""
    from ..reports.bench import verdicts

    return {
        "results": [r.plain() for r in outcome.results],
        "links": {
            name: {"alpha": link.alpha, "bandwidth": link.bandwidth, "error": error}
            for name, (link, error) in outcome.links.items()
        },
        "auto": [
            {
                "collective": v.best.collective,
                "transport": v.best.transport,
                "bytes": v.best.bytes,
                "best": v.best.label,
                "chosen": v.auto.chosen,
                "ratio": v.ratio,
            }
            for v in verdicts(outcome.results)
            if v.auto is not None
        ],
        "left_out": outcome.left_out,
    }


class _Progress:
    """A bar on a terminal, a line for each size elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._last = quiet, ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            from ..reports.text import console

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """One thing begins."""
        name, size = event["what"].split(" ")
        if self._bar is not None:
            text = f"{event['name']} {name} {format_bytes(int(size))}"
            self._bar.update(self._task, completed=event["done"], total=event["total"], description=text)
        elif not self._quiet and (line := f"measuring {format_bytes(int(size))} over {event['name']}") != self._last:
            self._last = line
            print(line, file=sys.stderr, flush=True)


def _list(names: tuple[str, ...], ranks: int, *, as_json: bool) -> None:
    from ..schedules.listing import HEADS
    from ..schedules.listing import listing as rows_of
    from .common import print_json

    rows = [row for row in rows_of(ranks) if row.collective in names]
    if as_json:
        print_json({"algorithms": [dict(zip(HEADS, row.cells(), strict=True)) for row in rows]})
        return
    from rich.table import Table

    from ..reports.text import NARROW, console

    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 1 if out.width < NARROW else 2, 0, 0), show_edge=False)
    for i, head in enumerate(HEADS):
        table.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.cells())
    out.print(table)
    out.print(f"{ranks} ranks, m bytes in the whole buffer; native is what a transport itself offers")


def _print(outcome: Outcome, *, details: bool) -> None:
    from ..reports.bench import summary
    from ..reports.benchtext import bench_tables
    from ..reports.text import console

    out = console()
    for name, (link, error) in outcome.links.items():
        out.print(
            f"messages over {name}: alpha {format_seconds(link.alpha)}, {format_rate(link.bandwidth)} "
            f"(fit off by {100 * error:.0f}%)"
        )
    for title, table in bench_tables(outcome.results, width=out.width, details=details):
        out.print(f"\n{title}", style="bold")
        out.print(table)
    if text := summary(outcome.results):
        out.print(f"\n{text}")
    if outcome.left_out:
        first, rest = outcome.left_out[:3], len(outcome.left_out) - 3
        more = f" and {rest} more" if rest > 0 else ""
        out.print(f"\nleft out, for lack of time: {'; '.join(first)}{more} (--seconds)")


def _write(outcome: Outcome, ranks: int, save: str | None, picture: str | None, *, quiet: bool) -> None:
    """The files that were asked for."""
    import datetime
    import platform
    from pathlib import Path

    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    stamp = f"measured {when} on {platform.node()}, {ranks} ranks, by drumline bench"
    said: Callable[[str], None] = lambda text: None if quiet else print(text, file=sys.stderr)  # noqa: E731
    if save is not None:
        from ..clusters import Cluster
        from ..measurement.tables import with_tables
        from .common import this_machine

        base = Cluster.load(save) if Path(save).exists() else this_machine(ranks, say=not quiet)
        with_tables(base, outcome, stamp).save(save)
        said(f"tables written to {save}")
    if picture is not None:
        from ..core import files
        from ..reports.bench import page, summary

        title = f"Collectives of {ranks} ranks: {_headline(outcome.results)}"
        files.write_text(picture, page(outcome.results, title=title, notes=[stamp, summary(outcome.results)]))
        said(f"picture written to {picture}")


def _headline(results: list[Result]) -> str:
    transports = ", ".join(dict.fromkeys(r.transport for r in results))
    sizes = sorted({r.bytes for r in results if r.bytes})
    return f"{transports}, {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}" if sizes else transports


def _nothing(record: dict[str, Any]) -> None:
    """Ranks of another launcher have nobody to report to while they run."""
