"""Benchmarks of collectives and messages: start the ranks, measure, store the tables, write the page."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import InputError
from ..core.units import format_bytes
from .callbacks import Notify, Progress, ignore_progress, log_note
from .external_ranks import current_ranks, joins_ranks
from .measure import this_machine

if TYPE_CHECKING:
    from ..measurement.bench_config import BenchConfig, BenchOutcome
    from ..reports.bench_results import BenchResult

OnEvent = Callable[[dict[str, Any]], None]


@joins_ranks
def run_bench(
    config: BenchConfig,
    ranks: int,
    on_event: OnEvent | None = None,
    *,
    save: str | None = None,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> BenchOutcome:
    """Measure on `ranks` local ranks, or on those that a launcher started; `save` adds the tables to a cluster file."""
    from ..launchers import run_ranks
    from ..measurement.bench import bench_rank, bench_threads
    from ..measurement.bench_config import BenchOutcome

    report: OnEvent = on_event or (lambda event: None)
    outcome, joined = BenchOutcome(), current_ranks()
    between = tuple(t for t in config.transports if t != "threads")
    share = config.seconds / len(config.transports)
    if joined is not None and "threads" in config.transports:
        raise InputError(
            "transport threads on ranks that are processes",
            rule=f"{joined.launcher} started {joined.size} processes",
            fix="drumline bench --transports threads, without the launcher",
        )
    if "mpi" in between and joined is None:
        raise InputError(
            "transport mpi without mpiexec",
            rule="MPI's ranks are started by MPI",
            fix=f"mpiexec -n {ranks} drumline bench --transports mpi",
        )
    if "threads" in config.transports:
        outcome.add(bench_threads(report, replace(config, transports=("threads",), seconds=share), ranks))
    if between:
        part = replace(config, transports=between, seconds=share * len(between))
        outcome.add(run_ranks(bench_rank, part, ranks=ranks, on_event=lambda _, event: report(event))[0])
    if save is not None:
        save_bench_tables(save, outcome, ranks, notify=notify, progress=progress)
    return outcome


def bench_stamp(ranks: int) -> str:
    """When, where and with how many ranks a benchmark ran."""
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"measured {when} on {platform.node()}, {ranks} ranks, by drumline bench"


def save_bench_tables(
    path: str,
    outcome: BenchOutcome,
    ranks: int,
    *,
    notify: Notify = log_note,
    progress: Progress = ignore_progress,
) -> None:
    """Add the measured tables to a cluster file; a new file starts from this machine."""
    from ..clusters import Cluster
    from ..measurement.bench_config import with_tables

    base = Cluster.load(path) if Path(path).exists() else this_machine(ranks, notify=notify, progress=progress)
    with_tables(base, outcome, bench_stamp(ranks)).save(path)


def write_bench_page(path: str, results: Sequence[BenchResult], ranks: int) -> None:
    """Write the page with time over size."""
    from ..core import files
    from ..reports.bench_page import page
    from ..reports.bench_results import summary

    title = f"Collectives of {ranks} ranks: {_headline(results)}"
    files.write_text(path, page(results, title=title, notes=[bench_stamp(ranks), summary(results)]))


def _headline(results: Sequence[BenchResult]) -> str:
    transports = ", ".join(dict.fromkeys(r.transport for r in results))
    sizes = sorted({r.bytes for r in results if r.bytes})
    return f"{transports}, {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}" if sizes else transports
