"""Partitioned point-to-point messages: each partition is sent as soon as it is ready.

Each pair of Psend_init and Precv_init has a context of its own; both ranks derive it from the number of earlier pairs
with the same ranks and tag. The sender announces its number of partitions once, in the context after it, because the
receiver may divide the same message into another number. A partition is one message, whose tag is its number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import index
from typing import Any

from ..comm.messaging.messages import ReceiveOperation, SendOperation, Waitable
from . import constants as C
from .buffers import MessageBuffer, parse_message
from .exception import MPIError
from .info import INFO_NULL, Info
from .pending import PendingOperation, null_message
from .persistent_request import Prequest
from .point_to_point import PointToPoint
from .state import CommState
from .status import Status

_PLAN = struct.Struct("<qq")
"""The sender's number of partitions, and the bytes of the whole message."""


class _Partitions:
    """The memory of a partitioned message."""

    def __init__(self, state: CommState, peer: int, tag: int, buf: Any, count: int, *, writable: bool) -> None:
        self.state, self.peer, self.tag, self.count = state, peer, tag, count
        self._buf, self._writable = list(buf) if isinstance(buf, list) else buf, writable
        self._parse()
        ends = (peer, state.matcher.rank) if writable else (state.matcher.rank, peer)
        self.context = state.pair_context("Precv_init" if writable else "Psend_init", *ends, tag)
        """Last, because a pair counts only if both its calls succeed."""

    def _parse(self) -> None:
        """Read the buffer: repeatedly, because memory of a GPU is copied when it is read."""
        region = parse_message(self._buf, writable=self._writable, blocks=self.count)
        self.elements = region.count
        """In one partition."""
        self.region = MessageBuffer(region.memory, region.base, region.count * self.count, region.type, region.device)

    def _part(self, partition: int) -> MessageBuffer:
        return self.region.part(partition * self.elements, self.elements)

    def check(self, partition: int) -> None:
        """Refuse a partition that does not exist."""
        check_partition(partition, self.count)


class OutgoingPartitions(_Partitions):
    """A partitioned send."""

    _sends: list[SendOperation | None]

    def announce(self) -> None:
        """Tell the receiver how the message is divided."""
        plan = memoryview(_PLAN.pack(self.count, self.region.nbytes))
        self.state.matcher.send(self.peer, self.context + 1, self.tag, plan, copy=True)

    def start(self) -> PendingOperation:
        """Begin; nothing is sent before it is ready."""
        self._sends = [None] * self.count
        return PendingOperation(self.state.matcher, (self,))

    def ready(self, partition: int) -> None:
        """Send a partition."""
        self.check(partition)
        if self._sends[partition] is not None:
            raise MPIError(C.ERR_ARG, f"partition {partition} is ready twice", rule="once after each Start")
        self._parse()
        part = self._part(partition)
        self._sends[partition] = self.state.matcher.send(
            self.peer, self.context, partition, part.data(), type_code=part.check
        )

    @property
    def done(self) -> bool:
        """Whether all partitions are ready and their memory is free."""
        return all(send is not None and send.done for send in self._sends)

    @property
    def peers(self) -> Sequence[int]:
        """The rank that must receive it; none as long as another thread of this rank must call Pready."""
        return () if None in self._sends else (self.peer,)

    def about(self) -> str:
        """A description for error messages."""
        missing = [i for i, send in enumerate(self._sends) if send is None]
        return f"for Pready of partitions {missing}" if missing else f"to rank {self.peer}, in {self.count} partitions"


class IncomingPartitions(_Partitions):
    """A partitioned receive."""

    _sent: tuple[int, int] | None = None
    """The sender's number of partitions, and the bytes of its message."""
    _receives: Sequence[ReceiveOperation]
    """By the sender's partitions."""
    _memory: memoryview

    def start(self) -> PendingOperation:
        """Post the receives; at the first start, as soon as the sender's plan has arrived."""
        self._parse()
        self._memory, self._receives, self._unpacked = self.region.receive_memory(), (), set[int]()
        self._plan = bytearray(_PLAN.size)
        plan: list[Waitable] = []
        if self._sent is None:
            plan = [self.state.matcher.receive(self.peer, self.context + 1, self.tag, memoryview(self._plan))]
        pending = PendingOperation(self.state.matcher, plan, self._finish, self._fill_status, then=self._post)
        pending.advance()
        return pending

    def _post(self) -> Sequence[ReceiveOperation]:
        self._sent = self._sent or _PLAN.unpack(self._plan)
        count, nbytes = self._sent
        if nbytes == self.region.nbytes:
            size, m = nbytes // count, self.state.matcher
            self._receives = [
                m.receive(self.peer, self.context, i, self._memory[i * size : (i + 1) * size]) for i in range(count)
            ]
        return self._receives

    def arrived(self, partition: int) -> bool:
        """Whether a partition of this rank has arrived: all partitions of the sender that overlap it."""
        theirs = len(self._receives)
        first, end = partition * theirs // self.count, -(-(partition + 1) * theirs // self.count)
        if theirs == 0 or not all(receive.done for receive in self._receives[first:end]):
            return False
        self._unpack(partition)
        return True

    def _unpack(self, partition: int) -> None:
        if partition not in self._unpacked:
            self._unpacked.add(partition)
            part = self._part(partition)
            part.unpack_received(self._memory[partition * part.nbytes : (partition + 1) * part.nbytes], part.nbytes)

    def _finish(self) -> None:
        assert self._sent is not None
        if self._sent[1] != self.region.nbytes:
            raise MPIError(
                C.ERR_TRUNCATE,
                f"rank {self.state.index[self.peer]} sends {self._sent[1]} bytes in {self._sent[0]} partitions",
                rule=f"the receiver expects {self.region.nbytes} bytes in {self.count} partitions",
            )
        for partition in range(self.count):
            self._unpack(partition)

    def _fill_status(self, status: Status) -> None:
        status._fill(self.state.index[self.peer], self.tag, self.region.nbytes)


class NullPartitions:
    """The partitions of a message to or from PROC_NULL."""

    def __init__(self, count: int, role: str) -> None:
        self.count = count
        setattr(self, role, self.check)

    def check(self, partition: int) -> bool:
        """Refuse a partition that does not exist; the others are complete."""
        check_partition(partition, self.count)
        return True


class PartitionedMessages(PointToPoint):
    """The partitioned messages of a communicator."""

    __slots__ = ()

    def Psend_init(self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a partitioned send; Pready sends each partition of a started one."""
        if dest == C.PROC_NULL:
            return self._nothing_partitioned(partitions, "ready")
        mine = self._partitioned(OutgoingPartitions, buf, partitions, dest, tag, writable=False)
        mine.announce()
        return Prequest._of(PendingOperation(mine.state.matcher, (), start=mine.start, partitions=mine))

    def Precv_init(self, buf: Any, partitions: int, source: int, tag: int = 0, info: Info = INFO_NULL) -> Prequest:
        """Make a partitioned receive; Parrived tells whether a partition of a started one has arrived."""
        if source == C.PROC_NULL:
            return self._nothing_partitioned(partitions, "arrived")
        mine = self._partitioned(IncomingPartitions, buf, partitions, source, tag, writable=True)
        return Prequest._of(PendingOperation(mine.state.matcher, (), start=mine.start, partitions=mine))

    def _partitioned(self, kind: Any, buf: Any, partitions: int, rank: int, tag: int, *, writable: bool) -> Any:
        count, state, peer = _partition_count(partitions), self._state, self._peer(rank)
        if not 0 <= tag <= C.TAG_LIMIT:
            raise MPIError(C.ERR_TAG, f"tag {tag}", rule=f"0 <= tag <= {C.TAG_LIMIT}")
        return kind(state, peer, tag, buf, count, writable=writable)

    def _nothing_partitioned(self, partitions: int, name: str) -> Prequest:
        mine = NullPartitions(_partition_count(partitions), name)
        return Prequest._of(PendingOperation(self._state.matcher, (), start=null_message, partitions=mine))


def check_partition(partition: int, count: int) -> None:
    """Refuse a partition that does not exist."""
    if not 0 <= index(partition) < count:
        raise MPIError(C.ERR_ARG, f"partition {partition}", rule=f"0 <= partition < {count}")


def _partition_count(partitions: int) -> int:
    if index(partitions) < 1:
        raise MPIError(C.ERR_ARG, f"{partitions} partitions", rule="at least 1")
    return index(partitions)
