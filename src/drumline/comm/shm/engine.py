"""Shared memory as an engine of torch process groups: collectives by the core, messages by matching."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError, GaveUp, InputError
from ..calls import OURS, Crossings, Signature, Site, call_site, crossed_calls, different_calls, signature
from ..mail.matching import Matching
from ..mail.message import Receive, Sending
from ..mail.transport import bytes_of
from ..torchgroup.engine import Engine, Message
from .core import Call, Mismatch, core_of
from .post import ShmPost
from .segment import Segment

_PATIENCE = 0.5
"""Seconds that a wait may last before this rank asks the others what they do."""
_CONTEXT = 0
_TELL = signature("tell")


class ShmEngine(Engine):
    """The shared memory of one group, as one rank sees it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._segment = Segment(store, rank, size, timeout)
        self.core = core_of(self._segment, timeout, compiled=self._segment.compiled)
        self.core.on_slow = self._slow
        self.rank, self.size = rank, size
        self.matching = Matching(ShmPost(self.core))
        self._site = Site("", 0)
        self._doing = signature("")
        self._number = 0
        self._attending = False
        self._limit: float | None = None
        """Seconds that this call may wait, if it has another limit than the group."""
        self._crossings = Crossings(size)

    def at_site(self, site: Site) -> None:
        """The line of the call that follows."""
        self._site = site

    def all_reduce(self, tensor: Tensor, op: str, call: Signature, *, root: int = -1) -> None:
        """In place, on all ranks, or on the root alone."""
        self._run(call, self.core.all_reduce, tensor, op, root)

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: Signature) -> None:
        """Each rank reduces its own block."""
        self._run(call, self.core.reduce_scatter, blocks, out, op)

    def broadcast(self, tensor: Tensor, root: int, call: Signature) -> None:
        """The root lays it out, all others read."""
        counts = [0] * self.size
        counts[root] = tensor.numel() * tensor.element_size()
        places: list[Tensor | None] = [None] * self.size
        if self.rank != root:
            places[root] = tensor
        self._run(call, self.core.spread, tensor if self.rank == root else None, counts, places)

    def all_gather(self, mine: Tensor, outs: Sequence[Tensor], call: Signature) -> None:
        """Everybody lays out its own and reads all others."""
        n = mine.numel() * mine.element_size()
        self._run(call, self.core.spread, mine, [n] * self.size, outs)
        if outs[self.rank].data_ptr() != mine.data_ptr():
            outs[self.rank].view(-1).copy_(mine.view(-1))

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: Signature) -> None:
        """Everybody lays out what is for others, and reads what is for it."""
        self._run(call, self.core.exchange, out, into)

    def barrier(self, call: Signature, timeout: float | None = None) -> None:
        """Return when all ranks have come."""
        self._limit = timeout
        try:
            self._run(call, self.core.barrier)
        finally:
            self._limit = None

    def send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        """Into the ring to `dst`, as far as there is room; the rest as it is read."""
        return _Letter(self, self.matching.send(dst, _CONTEXT, tag, bytes_of(tensor)), tensor)

    def receive(self, tensor: Tensor, src: int, tag: int) -> Message:
        """From one rank, or from any."""
        return _Letter(self, self.matching.receive(src, _CONTEXT, tag, bytes_of(tensor)), tensor)

    def close(self) -> None:
        """Say goodbye, so that a rank that still waits for this one is told."""
        self.matching.close()
        self._segment.close()

    # -- wrong calls -------------------------------------------------------------------------------------------------

    def _run(self, call: Signature, move: Callable[..., None], *arguments: object) -> None:
        """Every collective: the ranks' calls are compared inside; say in words where they differ."""
        self._doing = call
        self._number += 1
        try:
            move(*arguments, Call(call.hash, self._site.hash))
        except Mismatch:
            raise different_calls(self._tell(), f"call {self._number}") from None
        finally:
            if self._attending:
                self._attending = False
                self.matching.leave()
        if self.core.crossed:
            sites = tuple(site for _, site in self.core.calls())
            crossed = self._crossings.add(call.hash, sites, self._number)
            if crossed is not None:
                raise crossed_calls(self._tell(), *crossed, f"call {self._number}")

    def _tell(self) -> list[tuple[str, str]]:
        """Every rank's (call, site), through the boards: write, wait for all, read, wait for all."""
        self._segment.write(f"{self._doing.text[:400]}\n{self._site.text[-400:]}")
        self.core.barrier(Call(_TELL.hash))
        told = [self._segment.read(s).partition("\n") for s in range(self.size)]
        self.core.barrier(Call(_TELL.hash))
        return [(call, where) for call, _, where in told]

    def _slow(self, rank: int, seconds: float) -> DrumlineError | None:
        """A collective waits long: perhaps the other waits for a message of this rank."""
        if self._limit is not None and seconds > self._limit:
            return GaveUp(f"rank {self.rank} waited {self._limit:g} s for rank {rank}", rule="the timeout of this call")
        if seconds < _PATIENCE:
            return None
        self._attending = True
        self.matching.watch.sites[threading.get_ident()] = f"{self._doing.text} at {self._site.text}"
        return self.matching.attend(_Missing(rank), seconds)


@dataclass(frozen=True, slots=True)
class _Missing:
    """A rank that has not come to a collective."""

    rank: int
    done = False

    @property
    def peers(self) -> Sequence[int]:
        """Who must come."""
        return (self.rank,)

    def about(self) -> str:
        """What it is."""
        return f"without rank {self.rank}"


class _Letter:
    """A send or a receive."""

    def __init__(self, engine: ShmEngine, item: Sending | Receive, tensor: Tensor) -> None:
        self._engine, self._item, self._tensor = engine, item, tensor
        self.source = -1

    def test(self) -> bool:
        """Whether it is done."""
        if not self._item.done:
            self._engine.matching.poke(helper=True)
        if isinstance(self._item, Receive) and self._item.cancelled:
            return False  # by a deadlock that was found; whoever waits for it is told
        return self._item.done and self._check()

    def wait(self, timeout: float | None) -> None:
        """Block until it is."""
        if self._item.done:
            self._check()
            return
        end = time.monotonic() + (timeout or self._engine.core.timeout)
        verb = "receive" if isinstance(self._item, Receive) else "send"
        self._engine.matching.watch.sites[threading.get_ident()] = f"{verb} at {call_site(OURS).text}"
        self._engine.matching.wait_until(lambda: self._item.done or time.monotonic() > end, [self._item])
        if not self._item.done:
            raise GaveUp(f"rank {self._engine.rank} waited for a message {self._item.about()} in vain")
        self._check()

    def _check(self) -> bool:
        item = self._item
        if isinstance(item, Receive):
            self.source = item.source
            expected = self._tensor.numel() * self._tensor.element_size()
            if item.nbytes != expected:
                raise InputError(
                    f"rank {item.source} sent {item.nbytes} bytes, rank {self._engine.rank} expects {expected}",
                    rule="a tensor is received into one of the same size",
                )
        return True
