"""`drumline run`: start any SPMD script on local ranks, or on those of another launcher."""

from __future__ import annotations

import typer

from ..core.errors import GaveUp, InputError
from ..core.rank_info import is_launched, rank_info


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="A Python script, followed by its own arguments."),
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks to start (default: 2, or the launcher's)."),
    restarts: int = typer.Option(0, "--restarts", metavar="N", help="Start all ranks again after a failure, N times."),
    hang_timeout: str = typer.Option(None, "--hang-timeout", help="End ranks of the engine that hang for so long."),
    chaos: str = typer.Option("", "--chaos", metavar="FAULTS", help="Inject faults into the engine: `kill:1@5`."),
) -> None:
    """Start a script on local ranks, as torchrun would; under another launcher, run it on this rank."""
    from ..launchers.scripts import ended_with, join_script, run_script
    from ..loop.restarts import FaultOptions
    from .common import warn

    if is_launched():
        where = rank_info()
        if ranks not in (None, where.size):
            raise InputError(
                f"--ranks {ranks}, but {where.launcher} started {where.size}",
                rule="the launcher decides the number of ranks",
                fix="leave --ranks out",
            )
        join_script(script, context.args)
    options = FaultOptions(restarts, hang_timeout, chaos=chaos)
    options.check()
    code, rank = run_script(
        script,
        context.args,
        ranks=2 if ranks is None else ranks,
        restarts=restarts,
        chaos=chaos,
        watch=options.watch() if hang_timeout else None,
        notify=warn,
    )
    if code:
        raise GaveUp(f"rank {rank} ended {ended_with(code)}", where=script)
