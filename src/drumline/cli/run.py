"""`drumline run`: start any SPMD script on local ranks."""

from __future__ import annotations

import typer

from ..core.errors import GaveUp


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="A Python script, followed by its own arguments."),
    ranks: int = typer.Option(2, "--ranks", "-n", help="Number of ranks to start."),
) -> None:
    """Start a script on local ranks, as torchrun would."""
    from ..launchers.scripts import run_script

    code, rank = run_script(script, context.args, ranks=ranks)
    if code:
        raise GaveUp(f"rank {rank} ended with exit code {code}", where=script)
