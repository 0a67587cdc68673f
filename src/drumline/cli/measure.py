"""`drumline measure`: measure this machine into a cluster file."""

from __future__ import annotations

import typer

NOISY = 0.1
"""A spread of the repeats above which the output says that the machine is busy."""


def measure(
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks to measure with (default: the GPUs, or the cores)."),
    output: str = typer.Option(None, "--output", "-o", help="The cluster file to write (default: in the cache)."),
    forget: bool = typer.Option(
        False, "--forget", help="Measure nothing; remove the corrections of this machine (or of --output)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Measure this machine: messages, kernels, memory (half a minute to a minute).

    Under torchrun, srun or mpiexec it measures the ranks that were started, within hosts and between them.
    """
    from ..core import files
    from ..core.rank_info import is_first_rank
    from ..loop.measure import cluster_path
    from ..loop.measure import measure as run
    from ..reports.console import console
    from .common import measuring, print_json, warn

    if forget:
        _forget(ranks, output, as_json=as_json)
        return
    with measuring(quiet=as_json) as progress:
        cluster = run(ranks=ranks, output=output, notify=warn, progress=progress)
    if not is_first_rank():
        return
    path = output or str(cluster_path(cluster))
    if as_json:
        print_json({"path": path, "cluster": files.to_plain(cluster)})
        return
    out = console()
    out.print(str(cluster))
    noisy = " (the machine is busy: measure again when it is idle)" if cluster.measurement_spread > NOISY else ""
    out.print(f"  median spread of the repeats: {100 * cluster.measurement_spread:.1f}%{noisy}")
    out.print(f"written to {path}")


def _forget(ranks: int | None, output: str | None, *, as_json: bool) -> None:
    """Remove the files of corrections, and list them."""
    from ..loop.corrections import forget_runs
    from ..reports.console import console
    from .common import print_json

    removed = [str(path) for path in forget_runs(ranks, output)]
    if as_json:
        print_json({"removed": removed})
        return
    for line in [f"removed {path}" for path in removed] or ["nothing to forget: no run has taught anything here"]:
        console().print(line)
