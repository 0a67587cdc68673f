"""Results of `drumline bench`: the values, how close "auto" came to the best, and tables that read in 40 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from ..core.units import format_bytes, format_percent, format_rate, format_seconds
from .console import NARROW, borderless_table


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One measured case."""

    collective: str
    """Or `latency`, `bandwidth`."""
    transport: str
    algorithm: str
    ranks: int
    bytes: int
    """Of the whole buffer; of one message for latency and bandwidth."""
    seconds: float
    """Median over the repeats of the slowest rank's time."""
    predicted_seconds: float | None
    """From its schedule and the links measured in the same run; None if it has no schedule."""
    segments: int = 1
    spread: float = 0.0
    """Half of the interquartile range over the median."""
    chosen: str = ""
    """The algorithm that `auto` ran."""

    @property
    def label(self) -> str:
        """`ring`, or `ring*4` in four segments."""
        return self.algorithm if self.segments == 1 else f"{self.algorithm}*{self.segments}"

    @property
    def algorithmic(self) -> float:
        """Bytes of the buffer per second."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def bus(self) -> float:
        """Least bytes per second on a link (bus bandwidth): comparable across collectives and numbers of ranks."""
        p = self.ranks
        share = {"all_reduce": 2 * (p - 1) / p}.get(self.collective)
        if share is None:
            shared = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
            share = (p - 1) / p if self.collective in shared else 1.0
        return self.algorithmic * share

    def plain(self) -> dict[str, object]:
        """For a JSON document."""
        return {
            "collective": self.collective,
            "transport": self.transport,
            "algorithm": self.algorithm,
            "segments": self.segments,
            "ranks": self.ranks,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "predicted_seconds": self.predicted_seconds,
            "algbw": self.algorithmic,
            "busbw": self.bus,
            "spread": self.spread,
            **({"chosen": self.chosen} if self.chosen else {}),
        }


@dataclass(frozen=True, slots=True)
class AutoVerdict:
    """The fastest algorithm for one collective and size, and what "auto" ran."""

    best: BenchResult
    auto: BenchResult | None
    ran: BenchResult | None
    """The algorithm that auto chose, measured under its own name; auto itself if it was not."""

    @property
    def ratio(self) -> float | None:
        """Time of auto's choice over the best time: 1 if it chose the best."""
        return None if self.ran is None else self.ran.seconds / self.best.seconds


Group = tuple[str, str]
"""(transport, collective)."""


def groups(results: Iterable[BenchResult]) -> dict[Group, dict[int, list[BenchResult]]]:
    """By transport and collective, then by size, the fastest first."""
    by_group: dict[Group, dict[int, list[BenchResult]]] = {}
    for r in results:
        by_group.setdefault((r.transport, r.collective), {}).setdefault(r.bytes, []).append(r)
    return {
        key: {size: sorted(sizes[size], key=lambda r: r.seconds) for size in sorted(sizes)}
        for key, sizes in by_group.items()
    }


def verdicts(results: Iterable[BenchResult]) -> list[AutoVerdict]:
    """One for each collective and size for which a named algorithm was measured."""
    judged = []
    for sizes in groups(results).values():
        for rows in sizes.values():
            named = [r for r in rows if r.algorithm != "auto"]
            if named:
                auto = next((r for r in rows if r.algorithm == "auto"), None)
                ran = next((r for r in named if auto is not None and r.label == auto.chosen), auto)
                judged.append(AutoVerdict(named[0], auto, ran))
    return judged


def summary(results: Sequence[BenchResult]) -> str:
    """How close auto came to the best over all cases, in a sentence."""
    judged = [v for v in verdicts(results) if v.ratio is not None]
    if not judged:
        return ""
    near = sum(v.ratio <= 1.1 for v in judged if v.ratio is not None)
    worst = max(judged, key=lambda v: v.ratio or 0.0)
    assert worst.auto is not None and worst.ratio is not None
    return (
        f"auto was within 10% of the best in {near} of {len(judged)} cases; at worst {worst.ratio:.2f} times the best: "
        f"{worst.best.collective} of {format_bytes(worst.best.bytes)} over {worst.best.transport}, "
        f"{worst.auto.chosen or 'auto'} against {worst.best.label}"
    )


# ---- as text


def bench_tables(results: Sequence[BenchResult], *, width: int, details: bool) -> Iterator[tuple[str, RenderableType]]:
    """A title and a table for each transport and collective. `details`: every algorithm, not only the best."""
    for (transport, collective), sizes in groups(results).items():
        yield f"{collective} over {transport}", _table(sizes, width=width, details=details)


def _table(sizes: dict[int, list[BenchResult]], *, width: int, details: bool) -> RenderableType:
    narrow = width < NARROW
    judged = not details and any(r.algorithm == "auto" for rows in sizes.values() for r in rows)
    table = borderless_table(gap=1 if narrow else 2)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("algorithm" if details else "best", overflow="fold")
    heads = ["time", "predicted", "algbw", "busbw", "spread"][:: 1 if not narrow else 5]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    if judged:
        table.add_column("auto", overflow="fold")
    for size, rows in sizes.items():
        named = [r for r in rows if details or r.algorithm != "auto"] or rows
        for r in named if details else named[:1]:
            cells = [
                format_seconds(r.seconds),
                "" if r.predicted_seconds is None else format_seconds(r.predicted_seconds),
                format_rate(r.algorithmic),
                format_rate(r.bus),
                f"{100 * r.spread:.0f}%",
            ][:: 1 if not narrow else 5]
            end = [_auto(rows, narrow=narrow)] if judged else []
            name = f"auto: {r.chosen}" if r.chosen else r.label
            table.add_row(format_bytes(size), Text(name), *cells, *end)
    return table


def _auto(rows: Sequence[BenchResult], *, narrow: bool) -> Text:
    judged = verdicts(rows)
    if not judged or judged[0].auto is None or judged[0].ratio is None:
        return Text("")
    off = format_percent(judged[0].ratio - 1)
    return Text(off if narrow else f"{judged[0].auto.chosen} {off}")
