"""The communicator: collectives and messages of torch tensors over any transport, with a choice of algorithm."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ..clusters import Cluster, Link
from ..core.errors import InputError, nearest
from ..schedules import ALGORITHMS, Schedule, Traffic
from ..theory.alpha_beta import Links, as_topology
from .auto_algorithm import AlgorithmChooser, ChosenAlgorithm
from .buffers import check_dense, check_tensor, contiguous, copy_back
from .call_check import CallChecker, CurrentCall, SmallAllGather, call_site, signature
from .dispatch import CallOptions, CollectiveDispatcher, OperatorLike
from .transport import PendingMessage, SubgroupTransport, Transport

_TAGS = 1 << 16
"""Tags of one context: the lower half is for users, the upper half numbers rounds, cyclically."""
USER_TAGS = _TAGS >> 1
_ROUNDS = USER_TAGS - 1
_CHECK = _TAGS - 1
"""The tag of the messages that compare calls."""
_CONTEXTS = 1 << 15
"""With _TAGS this uses the 31 bits of a transport's tag."""
_SPLIT_ROW = struct.Struct("<qqq")
"""Color, key, and the highest context that a rank has seen."""


class Communicator:
    """A group of ranks that call collectives together, each rank with its own tensor.

    `cluster` has the measured tables and links for "auto"; `links` are those between these ranks; `per_node` ranks
    share a host. `check` compares the ranks' calls before data moves, `crossings` also finds equal calls in a different
    order: a small message or two per collective. All are the same on all ranks. Collectives that return a tensor make a
    new one, or fill `out=`.
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
        self._init(transport, transport, 0, cluster, links, per_node, check, crossings)

    def _init(
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
        self._chooser = AlgorithmChooser(
            transport.size,
            transport=transport.name,
            cluster=cluster,
            links=links,
            per_node=per_node,
            offers=lambda collective: transport.native(collective) is not None,
        )
        self._calls = CallChecker(
            transport,
            context * _TAGS + _CHECK,
            check=check,
            crossings=crossings,
            shared=self._chooser.digest,
            name=f" of group {context}" if context else "",
        )
        self._dispatcher = CollectiveDispatcher(transport, self._chooser, self._calls, self._next_tag)

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._transport.size

    @property
    def transport(self) -> Transport:
        """The transport that carries the messages."""
        return self._transport

    @property
    def traffic(self) -> Traffic:
        """This rank's rounds, messages and bytes in schedules so far, without native collectives, single messages and
        call checks."""
        return self._dispatcher.traffic

    def choose(self, collective: str, size: int, *, itemsize: int = 1, root: int = 0) -> ChosenAlgorithm:
        """The algorithm that "auto" runs for a whole buffer of `size` bytes."""
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
        self, tensor: Tensor, *, op: OperatorLike = "sum", algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """Replace `tensor`, on every rank, by the sum (or `op`) over all ranks; return it."""
        return self._dispatcher.in_place("all_reduce", tensor, CallOptions(algorithm, segments, op))

    def broadcast(
        self, tensor: Tensor, *, root: int = 0, algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """Replace `tensor`, on every rank, by that of `root`; return it."""
        return self._dispatcher.in_place("broadcast", tensor, CallOptions(algorithm, segments, root=root))

    def reduce(
        self,
        tensor: Tensor,
        *,
        op: OperatorLike = "sum",
        root: int = 0,
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor | None:
        """The sum (or `op`) over all ranks on `root`, None elsewhere."""
        shape = tensor.shape if self.rank == root else None
        return self._dispatcher.out_of_place("reduce", tensor, shape, CallOptions(algorithm, segments, op, root), out)

    def all_gather(
        self, tensor: Tensor, *, out: Tensor | None = None, algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """Every rank's tensor on every rank, by rank: shape (p, *shape)."""
        p, options = self.size, CallOptions(algorithm, segments)
        return _present(self._dispatcher.out_of_place("all_gather", tensor, (p, *tensor.shape), options, out, parts=p))

    def reduce_scatter(
        self,
        tensor: Tensor,
        *,
        op: OperatorLike = "sum",
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor:
        """Row `rank` of the sum (or `op`) over all ranks, for tensors of shape (p, *shape)."""
        options = CallOptions(algorithm, segments, op)
        return _present(
            self._dispatcher.out_of_place("reduce_scatter", tensor, tensor.shape[1:], options, out, rows=True)
        )

    def gather(
        self,
        tensor: Tensor,
        *,
        root: int = 0,
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor | None:
        """Every rank's tensor on `root`, shape (p, *shape); None elsewhere."""
        p = self.size
        shape = (p, *tensor.shape) if self.rank == root else None
        return self._dispatcher.out_of_place(
            "gather", tensor, shape, CallOptions(algorithm, segments, root=root), out, parts=p
        )

    def scatter(
        self,
        tensor: Tensor | None = None,
        *,
        root: int = 0,
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor:
        """Row `rank` of the root's tensor of shape (p, *shape). The other ranks pass `out` only."""
        given = tensor if self.rank == root else None
        like = given[0] if given is not None and given.dim() and len(given) else out
        if like is None or (self.rank == root and given is None):
            what = "the root gives no tensor of rows" if self.rank == root else f"rank {self.rank} gives no out="
            raise self._calls.refuse(InputError(f"scatter: {what}", rule="the root gives (p, *shape), the others out="))
        options = CallOptions(algorithm, segments, root=root)
        return _present(
            self._dispatcher.out_of_place(
                "scatter", given, like.shape, options, out, like=like, rows=True, parts=self.size
            )
        )

    def all_to_all(
        self, tensor: Tensor, *, out: Tensor | None = None, algorithm: str = "auto", segments: int | None = None
    ) -> Tensor:
        """For tensors of shape (p, *shape): row s of the result is row `rank` of rank s."""
        return _present(
            self._dispatcher.out_of_place(
                "all_to_all", tensor, tensor.shape, CallOptions(algorithm, segments), out, rows=True
            )
        )

    def scan(
        self,
        tensor: Tensor,
        *,
        op: OperatorLike = "sum",
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor:
        """The sum (or `op`) over ranks 0 to `rank`."""
        return _present(
            self._dispatcher.out_of_place("scan", tensor, tensor.shape, CallOptions(algorithm, segments, op), out)
        )

    def exscan(
        self,
        tensor: Tensor,
        *,
        op: OperatorLike = "sum",
        out: Tensor | None = None,
        algorithm: str = "auto",
        segments: int | None = None,
    ) -> Tensor | None:
        """The sum (or `op`) over the ranks before this one; None on rank 0."""
        return self._dispatcher.out_of_place(
            "exscan", tensor, tensor.shape if self.rank else None, CallOptions(algorithm, segments, op), out
        )

    def barrier(self, *, algorithm: str = "auto") -> None:
        """Return when all ranks have called it."""
        self._dispatcher.in_place("barrier", torch.empty(0, dtype=torch.uint8), CallOptions(algorithm))

    def run(self, schedule: Schedule, tensor: Tensor, *, op: OperatorLike = "sum") -> Traffic:
        """Run any schedule in place on a tensor, the whole buffer; returns this rank's traffic.

        Chunks that the contract does not cover (other shares after a reduce-scatter) end with partial results.
        """
        return self._dispatcher.run(schedule, tensor, op)

    # ---- messages

    def send(self, tensor: Tensor, dst: int, *, tag: int = 0) -> None:
        """Send a tensor; return when it may be used again, possibly only after it is received."""
        self.start_send(tensor, dst, tag=tag).wait()

    def receive(self, tensor: Tensor, src: int, *, tag: int = 0) -> Tensor:
        """Fill `tensor` with one of the same size and type from `src`; return it."""
        self.start_receive(tensor, src, tag=tag).wait()
        return tensor

    def start_send(self, tensor: Tensor, dst: int, *, tag: int = 0) -> PendingMessage:
        """Start to send; the tensor must not change before the wait."""
        number = self._user_tag(dst, tag)
        check_tensor(tensor)
        call = CurrentCall(f"send to rank {dst} (tag {tag})", 0, call_site())
        return _UserMessage(self._transport, call, self._transport.send(contiguous(tensor), dst, number))

    def start_receive(self, tensor: Tensor, src: int, *, tag: int = 0) -> PendingMessage:
        """Start to receive into `tensor`, which is filled after the wait."""
        number = self._user_tag(src, tag)
        check_dense(tensor)
        buffer = contiguous(tensor)
        call = CurrentCall(f"receive from rank {src} (tag {tag})", 0, call_site())
        pending = self._transport.receive(buffer, src, number)
        return _UserMessage(self._transport, call, pending, lambda: copy_back(buffer, tensor))

    # ---- groups

    def split(self, color: int, key: int = 0) -> Communicator:
        """A communicator of the ranks with the same color, ordered by key, then by rank. All ranks call it."""
        self._calls.enter(signature("split"))
        tag = self._context * _TAGS + _CHECK
        packed = SmallAllGather(self._transport, tag, _SPLIT_ROW.size)(_SPLIT_ROW.pack(color, key, self._base.contexts))
        self._transport.current_call = None
        rows = [_SPLIT_ROW.unpack(row) for row in packed]
        members = tuple(rank for _, rank in sorted((row[1], r) for r, row in enumerate(rows) if row[0] == color))
        # One more than any member has seen, so groups that share two ranks never have the same context.
        context = self._base.contexts = 1 + max(row[2] for row in rows)
        if context >= _CONTEXTS:
            raise InputError(f"split for the {context}th time", rule=f"at most {_CONTEXTS - 1} groups of a transport")
        child = Communicator.__new__(Communicator)
        child._init(
            SubgroupTransport(self._transport, members),
            self._base,
            context,
            self._cluster,
            _links_among(self._links, members),
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


class _UserMessage:
    """A message in progress that reports its call if the wait fails."""

    def __init__(
        self, transport: Transport, call: CurrentCall, pending: PendingMessage, after: Callable[[], None] | None = None
    ) -> None:
        self._transport, self._call, self._pending, self._after = transport, call, pending, after

    def wait(self) -> None:
        """Wait for the message, then copy it to the user's tensor."""
        self._transport.current_call = self._call
        self._pending.wait()
        self._transport.current_call = None
        if self._after is not None:
            with torch.no_grad():
                self._after()


def _present(result: Tensor | None) -> Tensor:
    assert result is not None
    return result


def _links_among(links: Links | None, members: tuple[int, ...]) -> Links | None:
    """The links between some ranks, by their numbers in the group."""
    if links is None or isinstance(links, Link):
        return links
    topology = as_topology(links)
    return lambda src, dst: topology.link(members[src], members[dst])
