"""`drumline validate`: published runs predicted, and how far the predictions were off."""

from __future__ import annotations

import typer


def validate(
    file: str = typer.Argument(..., metavar="FILE", help="A CSV table of published runs (docs/validate.md)."),
    loso: bool = typer.Option(False, "--loso", help="Also predict each source by profiles fitted without it."),
    fit: str = typer.Option(None, "--fit", metavar="OUT", help="Fit profiles on the file, write and use them."),
    profiles: str = typer.Option(None, "--profiles", help="Profiles to use instead of those that ship."),
    picture: str = typer.Option(None, "--picture", metavar="SVG", help="Draw predicted over measured times."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Predict published runs, and say how far off."""
    from ..core.errors import InputError
    from ..costs.fitted.profiles import load_profiles
    from ..validation.outcome import fit_profiles
    from ..validation.outcome import validate as run
    from .collectives_file import has_collectives, validate_collectives_file
    from .common import print_json

    if has_collectives(file):
        if fit or profiles or picture:
            raise InputError("--fit, --profiles or --picture", rule="they are for files of published runs")
        validate_collectives_file(file, loso=loso, as_json=as_json)
        return
    if fit and profiles:
        raise InputError("--fit and --profiles", rule="the profiles are fitted, or given")
    if picture and not picture.endswith(".svg"):
        raise InputError(f"--picture {picture}", rule="a name that ends in .svg")
    used = load_profiles(profiles) if profiles else None
    if fit:
        used = fit_profiles(file)
        used.save(fit, f"drumline validate {file} --fit {fit}")
    outcome = run(file, loso=loso, profiles=used)
    if picture:
        from ..core.files import write_text
        from ..validation.picture import scatter

        write_text(picture, scatter(outcome.points(), "Step time of published runs: predicted and measured"))
    if as_json:
        print_json(outcome.plain())
        return
    from ..reports.text import console
    from ..validation.show import show

    out = console()
    show(outcome, out)
    for what, path in (("profiles", fit), ("picture", picture)):
        if path:
            out.print(f"{what}: {path}")
