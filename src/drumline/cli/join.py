"""`drumline join`: add this process as a worker to a training that runs already."""

from __future__ import annotations

import typer


def join(
    run: str = typer.Argument(..., metavar="RUN", help="The run folder of the training, on a disk that both see."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Compute gradients for a training with parameter servers, until it ends."""
    from ..loop.join import join as join_training
    from .common import print_json

    counts = join_training(run, notify=(lambda _: None) if as_json else print)
    if as_json:
        print_json(counts)
        return
    print(f"the training has ended; {counts['counted']} gradients of this worker counted, {counts['dropped']} did not")
