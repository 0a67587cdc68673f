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


def modes() -> tuple[str, dict[str, str]]:
    """The name of the launcher's folder, and the permissions of it and of the files in it."""
    connect()
    dist.barrier()
    folder = Path(os.environ["DRUMLINE_STORE"]).parent
    listed = [folder, *(p for p in folder.iterdir() if p.is_file())]
    found = {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in listed}
    dist.barrier()
    return folder.name, found
