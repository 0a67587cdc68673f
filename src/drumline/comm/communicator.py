"""The communicator: collectives and messages of torch tensors over any transport, by any algorithm."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ..clusters import Cluster, Link
from ..core.errors import InputError, nearest
from ..schedules import ALGORITHMS, Schedule, Traffic
from ..theory.alpha_beta import Links, as_topology
from .buffers import check_dense, check_tensor, contiguous, written_back
from .calls import Calls, Doing, Gather, call_site, signature
from .choose import Choice, Chooser
from .dispatch import Asked, Dispatcher, Op
from .group import Group
from .transport import Pending, Transport

_TAGS = 1 << 16
"""Tags of one context: the lower half is the user's, the upper half numbers rounds, again and again."""
USER_TAGS = _TAGS >> 1
_ROUNDS = USER_TAGS - 1
_CHECK = _TAGS - 1
"""The tag by which calls are compared."""
_CONTEXTS = 1 << 15
"""With _TAGS this fills the 31 bits that transports have for a tag."""
_ROW = struct.Struct("<qqq")


class Communicator:
    """A group of ranks that call collectives together, each rank with its own tensor.

    `cluster` has the measured tables and links that "auto" chooses by; `links` are those between these very ranks;
    `per_node` ranks share a host. With `check` the ranks compare their calls before data moves, and `crossings` also
    finds equal calls in another order: a small message or two for each collective. All are the same on all ranks.
    Collectives that return a tensor make a new one, or fill `out=`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        cluster: Cluster | None = None,
        links: Links | None = None,
        per_node: int | None = None,
        check: bool = True,
        crossings: bool = True,
    ) -> None:
        self._begin(transport, transport, 0, cluster, links, per_node, check, crossings)

    def _begin(
        self,
        transport: Transport,
        base: Transport,
        context: int,
        cluster: Cluster | None,
        links: Links | None,
        per_node: int | None,
        check: bool,
        crossings: bool,
    ) -> None:
        self._transport, self._base, self._context = transport, base, context
        self._cluster, self._links, self._check, self._crossings = cluster, links, check, crossings
        per_node = per_node if per_node is not None else transport.per_node
        if per_node is None and cluster is not None and cluster.network is not None:
            per_node = min(cluster.node.devices, transport.size)
        self._round = 0
        self._chooser = Chooser(
            transport.size,
            transport=transport.name,
            cluster=cluster,
            links=links,
            per_node=per_node,
            offers=lambda collective: transport.native(collective) is not None,
        )
        self._calls = Calls(
            transport,
            context * _TAGS + _CHECK,
            check=check,
            crossings=crossings,
            shared=self._chooser.digest,
            name=f" of group {context}" if context else "",
        )
        self._way = Dispatcher(transport, self._chooser, self._calls, self._next_tag)

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._transport.size

    @property
    def transport(self) -> Transport:
        """What carries the messages."""
        return self._transport

    @property
    def traffic(self) -> Traffic:
        """What this rank has taken part in and sent by schedules so far; without what the transport's own collectives,
        single messages and the comparison of calls send."""
        return self._way.traffic

    def choose(self, collective: str, size: int, *, itemsize: int = 1, root: int = 0) -> Choice:
        """What "auto" runs for a whole buffer of `size` bytes."""
        if collective not in ALGORITHMS:
            raise InputError(
                f"unknown collective {collective!r}",
                rule=f"known: {', '.join(ALGORITHMS)}",
                fix=nearest(collective, ALGORITHMS),
            )
        return self._chooser.choose(collective, size, itemsize=itemsize, root=root)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}: {self.traffic}"

    # ---- collectives

    def all_reduce(
        self, tensor: Tensor, *, op: Op = "sum", algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """Replace `tensor`, on every rank, by the sum (or `op`) over all ranks; return it."""
        return self._way.in_place("all_reduce", tensor, Asked(algorithm, segments, op))

    def broadcast(
        self, tensor: Tensor, *, root: int = 0, algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """Replace `tensor`, on every rank, by what `root` has in it; return it."""
        return self._way.in_place("broadcast", tensor, Asked(algorithm, segments, root=root))

    def reduce(
        self,
        tensor: Tensor,
        *,
        op: Op = "sum",
        root: int = 0,
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor | None:
        """The sum (or `op`) over all ranks at `root`, None elsewhere."""
        shape = tensor.shape if self.rank == root else None
        return self._way.new("reduce", tensor, shape, Asked(algorithm, segments, op, root), out)

    def all_gather(
        self, tensor: Tensor, *, out: Tensor | None = None, algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """Every rank's tensor on every rank, by rank: of shape (p, *shape)."""
        p, asked = self.size, Asked(algorithm, segments)
        return _there(self._way.new("all_gather", tensor, (p, *tensor.shape), asked, out, parts=p))

    def reduce_scatter(
        self,
        tensor: Tensor,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor:
        """Of tensors of shape (p, *shape): row `rank` of the sum (or `op`) over all ranks."""
        asked = Asked(algorithm, segments, op)
        return _there(self._way.new("reduce_scatter", tensor, tensor.shape[1:], asked, out, rows=True))

    def gather(
        self,
        tensor: Tensor,
        *,
        root: int = 0,
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor | None:
        """Every rank's tensor at `root`, of shape (p, *shape), None elsewhere."""
        p = self.size
        shape = (p, *tensor.shape) if self.rank == root else None
        return self._way.new("gather", tensor, shape, Asked(algorithm, segments, root=root), out, parts=p)

    def scatter(
        self,
        tensor: Tensor | None = None,
        *,
        root: int = 0,
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor:
        """Row `rank` of what `root` gives, of shape (p, *shape). The other ranks give `out` only."""
        given = tensor if self.rank == root else None
        like = given[0] if given is not None and given.dim() and len(given) else out
        if like is None or (self.rank == root and given is None):
            what = "the root gives no tensor of rows" if self.rank == root else f"rank {self.rank} gives no out="
            raise self._calls.refuse(InputError(f"scatter: {what}", rule="the root gives (p, *shape), the others out="))
        asked = Asked(algorithm, segments, root=root)
        return _there(self._way.new("scatter", given, like.shape, asked, out, like=like, rows=True, parts=self.size))

    def all_to_all(
        self, tensor: Tensor, *, out: Tensor | None = None, algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """Of tensors of shape (p, *shape): row s of the result is row `rank` of rank s."""
        return _there(self._way.new("all_to_all", tensor, tensor.shape, Asked(algorithm, segments), out, rows=True))

    def scan(
        self,
        tensor: Tensor,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor:
        """The sum (or `op`) over ranks 0 to `rank`."""
        return _there(self._way.new("scan", tensor, tensor.shape, Asked(algorithm, segments, op), out))

    def exscan(
        self,
        tensor: Tensor,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor | None:
        """The sum (or `op`) over the ranks before this one; None on rank 0."""
        return self._way.new("exscan", tensor, tensor.shape if self.rank else None, Asked(algorithm, segments, op), out)

    def barrier(self, *, algorithm: str = "auto") -> None:
        """Return when all ranks have come."""
        self._way.in_place("barrier", torch.empty(0, dtype=torch.uint8), Asked(algorithm))

    def run(self, schedule: Schedule, tensor: Tensor, *, op: Op = "sum") -> Traffic:
        """Run any schedule in place on a tensor of any shape, the whole buffer; what this rank sent.

        Chunks of which the contract says nothing (other shares after a reduce-scatter) are left with partial results.
        """
        return self._way.run(schedule, tensor, op)

    # ---- messages

    def send(self, tensor: Tensor, dst: int, *, tag: int = 0) -> None:
        """Send a tensor; return when it may be used again, which may be not before it is received."""
        self.start_send(tensor, dst, tag=tag).wait()

    def receive(self, tensor: Tensor, src: int, *, tag: int = 0) -> Tensor:
        """Fill `tensor` with what `src` sends, of the same size and type; return it."""
        self.start_receive(tensor, src, tag=tag).wait()
        return tensor

    def start_send(self, tensor: Tensor, dst: int, *, tag: int = 0) -> Pending:
        """Start to send; the tensor must not change before the wait."""
        number = self._user_tag(dst, tag)
        check_tensor(tensor)
        doing = Doing(f"send to rank {dst} (tag {tag})", 0, call_site())
        return _Waiting(self._transport, doing, self._transport.send(contiguous(tensor), dst, number))

    def start_receive(self, tensor: Tensor, src: int, *, tag: int = 0) -> Pending:
        """Start to receive into `tensor`, which is filled after the wait."""
        number = self._user_tag(src, tag)
        check_dense(tensor)
        buffer = contiguous(tensor)
        doing = Doing(f"receive from rank {src} (tag {tag})", 0, call_site())
        pending = self._transport.receive(buffer, src, number)
        return _Waiting(self._transport, doing, pending, lambda: written_back(buffer, tensor))

    # ---- groups

    def split(self, color: int, key: int = 0) -> Communicator:
        """A communicator of the ranks that gave the same color, ordered by key and then by rank. All ranks call it."""
        self._calls.enter(signature("split"))
        tag = self._context * _TAGS + _CHECK
        told = Gather(self._transport, tag, _ROW.size)(_ROW.pack(color, key, self._base.contexts))
        self._transport.doing = None
        rows = [_ROW.unpack(row) for row in told]
        members = tuple(rank for _, rank in sorted((row[1], r) for r, row in enumerate(rows) if row[0] == color))
        # One more than any member has seen: no two groups that share two ranks have the same context.
        context = self._base.contexts = 1 + max(row[2] for row in rows)
        if context >= _CONTEXTS:
            raise InputError(f"split for the {context}th time", rule=f"at most {_CONTEXTS - 1} groups of a transport")
        child = Communicator.__new__(Communicator)
        child._begin(
            Group(self._transport, members),
            self._base,
            context,
            self._cluster,
            _among(self._links, members),
            None,
            self._check,
            self._crossings,
        )
        return child

    def _next_tag(self) -> int:
        self._round = (self._round + 1) % _ROUNDS
        return self._context * _TAGS + USER_TAGS + self._round

    def _user_tag(self, peer: int, tag: int) -> int:
        if not 0 <= peer < self.size or peer == self.rank:
            raise InputError(f"a message to or from rank {peer}", rule=f"another rank of 0 to {self.size - 1}")
        if not 0 <= tag < USER_TAGS:
            raise InputError(f"tag {tag}", rule=f"0 <= tag < {USER_TAGS}")
        return self._context * _TAGS + tag


class _Waiting:
    """A message under way that says what it was when its wait fails."""

    def __init__(
        self, transport: Transport, doing: Doing, pending: Pending, after: Callable[[], None] | None = None
    ) -> None:
        self._transport, self._doing, self._pending, self._after = transport, doing, pending, after

    def wait(self) -> None:
        """Wait for the message, then bring it where it belongs."""
        self._transport.doing = self._doing
        self._pending.wait()
        self._transport.doing = None
        if self._after is not None:
            with torch.no_grad():
                self._after()


def _there(result: Tensor | None) -> Tensor:
    assert result is not None
    return result


def _among(links: Links | None, members: tuple[int, ...]) -> Links | None:
    """The links between some ranks, by their numbers in the group."""
    if links is None or isinstance(links, Link):
        return links
    topology = as_topology(links)
    return lambda src, dst: topology.link(members[src], members[dst])
