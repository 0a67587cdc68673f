"""The store that all ranks of a job share, opened once per process, from what the launcher left in the environment.

In this order: the file of Drumline's own launcher; DRUMLINE_RENDEZVOUS (`file:///path`, `tcp://host:port`); MPI, under
mpiexec without MASTER_ADDR; MASTER_ADDR and MASTER_PORT, which under srun are derived from Slurm's own variables.
"""

from __future__ import annotations

import hashlib
import importlib.util
import ipaddress
import os
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
import torch.distributed as dist

from ..core.errors import GaveUp, InputError
from ..core.node_list import check_host, parse_node_list
from ..core.rank_info import STORE, RankInfo, integer, local_size
from ..torchkit.process_groups import default_store
from .store_handshake import agree

RENDEZVOUS = "DRUMLINE_RENDEZVOUS"
"""The variable with the place where ranks meet, if it is not MASTER_ADDR:MASTER_PORT."""
TIMEOUT = "DRUMLINE_TIMEOUT"
"""The variable with the seconds for which ranks wait for each other."""
MPI_LAUNCHERS = ("Open MPI", "MPICH")
"""Launchers whose ranks can find each other through MPI."""
_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 20_000, 12_000
"""Ports that a Slurm step's number is mapped to: below those that Linux gives out by itself (32768)."""


@dataclass(slots=True)
class _Opened:
    """The store of this process, and how many groups it has served."""

    store: dist.Store | None = None
    groups: int = 0


_OPENED = _Opened()


def default_timeout() -> float:
    """Seconds for which ranks wait for each other: at the start, and in a collective."""
    seconds = integer(os.environ, TIMEOUT) if TIMEOUT in os.environ else 300
    if not seconds:
        raise InputError(f"{TIMEOUT}=0", where="environment", rule="at least one second")
    return float(seconds)


def shared_store(where: RankInfo, timeout: float) -> dist.Store:
    """The store of all ranks; opened by the first call, which waits until all ranks have called it."""
    if _OPENED.store is None:
        _OPENED.store = (
            dist.PrefixStore("drumline", default_store()) if dist.is_initialized() else _open(where, timeout)
        )
    return _OPENED.store


def group_store(where: RankInfo, timeout: float) -> dist.Store:
    """A part of the store with keys of its own, for one more process group. All ranks call it equally often."""
    store = shared_store(where, timeout)
    _OPENED.groups += 1
    return dist.PrefixStore(f"group{_OPENED.groups}", store)


def _open(where: RankInfo, timeout: float) -> dist.Store:
    wait = timedelta(seconds=timeout)
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE], where.size)
    url = os.environ.get(RENDEZVOUS, "")
    if url.startswith("file://"):
        return agree(_file_store(url, where.size), where.rank, where.size, timeout)
    if not url and _through_mpi(where):
        store: dist.Store = next(iter(dist.rendezvous("mpi://", timeout=wait)))[0]  # comm/mpi registers the scheme
        return store
    host, port = _parse_tcp(url) if url else master_address(where)
    _choose_interface(host, port, where)
    return agree(_tcp_store(host, port, where, wait), where.rank, where.size, timeout)


def _file_store(url: str, size: int) -> dist.Store:
    path = urlsplit(url).path
    if not path.startswith("/") or not os.path.isdir(os.path.dirname(path)):
        raise InputError(f"{RENDEZVOUS}={url}", where="environment", rule="file:///path in a folder of all hosts")
    return dist.FileStore(path, size)


def _parse_tcp(url: str) -> tuple[str, int]:
    rule = "tcp://host:port or file:///path"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError:
        raise InputError(f"{RENDEZVOUS}={url[:80]}", where="environment", rule=rule) from None
    if parts.scheme != "tcp" or not host or not port:
        raise InputError(f"{RENDEZVOUS}={url[:80]}", where="environment", rule=rule)
    return check_host(host, RENDEZVOUS), port


def master_address(where: RankInfo, environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """The host and port at which rank 0 listens."""
    env = dict(os.environ if environment is None else environment)
    if where.launcher == "Slurm":
        env = _slurm_master(env) | env
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        if key not in env:
            mpi = "; with `pip install 'drumline[mpi]'` it is not needed" if where.launcher in MPI_LAUNCHERS else ""
            raise InputError(
                f"{where.size} ranks were started by {where.launcher}, but {key} is not set",
                where="environment",
                rule="ranks meet at MASTER_ADDR:MASTER_PORT",
                fix=f"export {key} before starting the ranks, or use `drumline train` or torchrun{mpi}",
            )
    if not 0 < integer(env, "MASTER_PORT") < 65536:
        raise InputError(f"MASTER_PORT={env['MASTER_PORT']}", where="environment", rule="0 < port < 65536")
    return check_host(env["MASTER_ADDR"], "MASTER_ADDR"), int(env["MASTER_PORT"])


def _slurm_master(env: Mapping[str, str]) -> dict[str, str]:
    """The first host of the step, and a reserved port or one that follows from the numbers of the step."""
    master: dict[str, str] = {}
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if env.get("SLURM_STEP_NUM_NODES") == "1":
        master["MASTER_ADDR"] = _LOOPBACK
    elif nodes:
        master["MASTER_ADDR"] = parse_node_list(nodes)[0]
    reserved = env.get("SLURM_STEP_RESV_PORTS", "").partition("-")[0]
    if reserved.isdecimal():
        master["MASTER_PORT"] = reserved
    elif "SLURM_JOB_ID" in env:
        step = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}.{env.get('SLURM_RESTART_COUNT', '')}"
        digest = int.from_bytes(hashlib.sha256(step.encode()).digest()[:4])
        master["MASTER_PORT"] = str(_FIRST_PORT + digest % _PORTS)
    return master


def _tcp_store(host: str, port: int, where: RankInfo, wait: timedelta) -> dist.Store:
    """Rank 0 listens, on one host only for this host, unless torchrun's agent has the store."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    inside = local_size(where) == where.size or _is_loopback(host)
    if inside and not hosted:
        host = _LOOPBACK
    if where.rank > 0 or hosted:
        try:
            return dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
        except (RuntimeError, OSError) as e:
            raise GaveUp(f"rank {where.rank} does not reach rank 0 at {host}:{port}", rule=_first_line(e)) from None
    try:
        listening = socket.create_server((_LOOPBACK, port)) if inside else _server(port)
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=wait,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    except (RuntimeError, OSError) as e:
        raise InputError(
            f"rank 0 cannot listen at {host}:{port}",
            where="environment",
            rule=_first_line(e),
            fix="another MASTER_PORT",
        ) from None


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port))  # noqa: S104  # ranks of other hosts connect


def _choose_interface(host: str, port: int, where: RankInfo) -> None:
    """Use the interface that leads to rank 0, unless the user chose one; warn if its address is public.

    By default gloo uses the address of the host's own name, which is often a loopback one.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0]).partition("%")[0]
    except OSError as e:
        raise InputError(
            f"rank {where.rank} cannot resolve {host}",
            where="MASTER_ADDR",
            rule=str(e),
            fix="export MASTER_ADDR with an address that all hosts reach",
        ) from None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own for entry in entries) and not _is_loopback(own):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if where.rank == 0 and not ipaddress.ip_address(own).is_private:
        warnings.warn(
            f"the ranks meet at the public address {own}: torch's messages are neither encrypted nor authenticated; "
            "use a private network",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _through_mpi(where: RankInfo) -> bool:
    """Whether the ranks find each other through MPI: started by mpiexec, no MASTER_ADDR, and mpi4py is installed."""
    return (
        where.launcher in MPI_LAUNCHERS
        and "MASTER_ADDR" not in os.environ
        and importlib.util.find_spec("mpi4py") is not None
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
