"""Which ranks share a host, and a transport that sends inside a host by one way and between hosts by another.

A host is what shares memory, process numbers and a network address: two containers of one machine, or two network
namespaces, are two hosts.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import InputError
from .hostnative import HostAllReduce
from .transport import Native, Pending, Transport

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host, in order; hosts in the order of their first rank."""
_TAG = (1 << 31) - 1
"""The tag by which ranks tell their hosts; communicators number theirs from 0."""
_DIGEST = 16


def host_id() -> str:
    """What tells this host from others: name, boot, process and network namespace. Equal on all ranks of a host."""
    return "|".join((platform.node(), _read("/proc/sys/kernel/random/boot_id"), _inode("pid"), _inode("net")))


def host_digest() -> bytes:
    """`host_id` in 16 bytes, to be sent around."""
    return hashlib.blake2b(host_id().encode(), digest_size=_DIGEST).digest()


def hosts(ids: Sequence[Hashable]) -> Hosts:
    """The ranks by host, from every rank's `host_id` (or digest of it)."""
    found: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(ids):
        found.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def per_node(groups: Hosts) -> int | None:
    """Ranks per host where all hosts have equally many, numbered one after the other; None where they do not."""
    n = len(groups[0])
    expected = tuple(tuple(range(i * n, (i + 1) * n)) for i in range(len(groups)))
    return n if groups == expected else None


def find_hosts(transport: Transport) -> Hosts:
    """Ask every rank of a transport for its host. All ranks call it."""
    mine = torch.frombuffer(bytearray(host_digest()), dtype=torch.uint8)
    others = [r for r in range(transport.size) if r != transport.rank]
    table = torch.zeros(transport.size, _DIGEST, dtype=torch.uint8)
    table[transport.rank] = mine
    pending = [transport.receive(table[r], r, _TAG) for r in others]
    pending += [transport.send(mine, r, _TAG) for r in others]
    for one in pending:
        one.wait()
    return hosts([bytes(row.tolist()) for row in table])


def one_host() -> bool:
    """Whether all ranks of the torch process group share a host. All ranks call it."""
    from .torchdist import TorchTransport

    return len(find_hosts(TorchTransport())) == 1


class HostTransport(Transport):
    """All ranks of `across`; messages inside a host go by `inside`, whose ranks are those of this host, in order.

    With a `rail`, the ranks of this number inside their hosts, in the order of hosts, it has an all-reduce of its own.
    """

    def __init__(self, inside: Transport, across: Transport, groups: Hosts, *, rail: Transport | None = None) -> None:
        mine = next((group for group in groups if across.rank in group), ())
        if sorted(r for group in groups for r in group) != list(range(across.size)):
            raise InputError(f"hosts {groups}", rule=f"each of {across.size} ranks is on one host")
        if inside.size != len(mine) or inside.rank != mine.index(across.rank):
            raise InputError(
                f"rank {inside.rank} of {inside.size} inside the host is rank {across.rank} of {across.size}",
                rule=f"inside are the ranks of its host, in order: {', '.join(map(str, mine))}",
            )
        self._inside, self._across, self.hosts = inside, across, groups
        self.name = f"{inside.name}+{across.name}"
        self.per_node = per_node(groups)
        self._all_reduce = self._with_rail(rail, mine) if rail is not None else None
        self._local = {rank: i for i, rank in enumerate(mine)}

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self._across.rank

    @property
    def size(self) -> int:
        """How many ranks there are on all hosts."""
        return self._across.size

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Send by the way that leads to `dst`."""
        way, number = self._way(dst)
        return way.send(tensor, number, tag)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Receive by the way that leads from `src`."""
        way, number = self._way(src)
        return way.receive(tensor, number, tag)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """Start what crosses the network first; who waits for it sees to the messages inside the host meanwhile."""
        near: list[Pending] = []
        found: dict[tuple[bool, int], Pending] = {}
        for inside in (False, True):
            for i, (tensor, src) in enumerate(receives):
                if (src in self._local) == inside:
                    found[True, i] = self._started(self.receive(tensor, src, tag), near, inside=inside)
            for i, (tensor, dst) in enumerate(sends):
                if (dst in self._local) == inside:
                    found[False, i] = self._started(self.send(tensor, dst, tag), near, inside=inside)
        return [found[True, i] for i in range(len(receives))], [found[False, i] for i in range(len(sends))]

    def _started(self, pending: Pending, near: list[Pending], *, inside: bool) -> Pending:
        if not inside:
            return _Far(pending, near)
        near.append(_Once(pending))
        return near[-1]

    def native(self, collective: str) -> Native | None:
        """The all-reduce by shares, where there is a rail."""
        return self._all_reduce if collective == "all_reduce" else None

    def _with_rail(self, rail: Transport, mine: tuple[int, ...]) -> HostAllReduce | None:
        number = mine.index(self.rank)
        if len({len(group) for group in self.hosts}) > 1:
            raise InputError(f"a rail over hosts {self.hosts}", rule="hosts have equally many ranks")
        if rail.size != len(self.hosts) or self.hosts[rail.rank] != mine:
            raise InputError(
                f"rank {rail.rank} of {rail.size} on a rail over {len(self.hosts)} hosts",
                rule=f"on it are the ranks of number {number} in their hosts, in the order of hosts",
            )
        return HostAllReduce.over(self._inside, rail)

    def _way(self, rank: int) -> tuple[Transport, int]:
        local = self._local.get(rank)
        return (self._across, rank) if local is None else (self._inside, local)


class _Once:
    """A message that two may wait for, one after the other."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending

    def wait(self) -> None:
        """Block until it is through, the first time."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class _Far:
    """A message over the network. Transports inside a host move only while somebody waits for them: so that first."""

    def __init__(self, pending: Pending, near: list[Pending]) -> None:
        self._pending, self._near = pending, near

    def wait(self) -> None:
        """Block until the messages of this round inside the host are through, and then until this one is."""
        for pending in self._near:
            pending.wait()
        self._pending.wait()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""  # not Linux, or hidden: the other parts must do


def _inode(namespace: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{namespace}").st_ino)
    except OSError:
        return ""
