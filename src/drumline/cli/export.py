"""`drumline export`: the weights of a checkpoint as plain safetensors, for any other program."""

from __future__ import annotations

import typer

from ..core.errors import InputError


def export(
    checkpoint: str = typer.Argument(..., metavar="CHECKPOINT", help="A checkpoint, or a run's folder of them."),
    output: str = typer.Option(..., "--output", "-o", help="The new folder."),
    largest: str = typer.Option("5GB", "--max-shard-size", help="Split larger models into files of this size."),
    tied: str = typer.Option("once", "--tied", help="Write a shared weight `once`, or under `each` of its names."),
    ema: bool = typer.Option(False, "--ema", help="The averaged weights of a job with `ema`, not the last ones."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Write the weights of a checkpoint as safetensors."""
    from ..core.units import format_bytes, parse_bytes
    from ..runtime.checkpoint.export import export as write
    from .common import print_json

    if tied not in ("once", "each"):
        raise InputError(f"--tied {tied}", rule="once or each")
    try:
        size = int(parse_bytes(largest))
    except ValueError as e:
        raise InputError(f"--max-shard-size {largest}", rule=str(e)) from None
    try:
        made = write(checkpoint, output, shard_bytes=size, untie=tied == "each", ema=ema)
    except OSError as e:
        raise InputError(f"{output} cannot be written: {e.strerror}") from None
    if as_json:
        print_json({"output": output, "files": {p.name: p.stat().st_size for p in made}})
        return
    for path in made:
        print(f"{path}  {format_bytes(path.stat().st_size)}")
