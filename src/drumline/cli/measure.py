"""`drumline measure`: what this machine does per second, into a cluster file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import InputError

if TYPE_CHECKING:
    from ..clusters import Cluster


NOISY = 0.1
"""A spread of the repeats that a person should know of."""
BUSY, LOOKED = 0.3, 0.5
"""Cores that other programs use that a person should know of; and for how many seconds it is looked at."""


def measure(
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks to measure with (default: the GPUs, or the cores)."),
    output: str = typer.Option(None, "--output", "-o", help="Where to write the cluster file (default: the cache)."),
    forget: bool = typer.Option(
        False, "--forget", help="Remove what runs taught about predictions here (or beside --output); measure nothing."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Measure this machine: messages, kernels, memory (half a minute to a minute).

    Started by torchrun, srun or mpiexec on several hosts, it measures those ranks, inside hosts and between them.
    """
    from pathlib import Path

    from ..core import files
    from ..reports.text import console
    from .common import cached, local_devices, print_json

    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}", rule="at least one rank")
    if forget:
        _forget(ranks, output, as_json=as_json)
        return
    cluster = _launched(ranks) if _is_launched() else measure_now(ranks or local_devices(), quiet=as_json)
    if cluster is None:
        return  # the first rank speaks
    path = Path(output) if output else cached(cluster.devices)
    cluster.save(path)
    if as_json:
        print_json({"path": str(path), "cluster": files.to_plain(cluster)})
    else:
        console().print(str(cluster))
        noisy = " (the machine is busy: measure again when it is not)" if cluster.measurement_spread > NOISY else ""
        console().print(f"  repeats differ by {100 * cluster.measurement_spread:.1f}%, the median over all cases{noisy}")
        console().print(f"written to {path}")


def _forget(ranks: int | None, output: str | None, *, as_json: bool) -> None:
    """Remove the files of corrections, and say which."""
    from ..reports.text import console
    from .common import print_json
    from .corrections import forget

    removed = [str(path) for path in forget(ranks, output)]
    if as_json:
        print_json({"removed": removed})
        return
    for line in [f"removed {path}" for path in removed] or ["nothing to forget: no run has taught anything here"]:
        console().print(line)


def _is_launched() -> bool:
    """Whether something else has started ranks of this command."""
    import os

    if not {"RANK", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & os.environ.keys():
        return False  # without torch: a second sooner
    from ..comm.environment import place

    return place().size > 1


def _launched(ranks: int | None) -> Cluster | None:
    """Measure the ranks that were started; the first one has the result."""
    import torch.distributed as dist

    from ..comm.environment import connect, disconnect
    from ..measurement.machine import measure_rank, to_cluster

    where = connect()
    if ranks not in (None, where.size):
        raise InputError(
            f"--ranks {ranks}, but {where.launcher} started {where.size}",
            rule="the launcher says how many there are",
            fix="leave --ranks out",
        )
    found = measure_rank(lambda event: None)
    results: list[Any] = [None] * where.size
    dist.all_gather_object(results, found)
    disconnect()
    return to_cluster(results) if where.rank == 0 else None


def _others() -> str:
    """What other programs of this host do at the moment, if it matters: what is measured is what they leave."""
    import psutil

    cores = psutil.cpu_count() or 1
    busy = psutil.cpu_percent(interval=LOOKED) / 100 * cores
    return f"note: other programs use {busy:.1f} of {cores} cores; what they leave is measured" if busy > BUSY else ""


def measure_now(ranks: int, *, quiet: bool = False) -> Cluster:
    """Start the ranks, measure, and say what is being measured."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ..launchers import run_ranks
    from ..measurement.journal import forget
    from ..measurement.machine import STAGES, measure_rank, to_cluster
    from ..reports.text import console
    from .common import cached

    journal = f"{cached(ranks)}.part"
    if said := _others():
        console(stderr=True).print(said)
    if quiet or not sys.stderr.isatty():
        results = run_ranks(measure_rank, journal, ranks=ranks)
        forget(journal)
        return to_cluster(results)
    columns = (TextColumn("measuring {task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("start of the ranks", total=len(STAGES))

        def on_event(rank: int, event: dict[str, Any]) -> None:
            stage = event["measuring"]
            bar.update(task, completed=STAGES.index(stage) if stage in STAGES else None, description=stage)

        results = run_ranks(measure_rank, journal, ranks=ranks, on_event=on_event)
    forget(journal)
    return to_cluster(results)
