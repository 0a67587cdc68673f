"""Run a script on local ranks, with torchrun's environment variables and a file store in a private folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..comm.parent_process import die_with_parent
from ..core.errors import InputError, nearest
from .local import GRACE, MOST_RANKS


def run_script(script: str, arguments: list[str], *, ranks: int) -> tuple[int, int]:
    """Run a script on every rank until all end or one fails; returns (its exit code, its rank)."""
    path = Path(script)
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise InputError(f"no script {script}", fix=near)
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks} ranks", rule=f"from 1 to {MOST_RANKS} ranks on one machine")
    with tempfile.TemporaryDirectory(prefix="drumline-") as folder:
        port = _free_port()
        processes = [
            subprocess.Popen(
                [sys.executable, script, *arguments],
                env=_environment(rank, ranks, folder, port),
                preexec_fn=die_with_parent,  # safe: no other thread holds a lock here
            )
            for rank in range(ranks)
        ]
        try:
            return _wait(processes)
        finally:
            _terminate(processes)


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
        "DRUMLINE_STORE": f"{folder}/store",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _wait(processes: list[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait until all ranks succeed or one fails."""
    while True:
        codes = [p.poll() for p in processes]
        for rank, code in enumerate(codes):
            if code:
                return code, rank
        if all(code == 0 for code in codes):
            return 0, 0
        time.sleep(0.05)


def _terminate(processes: list[subprocess.Popen[bytes]]) -> None:
    for p in processes:
        if p.poll() is None:
            p.terminate()
    for p in processes:
        try:
            p.wait(GRACE)
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
