"""How ranks that mpiexec started find each other: rank 0 opens a store, MPI tells the others where it is.

On one host the store listens on the loopback address only. The keys in it stand behind a random word that only ranks
hear, so that a stranger who finds the port does not find the keys.
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

from ..core.errors import GaveUp
from .hosts import host_digest, hosts
from .mpi.world import world

_LOOPBACK = "127.0.0.1"
_PROBE = 3.0
"""Seconds to try one address of rank 0."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the store is."""

    addresses: tuple[str, ...]
    """Those of rank 0; the first that answers with the right word is used."""
    port: int
    word: str


def meet(timeout: timedelta) -> dist.Store:
    """The store that all ranks of mpiexec share. All of them call it."""
    comm = world()
    rank, size = comm.Get_rank(), comm.Get_size()
    digests = _all_gather(comm, np.frombuffer(host_digest(), dtype=np.uint8))
    groups = hosts([bytes(row) for row in digests])
    listening = _listen(alone=len(groups) == 1) if rank == 0 else None
    meeting = _tell(comm, _meeting(listening, alone=len(groups) == 1) if listening else None)
    store: dist.Store | None = None
    if listening:
        store = dist.TCPStore(
            _LOOPBACK,
            meeting.port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        store.set(meeting.word, meeting.word)
    comm.Barrier()
    if len(groups) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(_LOOPBACK) or "lo")
        address = _LOOPBACK
    else:
        address = _route(comm, meeting, own_host=rank in groups[0])
    store = store or _join(address, meeting, timeout)
    return dist.PrefixStore(meeting.word, store)


def _listen(*, alone: bool) -> socket.socket:
    """A socket on a port that is free: for this host alone, or for all."""
    if alone:
        return socket.create_server((_LOOPBACK, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))  # noqa: S104  # ranks of other hosts come here


def _meeting(listening: socket.socket, *, alone: bool) -> Meeting:
    addresses = (_LOOPBACK,) if alone else tuple(a for a, _ in own_addresses())
    return Meeting(addresses, int(listening.getsockname()[1]), secrets.token_hex(16))


def own_addresses() -> list[tuple[str, str]]:
    """(address, interface) of this host that others may reach: those that are up, not loopback, not link-local."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name not in up or entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                found.append((str(address), name))
    return sorted(found, key=lambda pair: ":" in pair[0])  # IPv4 first: gloo prefers it


def _tell(comm: Any, meeting: Meeting | None) -> Meeting:
    """Rank 0's word, on every rank."""
    text = json.dumps(asdict(meeting)).encode() if meeting else b""
    size = np.array([len(text)], dtype=np.int64)
    comm.Bcast(size, root=0)
    body = np.zeros(int(size[0]), dtype=np.uint8)
    if meeting:
        body[:] = np.frombuffer(text, dtype=np.uint8)
    comm.Bcast(body, root=0)
    plain = json.loads(body.tobytes())
    return Meeting(tuple(plain["addresses"]), plain["port"], plain["word"])


def _route(comm: Any, meeting: Meeting, *, own_host: bool) -> str:
    """The address of rank 0 for this rank; gloo is told the interface that leads there, unless the user has named one.

    By itself gloo takes the address that the host's own name has, which is often a loopback one.
    """
    index, local = (-1, "") if own_host else reach(meeting)
    table = _all_gather(comm, np.array([index], dtype=np.int64))
    used = Counter(int(i) for i in table[:, 0] if i >= 0)
    address = meeting.addresses[index if index >= 0 else used.most_common(1)[0][0]]
    if name := _interface(local or address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return address


def reach(meeting: Meeting) -> tuple[int, str]:
    """The first address of rank 0 whose store knows the word: its place in the list, and our address on that way."""
    tried = []
    for index, address in enumerate(meeting.addresses):
        try:
            with socket.create_connection((address, meeting.port), timeout=_PROBE) as probe:
                local = str(probe.getsockname()[0])
            _join(address, meeting, timedelta(seconds=_PROBE))
        except (OSError, RuntimeError, GaveUp) as e:
            tried.append(f"{address}: {str(e).splitlines()[0]}")
            continue
        return index, local
    raise GaveUp(
        f"rank 0 is not reached at port {meeting.port}",
        rule="; ".join(tried) or "rank 0 has no address",
        fix="name a host that all others reach in MASTER_ADDR, and a port in MASTER_PORT",
    )


def _join(address: str, meeting: Meeting, timeout: timedelta) -> dist.Store:
    store = dist.TCPStore(address, meeting.port, is_master=False, timeout=timeout, wait_for_workers=False)
    # Another host may have the same private address, and a store of its own behind the same port.
    if store.get(meeting.word) != meeting.word.encode():
        raise GaveUp(f"the store at {address}:{meeting.port} is not rank 0's")
    return store


def _interface(address: str) -> str:
    """The name of the interface that has an address, or nothing."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return ""


def _all_gather(comm: Any, mine: Any) -> Any:
    table = np.zeros((comm.Get_size(), mine.size), dtype=mine.dtype)
    comm.Allgather(mine, table)
    return table
