"""Which ranks share a host, and a transport that uses one transport inside a host and another between hosts.

A host is what shares memory, process numbers and a network address: two containers or two network namespaces of one
machine are two hosts.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import InputError
from ..plans.engine_constants import HOST_SEGMENT_BYTES
from .transport import NativeCollective, PendingMessage, Transport

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host in order; hosts in the order of their first rank."""
_TAG = (1 << 31) - 1
"""The tag of host digests; communicators number theirs from 0."""
_DIGEST_BYTES = 16


def host_id() -> str:
    """Host name, boot id, process and network namespace: equal on all ranks of a host, different on others."""
    return "|".join((platform.node(), _read("/proc/sys/kernel/random/boot_id"), _inode("pid"), _inode("net")))


def host_digest() -> bytes:
    """A 16-byte hash of `host_id`, to be sent to other ranks."""
    return hashlib.blake2b(host_id().encode(), digest_size=_DIGEST_BYTES).digest()


def hosts(ids: Sequence[Hashable]) -> Hosts:
    """Group ranks by host, given every rank's `host_id` or digest."""
    by_host: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(ids):
        by_host.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in by_host.values())


def per_node(groups: Hosts) -> int | None:
    """Ranks per host if all hosts have equally many, numbered consecutively; otherwise None."""
    n = len(groups[0])
    expected = tuple(tuple(range(i * n, (i + 1) * n)) for i in range(len(groups)))
    return n if groups == expected else None


def find_hosts(transport: Transport) -> Hosts:
    """Exchange host digests over a transport and group the ranks. All ranks call it."""
    mine = torch.frombuffer(bytearray(host_digest()), dtype=torch.uint8)
    others = [r for r in range(transport.size) if r != transport.rank]
    table = torch.zeros(transport.size, _DIGEST_BYTES, dtype=torch.uint8)
    table[transport.rank] = mine
    pending = [transport.receive(table[r], r, _TAG) for r in others]
    pending += [transport.send(mine, r, _TAG) for r in others]
    for message in pending:
        message.wait()
    return hosts([bytes(row.tolist()) for row in table])


class HostTransport(Transport):
    """All ranks of `across`; messages inside a host use `inside`, whose ranks are those of this host, in order.

    A `rail` connects the ranks with the same local number, in the order of hosts; with it there is a native all-reduce.
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
        """Number of ranks on all hosts."""
        return self._across.size

    def send(self, tensor: Tensor, dst: int, tag: int) -> PendingMessage:
        """Send by the transport that reaches `dst`."""
        transport, number = self._route(dst)
        return transport.send(tensor, number, tag)

    def receive(self, tensor: Tensor, src: int, tag: int) -> PendingMessage:
        """Receive by the transport that reaches `src`."""
        transport, number = self._route(src)
        return transport.receive(tensor, number, tag)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[PendingMessage], list[PendingMessage]]:
        """Start messages between hosts first; waiting for one of them completes those inside the host meanwhile."""
        local: list[PendingMessage] = []
        received: dict[int, PendingMessage] = {}
        sent: dict[int, PendingMessage] = {}
        for inside in (False, True):
            for i, (tensor, src) in enumerate(receives):
                if (src in self._local) == inside:
                    received[i] = self._started(self.receive(tensor, src, tag), local, inside=inside)
            for i, (tensor, dst) in enumerate(sends):
                if (dst in self._local) == inside:
                    sent[i] = self._started(self.send(tensor, dst, tag), local, inside=inside)
        return [received[i] for i in range(len(receives))], [sent[i] for i in range(len(sends))]

    def _started(self, pending: PendingMessage, local: list[PendingMessage], *, inside: bool) -> PendingMessage:
        if not inside:
            return _RemoteMessage(pending, local)
        local.append(_LocalMessage(pending))
        return local[-1]

    def native(self, collective: str) -> NativeCollective | None:
        """The hierarchical all-reduce, if there is a rail."""
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

    def _route(self, rank: int) -> tuple[Transport, int]:
        local = self._local.get(rank)
        return (self._across, rank) if local is None else (self._inside, local)


class _LocalMessage:
    """A message inside the host; it may be waited for twice."""

    def __init__(self, pending: PendingMessage) -> None:
        self._pending: PendingMessage | None = pending

    def wait(self) -> None:
        """Block until it is done; a second call returns at once."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class _RemoteMessage:
    """A message between hosts. Transports inside a host progress only during a wait, so they are completed first."""

    def __init__(self, pending: PendingMessage, local: list[PendingMessage]) -> None:
        self._pending, self._local = pending, local

    def wait(self) -> None:
        """Block until this round's messages inside the host are done, then until this one is."""
        for pending in self._local:
            pending.wait()
        self._pending.wait()


class HostAllReduce:
    """The native all-reduce of a `HostTransport`: the network carries one segment while hosts reduce the next.

    Inside a host each rank reduces its share of a segment; the rail reduces that share over all hosts; then the shares
    are gathered inside. A thread drives the rail, so the network idles only during the first and last segment.
    """

    def __init__(
        self,
        reduce_scatter: NativeCollective,
        all_gather: NativeCollective,
        all_reduce: NativeCollective,
        across: NativeCollective,
        *,
        d: int,
        hosts: int,
    ) -> None:
        self._reduce_scatter, self._all_gather, self._all_reduce = reduce_scatter, all_gather, all_reduce
        self._across, self._d, self._p = across, d, d * hosts
        self._supported: set[tuple[str, torch.dtype]] = set()
        """Operators and types that the rail has reduced: it need not be asked again, which takes a whole segment."""
        # One thread: calls on a rail keep their order. It starts with the first call.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drumline rail")

    @classmethod
    def over(cls, inside: Transport, rail: Transport) -> HostAllReduce | None:
        """Build it if both transports have the native collectives it needs."""
        reduce_scatter, all_gather = inside.native("reduce_scatter"), inside.native("all_gather")
        all_reduce, across = inside.native("all_reduce"), rail.native("all_reduce")
        if reduce_scatter is None or all_gather is None or all_reduce is None or across is None:
            return None
        return cls(reduce_scatter, all_gather, all_reduce, across, d=inside.size, hosts=rail.size)

    def __call__(self, source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
        """Run in place; return False, with `target` unchanged, if one of the transports does not support it."""
        assert target is not None
        if target.device.type != "cpu":
            return False
        plain = "sum" if op == "avg" else op
        whole = target.numel() - target.numel() % self._d
        shares: list[tuple[Tensor, Tensor, Future[bool]]] = []
        for segment in _segments(target[:whole], self._d):
            share = torch.empty(segment.numel() // self._d, dtype=target.dtype)
            if not self._reduce_scatter(segment, share, op=plain, root=0):
                return False
            shares.append((segment, share, self._thread.submit(self._across, share, share, op=plain, root=0)))
            if (plain, target.dtype) not in self._supported:
                if not shares[0][2].result():
                    return False
                self._supported.add((plain, target.dtype))
        rest = target[whole:].clone()
        if rest.numel() and not self._reduce_rest(rest, plain):
            return False
        for segment, share, moving in shares:
            moving.result()
            self._all_gather(share, segment, op="", root=0)
        target[whole:] = rest
        if op == "avg":
            target.div_(self._p)
        return True

    def _reduce_rest(self, rest: Tensor, op: str) -> bool:
        """Reduce the remainder: fewer elements than a host has ranks."""
        if not self._all_reduce(rest, rest, op=op, root=0):
            return False
        return self._thread.submit(self._across, rest, rest, op=op, root=0).result()


def _segments(tensor: Tensor, d: int) -> Iterator[Tensor]:
    step = max(d, HOST_SEGMENT_BYTES // tensor.element_size() // d * d)
    for start in range(0, tensor.numel(), step):
        yield tensor[start : start + step]


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
