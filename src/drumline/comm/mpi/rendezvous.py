"""Rendezvous of the ranks of mpiexec: rank 0 opens a store and broadcasts its address through MPI.

On one host the store listens on the loopback address only. Its keys have a random prefix that only the ranks know, so
a stranger who finds the port cannot read them.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch.distributed as dist

from ...core.errors import GaveUp
from ..hosts import host_digest, hosts
from .world import world

_LOOPBACK = "127.0.0.1"
_PROBE = 3.0
"""Seconds to try one address of rank 0."""


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """The address of the store, and the prefix of its keys."""

    addresses: tuple[str, ...]
    """Addresses of rank 0; the first whose store has the key is used."""
    port: int
    key: str


def rendezvous_store(timeout: timedelta) -> dist.Store:
    """The store that all ranks of mpiexec share. All ranks call it."""
    comm = world()
    rank, size = comm.Get_rank(), comm.Get_size()
    digests = _all_gather(comm, np.frombuffer(host_digest(), dtype=np.uint8))
    groups = hosts([bytes(row) for row in digests])
    listening = _listen(one_host=len(groups) == 1) if rank == 0 else None
    info = _broadcast(comm, _info(listening, one_host=len(groups) == 1) if listening else None)
    store: dist.Store | None = None
    if listening:
        store = dist.TCPStore(
            _LOOPBACK,
            info.port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        store.set(info.key, info.key)
    comm.Barrier()
    if len(groups) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(_LOOPBACK) or "lo")
        address = _LOOPBACK
    else:
        address = _route(comm, info, own_host=rank in groups[0])
    store = store or _join(address, info, timeout)
    return dist.PrefixStore(info.key, store)


def _listen(*, one_host: bool) -> socket.socket:
    """A socket on a free port: for this host only, or for all."""
    if one_host:
        return socket.create_server((_LOOPBACK, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))  # noqa: S104  # ranks of other hosts connect


def _info(listening: socket.socket, *, one_host: bool) -> RendezvousInfo:
    addresses = (_LOOPBACK,) if one_host else tuple(a for a, _ in own_addresses())
    return RendezvousInfo(addresses, int(listening.getsockname()[1]), secrets.token_hex(16))


def own_addresses() -> list[tuple[str, str]]:
    """(address, interface) pairs that other hosts may reach: up, not loopback, not link-local."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name not in up or entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                addresses.append((str(address), name))
    return sorted(addresses, key=lambda pair: ":" in pair[0])  # IPv4 first: gloo prefers it


def _broadcast(comm: Any, info: RendezvousInfo | None) -> RendezvousInfo:
    """Rank 0's value, on every rank."""
    text = json.dumps(asdict(info)).encode() if info else b""
    size = np.array([len(text)], dtype=np.int64)
    comm.Bcast(size, root=0)
    body = np.zeros(int(size[0]), dtype=np.uint8)
    if info:
        body[:] = np.frombuffer(text, dtype=np.uint8)
    comm.Bcast(body, root=0)
    plain = json.loads(body.tobytes())
    return RendezvousInfo(tuple(plain["addresses"]), plain["port"], plain["key"])


def _route(comm: Any, info: RendezvousInfo, *, own_host: bool) -> str:
    """The address of rank 0 for this rank; sets gloo's interface to the one that leads there, unless the user has.

    By default gloo uses the address of the host's own name, which is often a loopback one.
    """
    index, local = (-1, "") if own_host else reach(info)
    table = _all_gather(comm, np.array([index], dtype=np.int64))
    used = Counter(int(i) for i in table[:, 0] if i >= 0)
    address = info.addresses[index if index >= 0 else used.most_common(1)[0][0]]
    if name := _interface(local or address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return address


def reach(info: RendezvousInfo) -> tuple[int, str]:
    """The first address of rank 0 whose store has the key: its index, and our own address on that route."""
    tried = []
    for index, address in enumerate(info.addresses):
        try:
            with socket.create_connection((address, info.port), timeout=_PROBE) as probe:
                local = str(probe.getsockname()[0])
            _join(address, info, timedelta(seconds=_PROBE))
        except (OSError, RuntimeError, GaveUp) as e:
            tried.append(f"{address}: {str(e).splitlines()[0]}")
            continue
        return index, local
    raise GaveUp(
        f"rank 0 is not reached at port {info.port}",
        rule="; ".join(tried) or "rank 0 has no address",
        fix="name a host that all others reach in MASTER_ADDR, and a port in MASTER_PORT",
    )


def _join(address: str, info: RendezvousInfo, timeout: timedelta) -> dist.Store:
    store = dist.TCPStore(address, info.port, is_master=False, timeout=timeout, wait_for_workers=False)
    # Another host may have the same private address, and another store on the same port.
    if store.get(info.key) != info.key.encode():
        raise GaveUp(f"the store at {address}:{info.port} is not rank 0's")
    return store


def _interface(address: str) -> str:
    """The name of the interface with an address, or ""."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return ""


def _all_gather(comm: Any, mine: Any) -> Any:
    table = np.zeros((comm.Get_size(), mine.size), dtype=mine.dtype)
    comm.Allgather(mine, table)
    return table
