"""Functions that run on ranks: what this process listens on, and who may read its files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from drumline.comm.environment import connect


def listening() -> list[tuple[str, int]]:
    """Addresses at which this process accepts connections, after a collective has opened them all."""
    connect()
    dist.all_reduce(torch.ones(4))
    own = [(c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    dist.barrier()
    return own


def open_store_as_another_user() -> tuple[str, str]:
    """What a process of the user `nobody` gets when it opens the store, and what this rank reads from it then."""
    connect()
    path, store = os.environ["DRUMLINE_STORE"], dist.distributed_c10d._get_default_store()
    store.set(f"of {dist.get_rank()}", "own")
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with open(path, "ab") as file:
                file.write(b"foreign")
        except PermissionError:
            code = 13
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    dist.barrier()
    outcome = {0: "written", 13: "PermissionError"}.get(os.waitstatus_to_exitcode(status), "failed")
    return outcome, store.get(f"of {dist.get_rank()}").decode()


def modes() -> tuple[str, dict[str, str]]:
    """The name of the launcher's folder, and the permissions of it and of the files in it."""
    connect()
    dist.barrier()
    folder = Path(os.environ["DRUMLINE_STORE"]).parent
    listed = [folder, *(p for p in folder.iterdir() if p.is_file())]
    found = {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in listed}
    dist.barrier()
    return folder.name, found
