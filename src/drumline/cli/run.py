"""`drumline run`: start any SPMD script on local ranks, on several hosts, or on the ranks of another launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ..core.errors import GaveUp, InputError
from ..core.rank_info import is_launched, rank_info

if TYPE_CHECKING:
    from ..launchers.deepspeed_hosts import HostOptions
    from ..loop.restarts import FaultOptions


def run(
    context: typer.Context,
    script: str = typer.Argument(..., help="A Python script, followed by its own arguments."),
    ranks: int = typer.Option(None, "--ranks", "-n", help="Ranks to start (default: 2, or the launcher's)."),
    restarts: int = typer.Option(0, "--restarts", metavar="N", help="Start all ranks again after a failure, N times."),
    hang_timeout: str = typer.Option(None, "--hang-timeout", help="Silence that counts as a hang (default: learnt)."),
    chaos: str = typer.Option("", "--chaos", metavar="FAULTS", help="Inject faults into the engine: `kill:1@5`."),
    num_gpus: int = typer.Option(None, "--num_gpus", "--num-gpus", help="Ranks per host, as in DeepSpeed's launcher."),
    num_nodes: int = typer.Option(None, "--num_nodes", "--num-nodes", help="Hosts (default: those of the hostfile)."),
    hostfile: str = typer.Option(None, "--hostfile", help="Hosts to start on over ssh: `worker-1 slots=4` on a line."),
    master_addr: str = typer.Option(None, "--master_addr", "--master-addr", help="Where ranks meet, with --node_rank."),
    master_port: int = typer.Option(None, "--master_port", "--master-port", help="Its port (default: 29500)."),
    node_rank: int = typer.Option(
        None, "--node_rank", "--node-rank", help="Number of this host, when started by hand."
    ),
    no_local_rank: bool = typer.Option(
        False, "--no_local_rank", "--no-local-rank", help="With DeepSpeed's options: no --local_rank for the script."
    ),
) -> None:
    """Start a script on local ranks, as torchrun would; under another launcher, run it on this rank.

    With options of DeepSpeed's launcher (--num_gpus, --num_nodes, --hostfile, ...) the script gets --local_rank=R too.
    """
    from ..launchers.deepspeed_hosts import HostOptions
    from ..launchers.scripts import ended_with, join_script, run_script
    from ..loop.restarts import FaultOptions
    from .common import warn

    hosts = HostOptions(num_gpus, num_nodes, hostfile, master_addr, master_port, node_rank)
    arguments = list(context.args)
    if is_launched():
        where = rank_info()
        if ranks not in (None, where.size):
            raise InputError(
                f"--ranks {ranks}, but {where.launcher} started {where.size}",
                rule="the launcher decides the number of ranks",
                fix="leave --ranks out",
            )
        if hosts.given and not no_local_rank:
            arguments.insert(0, f"--local_rank={where.local_rank}")
        join_script(script, arguments)
    options = FaultOptions(restarts, hang_timeout, chaos=chaos)
    options.check()
    if hosts.given:
        hosts.check(ranks)
    if hosts.several:
        _start_on_hosts(hosts, [script, *arguments], options, local_rank=not no_local_rank)
        return
    code, rank = run_script(
        script,
        arguments,
        ranks=hosts.ranks_here() if hosts.given else 2 if ranks is None else ranks,
        restarts=restarts,
        chaos=chaos,
        watch=options.watch() if hang_timeout else None,
        notify=warn,
        local_rank=hosts.given and not no_local_rank,
    )
    if code:
        raise GaveUp(f"rank {rank} ended {ended_with(code)}", where=script)


def _start_on_hosts(hosts: HostOptions, words: list[str], options: FaultOptions, *, local_rank: bool) -> None:
    """Start the script's ranks on several hosts, over ssh or this host's part of them."""
    from ..launchers.deepspeed_hosts import host_command

    if options.restarts or options.hang_timeout or options.chaos:
        raise InputError(
            "--restarts, --hang-timeout or --chaos on several hosts",
            rule="they watch the ranks of one host",
            fix="`drumline launch ... train`, whose ranks watch each other; or torchrun --max-restarts",
        )
    launcher, chosen = hosts.launch()
    chosen.check()
    code = launcher.start(host_command(words, chosen, local_rank=local_rank), chosen)
    if code:
        raise GaveUp(f"a rank ended with exit code {code}", where=words[0])
