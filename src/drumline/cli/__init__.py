"""The command line: one file per verb, which parses options and prints. Heavy imports happen inside the verbs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..core.errors import DrumlineError
from ..core.streams import OutputFailed, guarded_streams
from ..core.wrapping import for_reader
from .bench import bench
from .completion import bash_words
from .demo import demo
from .doctor import doctor
from .export import export
from .external_ranks import enter
from .join import join
from .launch import launch
from .measure import measure
from .pack import pack
from .plan import plan
from .profile import profile
from .report import report
from .run import run
from .simulate import simulate
from .train import train
from .validate import validate
from .verify import verify

_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Everything after a script is passed to it, including options that Drumline has too."""

_SHORT = {
    doctor: "Check this machine and its backends.",
    measure: "Measure this machine (half a minute).",
    bench: "Measure collectives between ranks.",
    join: "Add a worker to a running training.",
    export: "Write a checkpoint's weights.",
    verify: "Prove that a plan computes what one device would.",
    run: "Start a script on local ranks.",
    launch: "Start a command on any launcher's ranks.",
}
"""In the list of commands, where a longer sentence would be cut."""

app = typer.Typer(
    name="drumline",
    help="Find the fastest way to train a PyTorch model on your machines, verify it, and run it.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for verb in (
    doctor,
    measure,
    bench,
    profile,
    plan,
    verify,
    train,
    join,
    export,
    pack,
    report,
    simulate,
    validate,
    run,
    launch,
    demo,
):
    settings = _SCRIPT if verb in (run, launch) else {}
    app.command(context_settings=settings, short_help=_SHORT.get(verb))(verb)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"drumline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Find the fastest way to train a PyTorch model on your machines, verify it, and run it."""
    if context.invoked_subcommand is None:
        from .welcome import print_welcome

        print_welcome(context.get_help())


def main() -> None:
    """Run the `drumline` command. User errors are printed without a traceback."""
    with guarded_streams() as out, _rare_full_collections():
        try:
            _run_command()
            out.check()  # here, not at the end of the process, where a failure is a traceback
        except OutputFailed as e:
            if not e.closed_pipe:  # the reader of a pipe may leave (`| head`)
                print(f"drumline: {e}", file=sys.stderr)
                sys.exit(e.exit_code)


FULL_COLLECTION_EVERY = 100
"""Collections of young objects (7,000 allocations each) before a full one, instead of 10. Importing torch makes half a
million objects that live to the end, and full collections on the way looked at all of them, a seventh of the time."""


@contextmanager
def _rare_full_collections() -> Iterator[None]:
    """Full garbage collections are rare while a command runs."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], FULL_COLLECTION_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run_command() -> None:
    try:
        enter(sys.argv[1:])
        with bash_words():
            app()
    except OutputFailed:
        raise
    except DrumlineError as e:
        if not e.silent:
            print(for_reader(f"drumline: {e}", sys.stderr), file=sys.stderr)
        if os.environ.get("DRUMLINE_DEBUG"):
            print(*getattr(e, "__notes__", ()), sep="\n", file=sys.stderr)
            raise
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        print("drumline: interrupted", file=sys.stderr)
        sys.exit(130)
    except SystemExit as e:
        if e.code:
            raise
