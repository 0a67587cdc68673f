"""The torch.distributed backend `shm`: `init_process_group("shm")` after `import drumline.comm`.

Collectives run in the core, messages through the matcher.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...core.errors import DrumlineError, GaveUp, InputError
from ...torchkit.process_groups import has_backend
from ..call_check import (
    LIBRARY_PACKAGES,
    CallSignature,
    CallSite,
    CrossingDetector,
    call_site,
    crossed_calls,
    different_calls,
    signature,
)
from ..messaging.matching import MessageMatcher
from ..messaging.messages import ReceiveOperation, SendOperation
from ..messaging.transport import bytes_of
from ..process_group.backend import BackendMessage, CollectiveBackend
from ..process_group.buffers import for_torch
from ..process_group.group import BackendProcessGroup
from ..tensor_identity import named_call
from .core import CallIds, CallMismatch, make_core
from .endpoint import ShmEndpoint
from .segment import NoSharedMemory, SharedSegment

_PATIENCE = 0.5
"""Seconds of waiting before this rank takes part in deadlock detection."""
_CONTEXT = 0
_EXCHANGE_CALLS = signature("exchange_calls")


def register() -> None:
    """Register the backend with torch."""
    if not has_backend("shm"):
        dist.Backend.register_backend("shm", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, _: Any) -> Any:
    """Create a process group; called by torch."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    try:
        backend = ShmBackend(store, rank, size, timeout.total_seconds())
    except NoSharedMemory as e:
        warnings.warn(f"the shm backend falls back to gloo: {e}", RuntimeWarning, stacklevel=2)
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    except DrumlineError as e:
        raise for_torch(e) from None
    return BackendProcessGroup("shm", backend, store, rank, size, timeout)


class ShmBackend(CollectiveBackend):
    """Collectives and messages of one group through shared memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._segment = SharedSegment(store, rank, size, timeout)
        self.core = make_core(self._segment, timeout, compiled=self._segment.compiled)
        self.core.on_slow = self._slow
        self.rank, self.size = rank, size
        self.matcher = MessageMatcher(ShmEndpoint(self.core))
        self._site = CallSite("", 0)
        self._current = signature("")
        self._number = 0
        self._attending = False
        self._limit: float | None = None
        """The timeout of this call, if it differs from the group's."""
        self._crossings = CrossingDetector(size)

    def at_site(self, site: CallSite) -> None:
        """Set the line of the next call."""
        self._site = site

    def all_reduce(self, tensor: Tensor, op: str, call: CallSignature, *, root: int = -1) -> None:
        """Reduce in place, on all ranks or on the root alone."""
        self._run(call, self.core.all_reduce, tensor, op, root)

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: CallSignature) -> None:
        """Reduce-scatter: each rank reduces its own block."""
        self._run(call, self.core.reduce_scatter, blocks, out, op)

    def broadcast(self, tensor: Tensor, root: int, call: CallSignature) -> None:
        """Copy from the root: the root publishes, all others read."""
        counts = [0] * self.size
        counts[root] = tensor.numel() * tensor.element_size()
        places: list[Tensor | None] = [None] * self.size
        if self.rank != root:
            places[root] = tensor
        self._run(call, self.core.spread, tensor if self.rank == root else None, counts, places)

    def all_gather(self, mine: Tensor, outs: Sequence[Tensor], call: CallSignature) -> None:
        """All-gather: every rank publishes its own and reads the others."""
        n = mine.numel() * mine.element_size()
        self._run(call, self.core.spread, mine, [n] * self.size, outs)
        if outs[self.rank].data_ptr() != mine.data_ptr():
            outs[self.rank].view(-1).copy_(mine.view(-1))

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: CallSignature) -> None:
        """Exchange: every rank publishes its messages and reads those for it."""
        self._run(call, self.core.exchange, out, into)

    def barrier(self, call: CallSignature, timeout: float | None = None) -> None:
        """Return when all ranks have called it."""
        self._limit = timeout
        try:
            self._run(call, self.core.barrier)
        finally:
            self._limit = None

    def send(self, tensor: Tensor, dst: int, tag: int) -> BackendMessage:
        """Start a send: write what fits into the ring to `dst`; the rest follows as it is read."""
        return _ShmMessage(self, self.matcher.send(dst, _CONTEXT, tag, bytes_of(tensor)), tensor)

    def receive(self, tensor: Tensor, src: int, tag: int) -> BackendMessage:
        """Start a receive, from any rank if `src` is -1."""
        return _ShmMessage(self, self.matcher.receive(src, _CONTEXT, tag, bytes_of(tensor)), tensor)

    def close(self) -> None:
        """Leave the group, so that ranks which still wait for this one get an error."""
        self.matcher.close()
        self._segment.close()

    # -- wrong calls --------------------------------------------------------------------------------------------------

    def _run(self, call: CallSignature, move: Callable[..., None], *arguments: object) -> None:
        """Run a collective; the core compares the ranks' calls, and a difference is reported as text."""
        self._current = call = named_call(call, self._site.name)
        self._number += 1
        try:
            move(*arguments, CallIds(call.hash, self._site.hash))
        except CallMismatch:
            raise different_calls(self._all_calls(), f"call {self._number}") from None
        finally:
            if self._attending:
                self._attending = False
                self.matcher.leave()
        if self.core.crossed:
            sites = tuple(site for _, site in self.core.calls())
            crossed = self._crossings.add(call.hash, sites, self._number)
            if crossed is not None:
                raise crossed_calls(self._all_calls(), *crossed, f"call {self._number}")

    def _all_calls(self) -> list[tuple[str, str]]:
        """Every rank's (call, site) as text, through the boards: write, barrier, read, barrier."""
        self._segment.write(f"{self._current.text[:400]}\n{self._site.text[-400:]}")
        self.core.barrier(CallIds(_EXCHANGE_CALLS.hash))
        texts = [self._segment.read(s).partition("\n") for s in range(self.size)]
        self.core.barrier(CallIds(_EXCHANGE_CALLS.hash))
        return [(call, where) for call, _, where in texts]

    def _slow(self, rank: int, seconds: float) -> DrumlineError | None:
        """Called during a long wait: the other rank may be waiting for a message of this one."""
        if self._limit is not None and seconds > self._limit:
            return GaveUp(f"rank {self.rank} waited {self._limit:g} s for rank {rank}", rule="the timeout of this call")
        if seconds < _PATIENCE:
            return None
        self._attending = True
        self.matcher.detector.sites[threading.get_ident()] = f"{self._current.text} at {self._site.text}"
        return self.matcher.attend(_Missing(rank), seconds)


@dataclass(frozen=True, slots=True)
class _Missing:
    """A rank that has not called a collective."""

    rank: int
    done = False

    @property
    def peers(self) -> Sequence[int]:
        """The rank that must call it."""
        return (self.rank,)

    def about(self) -> str:
        """A description for error messages."""
        return f"without rank {self.rank}"


class _ShmMessage:
    """A send or a receive."""

    def __init__(self, backend: ShmBackend, item: SendOperation | ReceiveOperation, tensor: Tensor) -> None:
        self._backend, self._item, self._tensor = backend, item, tensor
        self.source = -1

    def test(self) -> bool:
        """Whether it is complete; makes progress."""
        if not self._item.done:
            self._backend.matcher.make_progress(helper=True)
        if isinstance(self._item, ReceiveOperation) and self._item.cancelled:
            return False  # by a deadlock; a thread that waits for it gets the error
        return self._item.done and self._check()

    def wait(self, timeout: float | None) -> None:
        """Block until it is complete."""
        if self._item.done:
            self._check()
            return
        end = time.monotonic() + (timeout or self._backend.core.timeout)
        verb = "receive" if isinstance(self._item, ReceiveOperation) else "send"
        self._backend.matcher.detector.sites[threading.get_ident()] = f"{verb} at {call_site(LIBRARY_PACKAGES).text}"
        self._backend.matcher.wait_until(lambda: self._item.done or time.monotonic() > end, [self._item])
        if not self._item.done:
            raise GaveUp(f"rank {self._backend.rank} waited for a message {self._item.about()}, which timed out")
        self._check()

    def _check(self) -> bool:
        item = self._item
        if isinstance(item, ReceiveOperation):
            self.source = item.source
            expected = self._tensor.numel() * self._tensor.element_size()
            if item.nbytes != expected:
                raise InputError(
                    f"rank {item.source} sent {item.nbytes} bytes, rank {self._backend.rank} expects {expected}",
                    rule="a tensor is received into one of the same size",
                )
        return True
