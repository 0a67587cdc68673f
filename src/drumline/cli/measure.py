"""`drumline measure`: what this machine does per second, into a cluster file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from ..errors import InputError

if TYPE_CHECKING:
    from ..cluster import Cluster


def measure(
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks to measure with (default: the GPUs, or the cores)."),
    output: str = typer.Option(None, "--output", "-o", help="Where to write the cluster file (default: the cache)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Measure this machine: messages, kernels, memory (20 s)."""
    from pathlib import Path

    from .. import files
    from ..report.text import console
    from .common import cached, local_devices, print_json

    ranks = local_devices() if ranks is None else ranks
    if ranks < 1:
        raise InputError(f"--ranks {ranks}", rule="at least one rank")
    cluster = measure_now(ranks, quiet=as_json)
    path = Path(output) if output else cached(ranks)
    cluster.save(path)
    if as_json:
        print_json({"path": str(path), "cluster": files.to_plain(cluster)})
    else:
        console().print(str(cluster))
        console().print(f"written to {path}")


def measure_now(ranks: int, *, quiet: bool = False) -> Cluster:
    """Start the ranks, measure, and say what is being measured."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..launch import run_ranks
    from ..measure.machine import STAGES, measure_rank, to_cluster
    from ..report.text import console

    if quiet or not sys.stderr.isatty():
        return to_cluster(run_ranks(measure_rank, ranks=ranks))
    columns = (TextColumn("measuring {task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("start of the ranks", total=len(STAGES))

        def on_event(rank: int, event: dict[str, Any]) -> None:
            stage = event["measuring"]
            bar.update(task, completed=STAGES.index(stage) if stage in STAGES else None, description=stage)

        return to_cluster(run_ranks(measure_rank, ranks=ranks, on_event=on_event))
