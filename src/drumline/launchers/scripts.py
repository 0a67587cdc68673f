"""Run a script on local ranks, with torchrun's environment variables and a file store in a private folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from ..comm.fault_injection import ATTEMPT, CHAOS
from ..comm.parent_process import die_with_parent
from ..comm.rank_status import STATUS
from ..comm.rendezvous import master_address
from ..core.errors import InputError, RankFailed, nearest
from ..core.rank_info import local_size, rank_info
from .hang_watch import HangWatch, status_path
from .local import MOST_RANKS
from .processes import end_all, first_failure, forwarding_signals


def run_script(
    script: str,
    arguments: list[str],
    *,
    ranks: int,
    restarts: int = 0,
    chaos: str = "",
    watch: HangWatch | None = None,
    notify: Callable[[str], None] = lambda text: None,
    local_rank: bool = False,
) -> tuple[int, int]:
    """Run a script on every rank until all end or one fails; returns (its exit code, its rank).

    After a failure all ranks are started again, at most `restarts` times; a script finds the count in
    TORCHELASTIC_RESTART_COUNT, as under torchrun. `chaos` are faults for scripts that use the engine
    (comm/fault_injection.py), and a `watch` ends ranks that hang; the default ends them only when a rank waits in a
    collective of ours for another that does not come. TERM and USR1 are passed on to the ranks.
    With `local_rank`, the script gets `--local_rank=R` as its first argument, as from DeepSpeed's launcher.
    """
    _check_script(script)
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks} ranks", rule=f"from 1 to {MOST_RANKS} ranks on one machine")
    words = [[f"--local_rank={rank}"] if local_rank else [] for rank in range(ranks)]
    watch = watch or HangWatch(only_waits=True)
    commands = [[sys.executable, script, *own, *arguments] for own in words]
    for attempt in range(restarts + 1):
        try:
            code, rank = _run_once(commands, attempt, chaos, watch)
            failure = f"rank {rank} ended {ended_with(code)}"
        except RankFailed as e:  # a hang
            if attempt == restarts:
                raise
            code, failure = 1, str(e)
        if not code or attempt == restarts:
            break
        notify(f"{failure}; starting all ranks again ({attempt + 1} of {restarts})")
    return code, rank


def _run_once(commands: list[list[str]], attempt: int, chaos: str, watch: HangWatch) -> tuple[int, int]:
    ranks = len(commands)
    with tempfile.TemporaryDirectory(prefix="drumline-") as folder, _loopback_store() as port:
        more = {"TORCHELASTIC_RESTART_COUNT": str(attempt), **({CHAOS: chaos, ATTEMPT: str(attempt)} if chaos else {})}
        processes = [
            subprocess.Popen(
                command,
                env=_environment(rank, ranks, folder, port) | more,
                process_group=0,  # so that what a rank has started ends with it
                preexec_fn=die_with_parent,  # safe: the store's own thread runs no Python
            )
            for rank, command in enumerate(commands)
        ]
        watch.begin(Path(folder), {rank: process.pid for rank, process in enumerate(processes)})
        try:
            with forwarding_signals(processes):
                return first_failure(processes, watch)
        finally:
            end_all(processes)


def ended_with(code: int) -> str:
    """`with exit code 3`, or `by signal SIGKILL`."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def join_script(script: str, arguments: list[str]) -> NoReturn:
    """Become a script on this rank of another launcher, with torchrun's variables."""
    where = rank_info()
    _check_script(script)
    variables = dict(os.environ)
    if where.launcher == "Slurm":
        host, port = master_address(where)
        variables |= {"RANK": str(where.rank), "WORLD_SIZE": str(where.size), "LOCAL_RANK": str(where.local_rank)}
        variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        if local := local_size(where):
            variables["LOCAL_WORLD_SIZE"] = str(local)
    os.execve(sys.executable, [sys.executable, script, *arguments], variables)  # noqa: S606  # a list, no shell


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise InputError(f"no script {script}", fix=near)


def _environment(rank: int, ranks: int, folder: str, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no port: the launcher has
        "DRUMLINE_STORE": f"{folder}/store",
        "GLOO_SOCKET_IFNAME": "lo",
        STATUS: str(status_path(Path(folder), rank)),
    }


@contextmanager
def _loopback_store() -> Iterator[int]:
    """A store of this process for scripts that call `init_process_group`; its port is open to this machine only.

    torch's own would listen at all addresses.
    """
    import torch.distributed as dist

    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    try:
        yield port
    finally:
        del store
