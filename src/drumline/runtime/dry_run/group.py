"""The process groups of a dry run: nobody is at the other end, and every call is written down.

Each group is torch's in Python, so that DDP, FSDP2 and the engine all call it as they call a real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...comm.torchgroup.named import NamedGroup
from ...comm.torchgroup.works import GroupWork
from ...core.errors import InputError
from .value import Message

NAME = "dryrun"


class Book:
    """The messages of a step, in their order."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        """The backend that the groups stand for: some send the same in other ways."""
        self.messages: list[Message] = []
        self.phase = ""
        self.open = False

    def write(self, name: str, tensors: Iterable[Tensor], ranks: Sequence[int]) -> None:
        """One more message."""
        if self.open:
            self.messages.append(Message(name, sum(t.nbytes for t in tensors), tuple(ranks), self.phase))


_BOOK: list[Book] = []
"""The book of the world that is open; torch makes the groups, and hands nothing of ours to them."""


@contextmanager
def fake_world(rank: int, size: int, book: Book) -> Iterator[None]:
    """This process as one rank of a world that is not there."""
    if dist.is_initialized():
        raise InputError(
            "a dry run in a process that has a process group",
            rule="a dry run makes groups of its own, of other sizes",
            fix="dry_run() before initialize(), or in another process",
        )
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _BOOK.append(book)
    try:
        dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=size)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _BOOK.pop()


def _create(options: Any, _: Any) -> Any:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return DryGroup(_BOOK[-1], options.group_rank, ranks)


class DryGroup(NamedGroup):
    """A group that sends nothing. Every call is done at once, and leaves its outputs as they were."""

    def __init__(self, book: Book, rank: int, ranks: list[int]) -> None:
        super().__init__(NAME, rank, len(ranks))
        self._book, self._ranks = book, ranks
        self.stands_for = book.backend

    # -- collectives

    def _told(self, name: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> dist.Work:
        self._book.write(name, tensors, self._ranks)
        return GroupWork(list(outputs), done=True)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._told("all_reduce", tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._told("all_reduce", tensors, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._told("reduce", tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._told("broadcast", tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        flat = [t for outs in outputs for t in outs]
        return self._told("all_gather", flat, flat)

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._told("all_gather", [output], [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._told("all_gather", outputs, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._told("gather", inputs * len(self._ranks), [t for outs in outputs for t in outs])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return self._told("scatter", outputs * len(self._ranks), outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        return self._told("reduce_scatter", [t for parts in inputs for t in parts], outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._told("reduce_scatter", [input], [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._told("reduce_scatter", inputs, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._told("all_to_all", inputs, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, takes: list[int], gives: list[int], opts: Any = None
    ) -> dist.Work:
        return self._told("all_to_all", [input], [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._told("barrier", [], [])

    # -- from rank to rank

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        self._book.write("send", tensors, (self._ranks[self._number], self._ranks[dst]))
        return GroupWork(tensors, done=True)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        self._book.write("receive", tensors, (self._ranks[src], self._ranks[self._number]))
        return GroupWork(tensors, done=True)
