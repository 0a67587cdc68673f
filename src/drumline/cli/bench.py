"""`drumline bench`: measure collectives over sizes, algorithms and transports, and compare with predictions."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import InputError, nearest
from ..core.rank_info import is_first_rank, is_launched, rank_info
from ..core.units import format_bytes, format_rate, format_seconds, parse_bytes
from .common import measuring, print_json, warn
from .completion import complete_cluster

if TYPE_CHECKING:
    from ..measurement.bench_config import BenchOutcome

TRANSPORTS = ("threads", "gloo", "shm", "nccl", "mpi")
_FACTOR = 8
"""Between two sizes of a range, by default."""
_LARGEST = 2**34


def bench(
    collectives: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks, such as all_reduce, latency, bandwidth (default: all).")
    ] = None,
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks to start (default: 2, or the launcher's)."),
    sizes: str = typer.Option("8..16MiB", "--sizes", help="8..16MiB (factor 8), 8..16MiB:2 (factor 2), or 8,1MiB."),
    algorithms: str = typer.Option("all", "--algorithms", help="all, or names: ring,halving,ring*4,native,auto."),
    transports: str = typer.Option("gloo", "--transports", help=f"Names from {', '.join(TRANSPORTS)}."),
    dtype: str = typer.Option("float32", "--dtype", help="Element type."),
    seconds: float = typer.Option(20.0, "--seconds", help="Approximate total time."),
    cluster: str = typer.Option(
        None, "--cluster", autocompletion=complete_cluster, help="Links for auto's choice (default: measured first)."
    ),
    save: str = typer.Option(None, "--save", help="Add the measured tables to this cluster file, for auto."),
    pairs: bool = typer.Option(False, "--pairs", help="Also measure the link of every pair of ranks."),
    picture: str = typer.Option(None, "--picture", help="Write a page with time over size."),
    details: bool = typer.Option(False, "--details", help="Print every algorithm, not only the best."),
    listing: bool = typer.Option(False, "--list", help="Only list the algorithms: rounds, bytes, messages, fan-in."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Measure collectives and messages between ranks (20 s)."""
    ranks = (rank_info().size if is_launched() else 2) if ranks is None else ranks
    if ranks < 1 or seconds <= 0:
        raise InputError(f"--ranks {ranks} --seconds {seconds:g}", rule="at least one rank, more than 0 seconds")
    names = parse_collectives(collectives or [])
    if listing:
        _print_list(names, ranks, as_json=as_json)
        return
    from ..clusters import load
    from ..loop.bench import run_bench, write_bench_page
    from ..measurement.bench_config import BenchConfig

    config = BenchConfig(
        names,
        parse_sizes(sizes),
        parse_algorithms(algorithms, names),
        parse_transports(transports),
        parse_dtype(dtype),
        seconds,
        None if cluster is None else load(cluster),
        pairs,
    )
    with _Progress(quiet=as_json) as progress, measuring(quiet=as_json) as measured:
        outcome = run_bench(config, ranks, progress, save=save, notify=warn, progress=measured)
    if not is_first_rank():
        return
    if picture is not None:
        write_bench_page(picture, outcome.results, ranks)
    if as_json:
        print_json(_document(outcome))
        return
    for what, path in (("tables", save), ("picture", picture)):
        if path is not None:
            print(f"{what} written to {path}", file=sys.stderr)
    _print(outcome, details=details or algorithms not in ("all", "auto"))


# ---- options


def parse_sizes(text: str) -> tuple[int, ...]:
    """`8..1MiB` with a factor of eight, `8..1MiB:2` with two, or a list of sizes and ranges; sorted, each once."""
    sizes: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, dots, last = span.partition("..")
        try:
            factor = float(step) if step else float(_FACTOR)
            size, end = round(parse_bytes(first)), round(parse_bytes(last if dots else first))
        except ValueError as e:
            raise InputError(f"--sizes {text}", rule=str(e), fix="such as 8..16MiB or 8,4KiB,1MiB") from None
        if not 1 <= size <= end <= _LARGEST or factor <= 1:
            raise InputError(f"--sizes {part}", rule=f"1 <= first <= last <= {format_bytes(_LARGEST)}, factor > 1")
        sizes.add(end)
        while size < end:
            sizes.add(size)
            size = max(size + 1, round(size * factor))
    return tuple(sorted(sizes))


def parse_collectives(names: Iterable[str]) -> tuple[str, ...]:
    """The named collectives, or all."""
    from ..measurement.bench_config import MESSAGES
    from ..schedules import ALGORITHMS

    known = (*MESSAGES, *ALGORITHMS)
    return tuple(_known("collective", name, known) for name in dict.fromkeys(names)) or known


def parse_algorithms(text: str, collectives: tuple[str, ...]) -> tuple[str, ...]:
    """Names between commas, each known to at least one of the collectives."""
    from ..measurement.bench_config import parse_algorithm
    from ..schedules import ALGORITHMS

    if text == "all":
        return ("all",)
    known = {"auto", "native", *(a for c in collectives for a in ALGORITHMS.get(c, ()))}
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if parse_algorithm(name)[0] not in known:
            raise InputError(
                f"unknown algorithm {name!r}",
                rule=f"known here: all, {', '.join(sorted(known))}",
                fix=nearest(name, known),
            )
    return names


def parse_transports(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(_known("transport", name, TRANSPORTS) for name in dict.fromkeys(text.split(",")))


def _known(what: str, name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise InputError(f"unknown {what} {name!r}", rule=f"known: {', '.join(known)}", fix=nearest(name, known))
    return name


def parse_dtype(name: str) -> str:
    """An element type."""
    from ..measurement.bench_config import DTYPES

    if name not in DTYPES:
        raise InputError(f"--dtype {name}", rule=f"known: {', '.join(DTYPES)}", fix=nearest(name, DTYPES))
    return name


# ---- output


class _Progress:
    """A bar on a terminal, a line for each size elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._last = quiet, ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> _Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            from ..reports.console import console

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting the ranks", total=1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """The next case begins."""
        name, size = event["what"].split(" ")
        if self._bar is not None:
            text = f"{event['name']} {name} {format_bytes(int(size))}"
            self._bar.update(self._task, completed=event["done"], total=event["total"], description=text)
        elif not self._quiet and (line := f"measuring {format_bytes(int(size))} over {event['name']}") != self._last:
            self._last = line
            print(line, file=sys.stderr, flush=True)


def _document(outcome: BenchOutcome) -> dict[str, Any]:
    """The JSON document."""
    from ..reports.bench_results import verdicts

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
        "left_out": outcome.skipped,
    }


def _print_list(names: tuple[str, ...], ranks: int, *, as_json: bool) -> None:
    from ..schedules.listing import HEADS
    from ..schedules.listing import listing as all_rows

    rows = [row for row in all_rows(ranks) if row.collective in names]
    if as_json:
        print_json({"algorithms": [dict(zip(HEADS, row.cells(), strict=True)) for row in rows]})
        return
    from ..reports.console import NARROW, borderless_table, console

    out = console()
    table = borderless_table(gap=1 if out.width < NARROW else 2)
    for i, head in enumerate(HEADS):
        table.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.cells())
    out.print(table)
    out.print(f"{ranks} ranks, m bytes in the whole buffer; native is the transport's own implementation")


def _print(outcome: BenchOutcome, *, details: bool) -> None:
    from ..reports.bench_results import bench_tables, summary
    from ..reports.console import console

    out = console()
    for name, (link, error) in outcome.links.items():
        out.print(
            f"messages over {name}: alpha {format_seconds(link.alpha)}, {format_rate(link.bandwidth)} "
            f"(mean error of the fit {100 * error:.0f}%)"
        )
    for title, table in bench_tables(outcome.results, width=out.width, details=details):
        out.print(f"\n{title}", style="bold")
        out.print(table)
    if text := summary(outcome.results):
        out.print(f"\n{text}")
    if outcome.skipped:
        first, rest = outcome.skipped[:3], len(outcome.skipped) - 3
        more = f" and {rest} more" if rest > 0 else ""
        out.print(f"\nnot measured, out of time: {'; '.join(first)}{more} (--seconds)")
