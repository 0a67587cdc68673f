"""`drumline launch`: start a command on ranks of any launcher, or write the file that starts it."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ..core.errors import GaveUp, InputError, nearest
from .external_ranks import JOINED

_VERBS = (*JOINED, "run")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


def launch(
    context: typer.Context,
    verb: str = typer.Argument(..., metavar="COMMAND", help=f"One of {', '.join(_VERBS)}, with its own arguments."),
    launcher: str = typer.Option("local", "--launcher", help="local, ssh, ray, slurm or kubernetes."),
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks over all hosts (default: one on each)."),
    nodes: int = typer.Option(None, "--nodes", "-N", help="Hosts (default: those of --hostfile, or 1)."),
    node: int = typer.Option(0, "--node", help="local: the number of this host, from 0."),
    rendezvous: str = typer.Option("", "--rendezvous", help="Where ranks meet: tcp://host:port or file:///path."),
    hostfile: str = typer.Option(None, "--hostfile", help="ssh: a file with one host on each line."),
    variables: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable for every rank (repeatable).")
    ] = None,
    emit: str = typer.Option(None, "--emit", metavar="FILE", help="slurm, kubernetes: write the file, start nothing."),
    name: str = typer.Option("", "--name", help="slurm, kubernetes: the name of the job."),
    image: str = typer.Option("", "--image", help="kubernetes: the container image."),
    started_by: str = typer.Option("local", "--started-by", hidden=True),
) -> None:
    """Start a command on ranks of any launcher, or write the file that starts it."""
    from ..launchers.choice import launcher_named
    from ..launchers.launcher import LaunchOptions
    from ..launchers.ssh import read_hostfile

    if verb not in _VERBS:
        raise InputError(f"drumline launch {verb}", rule=f"it starts {', '.join(_VERBS)}", fix=nearest(verb, _VERBS))
    hosts = read_hostfile(hostfile) if hostfile else ()
    count = nodes or len(hosts) or 1
    options = LaunchOptions(
        ranks=count if ranks is None else ranks,
        hosts=hosts[:count],
        nodes=count,
        node=node,
        rendezvous=rendezvous,
        environment=parse_variables(variables or []),
        name=name,
        image=image,
        started_by=started_by,
    )
    options.check()
    chosen, command = launcher_named(launcher), [verb, *context.args]
    if emit is not None:
        from ..core import files
        from ..reports.console import console

        files.write_text(emit, chosen.script(command, options))
        console().print(f"written to {emit}; start it with: {_START.get(chosen.name, '')}{emit}")
        return
    code = chosen.start(command, options)
    if code:
        error = GaveUp(f"a rank ended with exit code {code}", where=f"drumline {verb}")
        error.exit_code = code if 0 < code < 128 else error.exit_code
        error.silent = code in (2, 3, 4, 5, 6)  # the first rank has printed its own error
        raise error


_START = {"slurm": "sbatch ", "kubernetes": "kubectl apply -f "}


def parse_variables(words: list[str]) -> dict[str, str]:
    """NAME=VALUE pairs; names are checked, values may be anything."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.fullmatch(name) or "\0" in value:
            raise InputError(f"--env {word[:80]!r}", rule="NAME=VALUE; a name has letters, digits and underscores")
        variables[name] = value
    return variables
