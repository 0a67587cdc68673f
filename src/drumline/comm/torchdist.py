"""Ranks as processes over torch.distributed: messages of a process group, by gloo, and by nccl between GPUs.

NCCL has no tags: it carries the rounds of a schedule, whose order all ranks know; all else goes over gloo, tensors of
a GPU through the host's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import GaveUp, InputError
from .torchnative import NATIVE
from .transport import Native, Pending, Transport

_TAGGED = ("gloo", "shm", "mpi4py")
"""Backends whose messages have tags."""
_NOTICE = 0.5
"""Seconds that ranks get to leave a note in the store when a wait has failed."""


class _Work:
    """A message under way, with what to say when it fails."""

    def __init__(self, transport: TorchTransport, work: dist.Work, tensor: Tensor, what: str) -> None:
        # The tensor is kept alive until the wait, because the backend holds only its address.
        self._transport, self._work, self._tensor, self._what = transport, work, tensor, what

    def wait(self) -> None:
        """Block until it is sent, or there."""
        try:
            if self._transport.timeout is None:
                self._work.wait()
            else:
                self._work.wait(self._transport.timeout)
        except RuntimeError as e:
            raise self._transport.failure(self._what, e) from e


class _Staged:
    """A receive into the host's memory, copied to the device at the wait."""

    def __init__(self, inner: Pending, host: Tensor, into: Tensor) -> None:
        self._inner, self._host, self._into = inner, host, into

    def wait(self) -> None:
        """Block until it is there, and copy."""
        self._inner.wait()
        self._into.copy_(self._host)


class _Batch:
    """All messages of one round over NCCL."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Let the current stream wait for them."""
        while self._works:
            self._works.pop().wait()


class TorchTransport(Transport):
    """The ranks of a process group, by their numbers in the group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float | None = None) -> None:
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised", fix="call torch.distributed.init_process_group(backend='gloo')"
            )
        backend = dist.get_backend_config(group)
        if not any(name in backend for name in (*_TAGGED, "nccl")):
            raise InputError(
                f"a process group of {backend}",
                rule=f"messages go by {', '.join(_TAGGED)}, and between GPUs by nccl",
                fix="torch.distributed.new_group(backend='gloo')",
            )
        self._group = group
        self._nccl = "nccl" in backend
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._host: dist.ProcessGroup | None = group
        if not any(name in backend for name in _TAGGED):
            ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            self._host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.name = "nccl" if self._nccl else next(name for name in _TAGGED if name in backend)

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes the group has."""
        return self._size

    def send(self, tensor: Tensor, dst: int, tag: int) -> Pending:
        """Start a send; over gloo also from a GPU, because a single message needs its tag."""
        plain = _bytes(tensor.cpu() if tensor.is_cuda else tensor)
        work = dist.isend(plain, group=self._host, group_dst=dst, tag=tag)
        return self._pending(work, plain, f"rank {self._rank} could not send to rank {dst}")

    def receive(self, tensor: Tensor, src: int, tag: int) -> Pending:
        """Start a receive."""
        plain = _bytes(torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor)
        work = dist.irecv(plain, group=self._host, group_src=src, tag=tag)
        pending = self._pending(work, plain, f"rank {self._rank} could not receive from rank {src}")
        return _Staged(pending, plain.view(tensor.dtype), tensor) if tensor.is_cuda else pending

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], tag: int
    ) -> tuple[list[Pending], list[Pending]]:
        """NCCL takes the messages of a round all at once: one by one, two ranks that send to each other would wait."""
        if self._nccl and any(tensor.is_cuda for tensor, _ in (*sends, *receives)):
            batch: Pending = self._batch(sends, receives)
            return [batch] * len(receives), [batch]
        return super().exchange(sends, receives, tag)

    def native(self, collective: str) -> Native | None:
        """The backend's own."""
        run = NATIVE.get(collective)
        if run is None:
            return None

        def call(source: Tensor | None, target: Tensor | None, *, op: str, root: int) -> bool:
            some = source if source is not None else target
            on_gpu = some is not None and some.is_cuda
            if on_gpu and not self._nccl:
                return False
            try:
                return run(source, target, op, root, self._group if on_gpu else self._host, self._size)
            except RuntimeError as e:
                raise self.failure(f"rank {self._rank} could not finish {collective}", e) from e

        return call

    def failure(self, what: str, error: RuntimeError) -> GaveUp:
        """What to raise when a message failed: with the ranks that have not come, and where the others wait."""
        reason = str(error).splitlines()[0].rpartition("] ")[2]
        notes = self._notes()
        absent = [r for r, note in enumerate(notes) if not note]
        lines = [f"rank {r}: {note}" for r, note in enumerate(notes) if note and r != self._rank]
        lines += [f"rank {r} has not come" for r in absent]
        return GaveUp(
            what + "".join(f"\n    {line}" for line in lines),
            where=str(self.doing or ""),
            rule=f"all ranks call the same collectives in the same order; {reason}",
        )

    def _notes(self) -> list[str]:
        """Leave a note of what this rank was about, and read the others'. Who waits in vain too, leaves one as well."""
        notes = [""] * self._size
        notes[self._rank] = str(self.doing or "a message")
        store = dist.distributed_c10d._get_process_group_store(self._host or dist.group.WORLD)  # type: ignore[arg-type]  # WORLD is there once initialised
        end = time.monotonic() + _NOTICE
        try:
            store.set(f"drumline/waited/{self._rank}", notes[self._rank])
            while not all(notes) and time.monotonic() < end:
                time.sleep(0.02)
                for rank in (r for r, note in enumerate(notes) if not note):
                    if store.check([f"drumline/waited/{rank}"]):
                        notes[rank] = store.get(f"drumline/waited/{rank}").decode()
        except RuntimeError:
            pass  # the store ended with the rank that held it: nothing more to learn
        return notes

    def _batch(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> _Batch:
        operations: list[tuple[Callable[..., object], Tensor, int]] = [
            *((dist.irecv, tensor, src) for tensor, src in receives),
            *((dist.isend, tensor, dst) for tensor, dst in sends),
        ]
        full = [
            dist.P2POp(operation, _bytes(tensor), group=self._group, group_peer=peer)
            for operation, tensor, peer in operations
            if tensor.numel()
        ]
        return _Batch(dist.batch_isend_irecv(full) if full else ())

    def _pending(self, work: dist.Work | None, tensor: Tensor, what: str) -> Pending:
        assert work is not None, "torch answers None only to a process outside of the group"
        return _Work(self, work, tensor, what)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: backends do not know every type."""
    return tensor.view(-1).view(torch.uint8)
