"""`drumline validate`: predict published runs or collectives, and report the errors."""

from __future__ import annotations

import csv
import dataclasses
import io

import typer

from ..core.errors import InputError
from ..core.files import read_csv, write_text
from .common import print_json


def validate(
    file: str = typer.Argument(..., metavar="FILE", help="A CSV table of published runs (docs/validate.md)."),
    loso: bool = typer.Option(False, "--loso", help="Also predict each source with profiles fitted on the others."),
    lomo: bool = typer.Option(False, "--lomo", help="Also fit the waits of hosts on the file, each model left out."),
    converge: bool = typer.Option(False, "--converge", help="With --loso: refit each until nothing moves (minutes)."),
    fit: str = typer.Option(None, "--fit", metavar="OUT", help="Fit profiles on the file; write and use them."),
    fit_waits: str = typer.Option(
        None, "--fit-waits", metavar="OUT", help="Fit the waits of hosts on the file; write."
    ),
    profiles: str = typer.Option(None, "--profiles", help="Profiles to use instead of the built-in ones."),
    picture: str = typer.Option(None, "--picture", metavar="SVG", help="Draw predicted over measured times."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Predict published runs, and report the errors."""
    from ..costs.fitted import load_constants
    from ..validation.result import fit_file, fit_waits_on
    from ..validation.result import validate as run

    if _has_collectives(file):
        if fit or fit_waits or profiles or picture or lomo:
            raise InputError(
                "--fit, --fit-waits, --profiles, --picture or --lomo", rule="they apply to published runs only"
            )
        _validate_collectives(file, loso=loso, as_json=as_json)
        return
    if sum(map(bool, (fit, fit_waits, profiles))) > 1:
        raise InputError("--fit, --fit-waits and --profiles", rule="profiles are either fitted or given")
    if picture and not picture.endswith(".svg"):
        raise InputError(f"--picture {picture}", rule="a name that ends in .svg")
    if converge and not loso:
        raise InputError("--converge", rule="it is about the fits of --loso")
    used = load_constants(profiles) if profiles else None
    if fit:
        used = fit_file(file)
        used.save(fit, f"drumline validate {file} --fit {fit}")
    if fit_waits:
        used = fit_waits_on(file)
        before = f"drumline validate RUNS --fit {fit_waits}"
        used.save(fit_waits, f"{before}, then drumline validate {file} --fit-waits {fit_waits}")
    result = run(file, loso=loso, lomo=lomo, constants=used, converge=converge)
    if picture:
        from ..validation.scatter_plot import scatter

        write_text(picture, scatter(result.points(), "Step time of published runs: predicted and measured"))
    if as_json:
        print_json(result.to_json())
        return
    from ..reports.console import console
    from ..validation.text import print_validation

    out = console()
    print_validation(result, out)
    for what, path in (("profiles", fit or fit_waits), ("picture", picture)):
        if path:
            out.print(f"{what}: {path}")


def _has_collectives(file: str) -> bool:
    """Whether the columns are those of published collectives."""
    from ..costs.networks.rows import is_collectives

    return is_collectives(next(csv.reader(io.StringIO(read_csv(file))), []))


def _validate_collectives(file: str, *, loso: bool, as_json: bool) -> None:
    """Predict every row of a file of published collectives."""
    from ..costs.networks import validate_collectives
    from ..reports.console import console

    result = validate_collectives(file, leave_one_out=loso)
    if as_json:
        print_json(
            {
                "rows": len(result.rows),
                "skipped": [dataclasses.asdict(one) for one in result.skipped],
                "levels": {name: dataclasses.asdict(errors) for name, errors in result.levels.items()},
                "left_out": {name: dataclasses.asdict(errors) for name, errors in result.left_out.items()},
                "sources": {name: dataclasses.asdict(errors) for name, errors in result.sources.items()},
            }
        )
        return
    out = console()
    for line in result.lines():
        out.print(line)
    for name, errors in result.sources.items():
        if errors.rows:
            out.print(f"{name}: {errors.rows} rows, mean {100 * errors.mean:.1f}%, bias {100 * errors.bias:+.1f}%")
    reasons = sorted({one.reason for one in result.skipped})
    for reason in reasons:
        lines = [str(one.line) for one in result.skipped if one.reason == reason]
        more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
        out.print(f"not read: {reason} (lines {', '.join(lines[:5])}{more})")
