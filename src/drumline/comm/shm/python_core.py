"""core.c in Python, for machines without a C compiler: the same memory, counters and steps, slower.

Counters are single aligned words with one writer. The processor must not reorder a write of data and the later write of
its counter: x86 does not; elsewhere the interpreter's lock is released and taken again in between, which orders them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from .core import MISMATCH, OK, STOPPED, CallIds, SharedCore
from .segment import CONTROL, RING, SLOT, SLOTS, SMALL, SharedSegment

_ENTER, _IN, _OUT, _DONE, _BELL = (16 * i for i in range(5))
"""Offsets of a rank's counters in its control block, in 4-byte words."""
_CALL = 40
"""Offset of its two calls (signature, site, steps), in 8-byte words."""
_REDUCERS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class PythonCore(SharedCore):
    """The collectives of one group, in Python."""

    def __init__(self, segment: SharedSegment, timeout: float) -> None:
        super().__init__(segment, timeout)
        at, p = segment.layout, segment.size
        memory = numpy.frombuffer(segment.memory, numpy.uint8)
        self._bytes = torch.from_numpy(memory)
        self._words = memory[at.control_at : at.control_at + p * CONTROL].view(numpy.uint32).reshape(p, -1)
        self._calls = memory[at.control_at : at.control_at + p * CONTROL].view(numpy.uint64).reshape(p, -1)
        rings = memory[at.ring_at : at.total].reshape(p, p, RING + at.ring)
        self._ends = rings[:, :, :RING].view(numpy.uint64)
        self._rings = rings[:, :, RING:]
        self._tick = self._step = 0
        self._differ = False

    # -- counters -----------------------------------------------------------------------------------------------------

    def _await(self, counter: int, target: int, ranks: Sequence[int] | None = None) -> int:
        """Poll, then poll less and less often."""
        for s in range(self.size) if ranks is None else ranks:
            if s == self.rank:
                continue
            polls, checked = 0, time.monotonic()
            while (int(self._words[s, counter]) - target) & 0x80000000:
                polls += 1
                time.sleep(0 if polls < 200 else 0.0001 if polls < 1000 else 0.001)
                if polls % 64 == 0 and time.monotonic() - checked > self.SLICE / 1000:
                    checked = time.monotonic()
                    if self.check_peer(s, 0):
                        return STOPPED
        return OK

    def _raise(self, counter: int, value: int) -> None:
        time.sleep(0)  # releases and takes the interpreter's lock: a memory barrier
        self._words[self.rank, counter] = value & 0xFFFFFFFF

    def _enter(self, call: CallIds, steps: int) -> tuple[int, int]:
        """Publish this rank's call and read those of the others: (code, most steps of any rank)."""
        self._tick += 1
        at = _CALL + 3 * (self._tick & 1)
        self._calls[self.rank, at : at + 3] = (call.signature, call.site, steps)
        self._raise(_ENTER, self._tick)
        if self._await(_ENTER, self._tick):
            return STOPPED, 0
        calls = self._calls[:, at : at + 3]
        self._differ = bool((calls[:, 1] != calls[0, 1]).any())
        code = MISMATCH if (calls[:, 0] != calls[0, 0]).any() else OK
        return code, int(calls[:, 2].max())

    # -- memory -------------------------------------------------------------------------------------------------------

    def _mailbox(self, s: int) -> Tensor:
        at = self.segment.layout.small_at + (2 * s + (self._tick & 1)) * SMALL
        return self._bytes[at : at + SMALL]

    def _slot(self, s: int, step: int, *, out: bool = False) -> Tensor:
        at = self.segment.layout.out_at if out else self.segment.layout.in_at
        at += (s * SLOTS + step % SLOTS) * SLOT
        return self._bytes[at : at + SLOT]

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str, root: int, call: CallIds) -> None:
        """Reduce in place: each rank reduces its share of each block."""
        self.end(self._all_reduce(tensor.view(-1), op, call, root))

    def _all_reduce(self, x: Tensor, op: str, call: CallIds, root: int) -> int:
        p, r, item = self.size, self.rank, x.element_size()
        each = SLOT // item // p
        block = each * p
        code, steps = self._enter(call, -(-x.numel() // block))
        base = self._step
        for n in range(steps if code == OK else 0):
            part = [x[n * block + s * each : n * block + (s + 1) * each] for s in range(p)]
            if code := self._await(_DONE, base + n + 1 - SLOTS):
                break
            for s in range(p):
                self._store(self._slot(r, base + n)[s * each * item :], part[s])
            self._raise(_IN, base + n + 1)
            if code := self._await(_IN, base + n + 1):
                break
            mine = part[r].numel() * item
            total = _reduced([self._slot(s, base + n)[r * each * item :][:mine].view(x.dtype) for s in range(p)], op)
            self._store(self._slot(r, base + n, out=True), total)
            self._raise(_OUT, base + n + 1)
            if root in (-1, r):
                if code := self._await(_OUT, base + n + 1):
                    break
                for s in range(p):
                    part[s].copy_(self._slot(s, base + n, out=True)[: part[s].numel() * item].view(x.dtype))
            self._raise(_DONE, base + n + 1)
        self._step = base + steps
        return code

    def reduce_scatter(self, blocks: Sequence[Tensor], out: Tensor, op: str, call: CallIds) -> None:
        """Exchange blocks; each rank reduces its own."""
        into = [torch.empty_like(out) for _ in range(self.size)]
        into[self.rank] = blocks[self.rank]
        self.exchange(
            [None if s == self.rank else b for s, b in enumerate(blocks)],
            [None if s == self.rank else b for s, b in enumerate(into)],
            call,
        )
        out.copy_(_reduced([block.view(-1) for block in into], op).view(out.shape))

    def spread(self, mine: Tensor | None, counts: Sequence[int], to: Sequence[Tensor | None], call: CallIds) -> None:
        """Publish this rank's data and read that of the others."""
        self.end(self._spread(None if mine is None else _raw(mine), counts, to, call))

    def _spread(self, mine: Tensor | None, counts: Sequence[int], to: Sequence[Tensor | None], call: CallIds) -> int:
        code, steps = self._enter(call, -(-max(counts) // SLOT))
        base = self._step
        for n in range(steps if code == OK else 0):
            if mine is not None and n * SLOT < counts[self.rank]:
                if code := self._await(_DONE, base + n + 1 - SLOTS):
                    break
                self._store(self._slot(self.rank, base + n), mine[n * SLOT : (n + 1) * SLOT])
                self._raise(_IN, base + n + 1)
            for s, place in enumerate(to):
                if s != self.rank and place is not None and n * SLOT < counts[s]:
                    if code := self._await(_IN, base + n + 1, [s]):
                        break
                    into = _raw(place)[n * SLOT : (n + 1) * SLOT]
                    into.copy_(self._slot(s, base + n)[: into.numel()])
            if code:
                break
            self._raise(_DONE, base + n + 1)
        self._step = base + steps
        return code

    def exchange(self, out: Sequence[Tensor | None], into: Sequence[Tensor | None], call: CallIds) -> None:
        """Send a message to every rank and receive one from each."""
        self.end(self._exchange([_raw(t) for t in out], [_raw(t) for t in into], call))

    def _exchange(self, out: Sequence[Tensor], into: Sequence[Tensor], call: CallIds) -> int:
        p, r, room = self.size, self.rank, SLOT // self.size // 64 * 64
        sizes = torch.tensor([*(t.numel() for t in out), *(t.numel() for t in into)])
        self._tick += 1  # the mailbox of the call that begins
        self._store(self._mailbox(r), sizes)
        self._tick -= 1
        longest = max((t.numel() for t in (*out, *into)), default=0)
        code, steps = self._enter(call, -(-longest // room))
        if code == OK:
            table = torch.stack([self._mailbox(s)[: 16 * p].view(torch.int64) for s in range(p)])
            code = OK if torch.equal(table[:, :p], table[:, p:].T) else MISMATCH
        base = self._step
        for n in range(steps if code == OK else 0):
            if code := self._await(_DONE, base + n + 1 - SLOTS):
                break
            for s in range(p):
                self._store(self._slot(r, base + n)[s * room :], out[s][n * room : (n + 1) * room])
            self._raise(_IN, base + n + 1)
            if code := self._await(_IN, base + n + 1):
                break
            for s in range(p):
                part = into[s][n * room : (n + 1) * room]
                part.copy_(self._slot(s, base + n)[r * room :][: part.numel()])
            self._raise(_DONE, base + n + 1)
        self._step = base + (0 if code == MISMATCH else steps)
        return code

    def barrier(self, call: CallIds) -> None:
        """Return when all ranks have called it."""
        self.end(self._enter(call, 0)[0])

    @property
    def crossed(self) -> bool:
        """Whether the sites of the last call differ between ranks."""
        return self._differ

    def calls(self) -> list[tuple[int, int]]:
        """(signature, site) of every rank's last call."""
        at = _CALL + 3 * (self._tick & 1)
        return [(int(row[at]), int(row[at + 1])) for row in self._calls]

    @staticmethod
    def _store(place: Tensor, data: Tensor) -> None:
        raw = _raw(data)
        place[: raw.numel()].copy_(raw)

    # -- rings --------------------------------------------------------------------------------------------------------

    def write(self, dst: int, address: int, n: int) -> int:
        """Write up to n bytes into the ring to `dst`; returns the number written."""
        ends, ring = self._ends[self.rank, dst], self._rings[self.rank, dst]
        head = int(ends[0])
        n = min(n, ring.size - (head - int(ends[8])))
        if n:
            self._copy(ring, head, n, numpy.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address)), out=True)
            time.sleep(0)
            ends[0] = head + n
        return n

    def read(self, src: int, address: int, n: int) -> int:
        """Read up to n bytes from the ring of `src`; returns the number read."""
        ends, ring = self._ends[src, self.rank], self._rings[src, self.rank]
        tail = int(ends[8])
        n = min(n, int(ends[0]) - tail)
        if n:
            self._copy(ring, tail, n, numpy.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(address)), out=False)
            time.sleep(0)
            ends[8] = tail + n
        return n

    @staticmethod
    def _copy(ring: Any, at: int, n: int, memory: Any, *, out: bool) -> None:
        start = at % ring.size
        first = min(n, ring.size - start)
        if out:
            ring[start : start + first], ring[: n - first] = memory[:first], memory[first:]
        else:
            memory[:first], memory[first:] = ring[start : start + first], ring[: n - first]

    def readable(self, src: int) -> int:
        """Bytes in the ring of `src`."""
        ends = self._ends[src, self.rank]
        return int(ends[0]) - int(ends[8])

    def first_readable(self, start: int) -> int:
        """The first rank from `start` on, cyclically, whose ring is not empty; -1 if all are."""
        for k in range(self.size):
            s = (start + k) % self.size
            if s != self.rank and self.readable(s):
                return s
        return -1

    def bell(self, seen: int, milliseconds: int) -> int:
        """Poll the rings, less and less often, until one is not empty: there are no wake-ups here."""
        end, polls = time.monotonic() + milliseconds / 1000, 0
        while milliseconds and self.first_readable(0) < 0 and time.monotonic() < end:
            polls += 1
            time.sleep(0 if polls < 100 else 0.0005)
        return 0


def _raw(tensor: Tensor | None) -> Tensor:
    return torch.empty(0, dtype=torch.uint8) if tensor is None else tensor.reshape(-1).view(torch.uint8)


def _reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """The reduction in rank order; half types in float, rounded once."""
    dtype = parts[0].dtype
    wide = dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if wide else parts[0].clone()
    for part in parts[1:]:
        total = _REDUCERS[op](total, part.float() if wide else part)
    if op == "avg":
        total = total / len(parts)
    return total.to(dtype)
