"""`drumline profile`: the model as layers, with work, depth, bytes, parameters and kept activations."""

from __future__ import annotations

import typer


def profile(
    target: str = typer.Argument(..., metavar="JOB", help="path.py, path.py:name, or a zoo name such as gpt:7b."),
    samples: int = typer.Option(None, "--samples", help="Show amounts for this many samples (default: the batch)."),
    recompute: str = typer.Option(
        None, "--recompute", metavar="cpu|cuda", help="Show what recompute=selective keeps on such a device."
    ),
    output: str = typer.Option(None, "--output", "-o", help="Write the profile, so that planning needs no torch."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Trace a model, without allocating it."""
    from .. import files
    from ..errors import InputError
    from ..report.recompute import check_kind, recompute_rows, recompute_table, recompute_totals
    from ..report.text import console, profile_table, profile_totals
    from .common import print_json, profile_of

    if samples is not None and samples < 1:
        raise InputError(f"--samples {samples}", rule="at least one sample")
    if recompute is not None:
        check_kind(recompute)
    found = profile_of(target)
    n = found.batch_size if samples is None else samples
    rows = recompute_rows(found, recompute, n) if recompute is not None else []
    if output:
        found.save(output)
    if as_json:
        depth = found.depth.at(n)
        work = found.flops().at(n)
        print_json(
            {
                "profile": files.to_plain(found), "samples": n, "parameters": found.parameters, "work": work,
                "depth": depth, "average_parallelism": work / depth if depth else None,
                "saved_bytes": sum(x.saved.at(n) * x.repeats for x in found.layers),
                **({"recompute": rows} if recompute is not None else {}),
            }
        )  # fmt: skip
        return
    out = console()
    out.print(f"{found.name}: {n} sample{'s' if n > 1 else ''}, forward and backward ({found.origin})\n")
    out.print(profile_table(found, width=out.width, n=n))
    out.print("")
    out.print(profile_totals(found, n))
    if recompute is not None:
        out.print("")
        out.print(recompute_table(rows, width=out.width))
        out.print("")
        out.print(recompute_totals(found, recompute, n))
    if output:
        out.print(f"written to {output}")
