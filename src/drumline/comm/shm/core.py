"""Collectives on shared memory by core.c: addresses of tensors in, a code out, and words for what went wrong."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.errors import DrumlineError, GaveUp
from . import native
from .segment import SLOT, SMALL, Segment

if TYPE_CHECKING:
    from .python import PythonCore

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.bool: 9,
    torch.complex64: 10,
    torch.complex128: 11,
    torch.uint16: 12,
    torch.uint32: 13,
    torch.uint64: 14,
}
"""The numbers by which core.c knows types."""
OPS = {"sum": 0, "product": 1, "min": 2, "max": 3, "band": 4, "bor": 5, "bxor": 6, "avg": 7}
"""The numbers by which core.c knows operators."""
_SPIN, _YIELD = 20_000, 200_000
"""Nanoseconds of a wait until it lets others run, and until it sleeps. Where ranks outnumber cores it lets them run at
once: whoever it waits for may need this very core."""
OK, STOPPED, MISMATCH = 0, 1, 2
"""What core.c answers."""


class Mismatch(Exception):
    """The ranks called different things; nothing was moved. Raised on all of them."""


@dataclass(slots=True)
class Call:
    """What a rank is about to do, so far as the others must agree."""

    signature: int = 0
    """Equal on all ranks, or the call is refused."""
    site: int = 0
    """A number for the place in the user's program."""


class CoreBase:
    """What the native and the Python core have in common: looking after the others while a wait lasts."""

    SLICE = 100
    """Milliseconds between two looks."""

    def __init__(self, segment: Segment, timeout: float) -> None:
        self.segment, self.rank, self.size, self.timeout = segment, segment.rank, segment.size, timeout
        self._since = 0.0
        self._reason: DrumlineError | None = None
        self.on_slow: Callable[[int, float], DrumlineError | None] | None = None
        """(rank waited for, seconds) -> why to stop waiting, if there is a reason. Asked while a wait lasts."""

    def end(self, code: int) -> None:
        """After every call: raise what went wrong."""
        self._since = 0.0
        if code == OK:
            return
        if code == MISMATCH:
            raise Mismatch
        assert code == STOPPED and self._reason is not None
        raise self._reason

    def look(self, rank: int, what: int) -> int:
        """Called from a wait that lasts: is the other rank still there, and is there time left? Nonzero stops."""
        try:
            now = time.monotonic()
            self._since = self._since or now - self.SLICE / 1000
            self._reason = self._problem(rank, now - self._since)
        except Exception as e:  # nothing may escape into C
            self._reason = GaveUp(f"rank {self.rank} could not look after rank {rank}: {e!r}")
        return int(self._reason is not None)

    def _problem(self, rank: int, seconds: float) -> DrumlineError | None:
        # What others have found out says more than that they are gone.
        if self.on_slow is not None and (problem := self.on_slow(rank, seconds)) is not None:
            return problem
        state = self.segment.state(rank)
        if state != "alive":
            word = "has left the group" if state == "left" else "has died"
            return GaveUp(f"rank {self.rank} waits for rank {rank}, which {word}")
        if seconds > self.timeout:
            return GaveUp(
                f"rank {self.rank} waited {self.timeout:g} s for rank {rank}",
                rule="all ranks call the same collectives in the same order, within the timeout of the group",
            )
        return None


class Core(CoreBase):
    """The collectives of one group by core.c. One call at a time; whoever owns it sees to that."""

    def __init__(self, segment: Segment, timeout: float) -> None:
        super().__init__(segment, timeout)
        self._c = native.load()
        at = segment.layout
        crowded = segment.size > (os.cpu_count() or 1)
        self._slow = native.SLOW(self.look)
        self._group = native.Group(
            base=segment.base,
            p=self.size,
            r=self.rank,
            small=SMALL,
            slot=SLOT,
            ring=at.ring,
            control_at=at.control_at,
            small_at=at.small_at,
            in_at=at.in_at,
            out_at=at.out_at,
            ring_at=at.ring_at,
            spin_ns=0 if crowded else _SPIN,
            yield_ns=_YIELD,
            slice_ms=self.SLICE,
            slow=self._slow,
        )
        self._g = ctypes.byref(self._group)
        self._many = ctypes.c_void_p * self.size
        self._counts = ctypes.c_uint64 * self.size

    def all_reduce(self, tensor: Tensor, op: str, root: int, call: Call) -> None:
        """In place, on all ranks (root -1) or on the root alone. The tensor is contiguous, as everywhere here."""
        self._run(
            self._c.dl_all_reduce,
            tensor.data_ptr(),
            tensor.numel(),
            tensor.element_size(),
            DTYPES[tensor.dtype],
            OPS[op],
            root,
            call.signature,
            call.site,
        )

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: Call) -> None:
        """`out` becomes block `rank` of the reduction of everybody's blocks."""
        self._run(
            self._c.dl_reduce_scatter,
            self._pointers(blocks),
            out.data_ptr(),
            out.numel(),
            out.element_size(),
            DTYPES[out.dtype],
            OPS[op],
            call.signature,
            call.site,
        )

    def spread(self, mine: Tensor | None, counts: Sequence[int], to: Sequence[Tensor | None], call: Call) -> None:
        """`counts[s]` bytes of every rank s arrive in `to[s]`, where there is one; `mine` are this rank's."""
        self._run(
            self._c.dl_spread,
            None if mine is None else mine.data_ptr(),
            self._counts(*counts),
            self._pointers(to),
            call.signature,
            call.site,
        )

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: Call) -> None:
        """`out[s]` goes to rank s, `into[s]` arrives from it; None is nothing. This rank's own part is not copied."""
        self._run(
            self._c.dl_exchange,
            self._pointers(out),
            self._bytes(out),
            self._pointers(into),
            self._bytes(into),
            call.signature,
            call.site,
        )

    def barrier(self, call: Call) -> None:
        """Return when all ranks have come."""
        self._run(self._c.dl_barrier, call.signature, call.site)

    @property
    def crossed(self) -> bool:
        """Whether the sites of the last call differ between ranks."""
        return bool(self._group.crossed)

    def calls(self) -> list[tuple[int, int]]:
        """(signature, site) of the last call of every rank."""
        signature, site = ctypes.c_uint64(), ctypes.c_uint64()
        found = []
        for s in range(self.size):
            self._c.dl_call(self._g, s, ctypes.byref(signature), ctypes.byref(site))
            found.append((signature.value, site.value))
        return found

    def write(self, dst: int, address: int, n: int) -> int:
        """Put up to n bytes into the ring to `dst`, and wake it; how many there was room for."""
        return int(self._c.dl_ring_write(self._g, dst, address, n, 1))

    def read(self, src: int, address: int, n: int) -> int:
        """Take up to n bytes that wait from `src`."""
        return int(self._c.dl_ring_read(self._g, src, address, n))

    def waiting(self, src: int) -> int:
        """How many bytes of `src` wait."""
        return int(self._c.dl_ring_waiting(self._g, src))

    def any_waiting(self, start: int) -> int:
        """The first rank from `start` on, round the ring, of whom something waits; -1 if none."""
        return int(self._c.dl_ring_any(self._g, start))

    def bell(self, seen: int, milliseconds: int) -> int:
        """How often this rank was woken so far; waits at most so long for it to differ from `seen`."""
        return int(self._c.dl_bell(self._g, seen, milliseconds))

    def _pointers(self, tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
        return self._many(*(None if t is None else t.data_ptr() for t in tensors))

    def _bytes(self, tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_uint64]:
        return self._counts(*(0 if t is None else t.numel() * t.element_size() for t in tensors))

    def _run(self, function: Callable[..., int], *arguments: object) -> None:
        code = function(self._g, *arguments)
        if code or self._since:
            self.end(code)


def core_of(segment: Segment, timeout: float, *, compiled: bool) -> Core | PythonCore:
    """The core that all ranks of the group have agreed on."""
    if compiled:
        return Core(segment, timeout)
    from .python import PythonCore

    return PythonCore(segment, timeout)
