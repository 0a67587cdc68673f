"""Check that all ranks make the same call, before a collective moves data.

Ranks all-gather 16 bytes: a fingerprint of the call and a hash of the line that made it. If fingerprints differ, they
exchange their calls as text, and every rank raises the same InputError.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

import torch

from ..core.errors import InputError
from .operators import dtype_name
from .transport import FINGERPRINT_BYTES, Transport

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
"""Spreads the sequence number over all 64 bits."""
CALL_BYTES = 768
"""Bytes of a call as text; longer text is cut."""
_REFUSED = _MASK
_FINGERPRINT = struct.Struct("<QQ")
assert _FINGERPRINT.size == FINGERPRINT_BYTES


LIBRARY_PACKAGES = ("drumline", "torch", "contextlib", "functools", "threading")
"""Packages whose lines are not the user's, for calls that come through torch."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """The line of the user's program that made a call."""

    text: str
    hash: int
    name: str = ""
    """The caller's own name of the call, the same on all ranks; empty if it has none."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The properties of a call that must be equal on all ranks."""

    text: str
    hash: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """The call that a rank is in, for error messages."""

    what: object
    number: int
    site: CallSite

    def __str__(self) -> str:
        return f"{self.what} (call {self.number}), at {self.site}" if self.number else f"{self.what}, at {self.site}"


def digest(text: str) -> int:
    """A 64-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4096)
def signature(
    collective: str,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    op: str = "",
    root: int | None = None,
    algorithm: str = "",
    segments: int = 1,
) -> CallSignature:
    """Describe a call by words without spaces, so that two calls can be compared word by word."""
    words = [collective]
    if dtype is not None:
        words.append(dtype_name(dtype))
    if shape is not None:
        words.append(f"({','.join(map(str, shape))})")
    words += [f"op={op}"] if op else []
    words += [f"root={root}"] if root is not None else []
    words += [f"algorithm={algorithm}"] if algorithm else []
    words += [f"segments={segments}"] if segments > 1 else []
    text = " ".join(words)
    return CallSignature(text, digest(text))


def call_site(skip: tuple[str, ...] = ("drumline",)) -> CallSite:
    """The innermost line outside of the packages `skip`, or the one set by `attribute_calls_to`."""
    attributed: CallSite | None = getattr(_attributed, "site", None) if _attributes else None
    if attributed is not None:
        return attributed
    return _site(_outside(sys._getframe(1), skip)[0])


def _outside(frame: FrameType, skip: tuple[str, ...]) -> tuple[FrameType, int]:
    """The innermost frame outside of the packages `skip`, and how many frames further out it is."""
    packages, depth = _packages, 0
    while True:
        name = frame.f_globals.get("__name__", "")
        package = packages.get(name)
        if package is None:
            package = packages.setdefault(name, name.partition(".")[0])
        outer = frame.f_back if package in skip else None
        if outer is None:
            return frame, depth
        frame, depth = outer, depth + 1


@dataclass(frozen=True, slots=True, eq=False)
class CallPlace:
    """Recognizes a call site by the identity of its code, which is quicker than finding it."""

    site: CallSite
    depth: int
    code: CodeType
    instruction: int
    caller: CodeType

    @staticmethod
    def here(skip: tuple[str, ...]) -> CallPlace | None:
        """The place of the call that the calling function serves; None where calls are attributed to another one."""
        if _attributes:
            return None
        frame, depth = _outside(sys._getframe(1), skip)
        caller = sys._getframe(min(3, depth + 1))
        return CallPlace(_site(frame), depth, frame.f_code, frame.f_lasti, caller.f_code)

    def is_here(self, nearer: int = 0) -> bool:
        """Whether the function that calls this serves a call of the same place. It is `nearer` to the user by so many
        frames than the function that called `here`."""
        try:
            frame = sys._getframe(self.depth + 1 - nearer)
            caller = sys._getframe(min(3, self.depth + 1) - nearer)
        except ValueError:  # fewer frames
            return False
        return (
            frame.f_code is self.code
            and frame.f_lasti == self.instruction
            and caller.f_code is self.caller
            and not _attributes
        )


_packages: dict[str, str] = {}
"""The package of each module that has made a call or passed one on."""
_attributed = threading.local()
_attributes = False
"""Whether any thread has attributed calls."""


def attribute_calls_to(site: CallSite | None) -> None:
    """Attribute this thread's calls from now on to that line, where another thread requested them."""
    global _attributes
    _attributes = True
    _attributed.site = site


def _site(frame: FrameType) -> CallSite:
    """The line that a frame is at. Reading its number takes long, so known places in the code are looked up."""
    code = frame.f_code
    known = _sites.get((id(code), frame.f_lasti))
    if known is not None:
        return known[1]
    # hosts may have the program in different folders, so only the file's name and the line count
    line, name = frame.f_lineno, code.co_filename.rpartition("/")[2]
    site = CallSite(f"{code.co_filename}:{line}", digest(f"{name}:{line}"))
    if len(_sites) >= 4096:
        _sites.clear()
    _sites[id(code), frame.f_lasti] = code, site
    return site


_sites: dict[tuple[int, int], tuple[CodeType, CallSite]] = {}
"""By code and instruction; the code is held, so that its id stays its own."""


class CallChecker:
    """Compares the calls of one rank of one communicator with those of the other ranks."""

    def __init__(
        self, transport: Transport, tag: int, *, check: bool, crossings: bool, shared: int, name: str = ""
    ) -> None:
        self._transport, self._tag, self._check, self._shared = transport, tag, check, shared
        self._number = 0
        self._name = name
        self._size = transport.size
        self._crossings = CrossingDetector(transport.size) if crossings else None
        self._gather: SmallAllGather | None = None

    def enter(self, call: CallSignature) -> None:
        """Announce a call; return when all ranks announced the same one, else raise on all of them."""
        site = call_site()
        self._number += 1
        self._transport.current_call = CurrentCall(call, self._number, site)
        if not self._check or self._size == 1:
            return
        base = call.hash ^ self._shared
        self._compare((base + self._number * _ODD) & _MASK, base, site, str(call))

    def refuse(self, error: InputError) -> InputError:
        """Report to the others that this rank's call was refused, so that they do not wait; returns its error."""
        site = call_site()
        self._number += 1
        if not error.where:
            error.where = str(site)
        if self._check and self._size > 1:
            self._transport.current_call = CurrentCall(f"a refused call: {error.what}", self._number, site)
            with contextlib.suppress(InputError):  # this rank's own error is more precise
                self._compare(_REFUSED, 0, site, f"refused: {error.what}")
        return error

    def _compare(self, fingerprint: int, base: int, site: CallSite, text: str) -> None:
        mine = _FINGERPRINT.pack(fingerprint, site.hash)
        gathered = self._transport.agree(mine)
        if gathered is None:
            if self._gather is None:
                self._gather = SmallAllGather(self._transport, self._tag, FINGERPRINT_BYTES)
            gathered = self._gather(mine)
        if gathered.count(mine) == self._size and fingerprint != _REFUSED:
            return
        pairs = [_FINGERPRINT.unpack(packed) for packed in gathered]
        if any(f != fingerprint for f, _ in pairs):
            raise self._different(text, site)
        if self._crossings is not None and fingerprint != _REFUSED:
            crossed = self._crossings.add(base, tuple(where for _, where in pairs), self._number)
            if crossed is not None:
                raise self._crossed(*crossed, text, site)

    def _all_calls(self, text: str, site: CallSite) -> list[tuple[str, str]]:
        """Every rank's (call, site) as text, by rank."""
        return decode_calls(SmallAllGather(self._transport, self._tag, CALL_BYTES)(encode_call(text, site)))

    def _different(self, text: str, site: CallSite) -> InputError:
        return different_calls(self._all_calls(text, site), f"call {self._number}{self._name}")

    def _crossed(self, a: int, b: int, since: int, text: str, site: CallSite) -> InputError:
        return crossed_calls(self._all_calls(text, site), a, b, since, f"call {self._number}{self._name}")


def encode_call(text: str, site: CallSite) -> bytes:
    """A call and its line in CALL_BYTES bytes."""
    third = CALL_BYTES // 3
    return f"{text[:third]}\n{site.text[-third:]}".encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")


def decode_calls(encoded: Iterable[bytes]) -> list[tuple[str, str]]:
    """(call, site) of every rank, from `encode_call`."""
    halves = (raw.rstrip(b"\0").decode(errors="replace").partition("\n") for raw in encoded)
    return [(call, where) for call, _, where in halves]


def different_calls(calls: list[tuple[str, str]], which: str) -> InputError:
    """The error of every rank when the ranks' (call, site) differ."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, call in enumerate(calls):
        groups.setdefault(call, []).append(rank)
    lines = [f"{ranks_text(ranks)}: {call}, at {where}" for (call, where), ranks in groups.items()]
    words = [call.split(" ") for call in dict.fromkeys(call for call, _ in groups)]
    return InputError(
        f"ranks made different calls ({which}):\n    " + "\n    ".join(lines),
        where="; ".join(dict.fromkeys(where for _, where in calls)),
        rule="all ranks call the same collectives in the same order, with the same shape, type, operator and root",
        fix=_difference(words),
    )


def crossed_calls(calls: list[tuple[str, str]], a: int, b: int, since: int, which: str) -> InputError:
    """The error of every rank when ranks a and b make equal calls in a different order."""
    note = " (one line, with its tensors in another order)" if calls[a][1] == calls[b][1] else ""
    return InputError(
        f"ranks {a} and {b} make their calls in a different order{note} ({which}):\n"
        f"    rank {a}: {calls[a][0]}, at {calls[a][1]}\n    rank {b}: {calls[b][0]}, at {calls[b][1]}\n"
        f"    and since call {since} each has been where the other is now",
        where="; ".join(dict.fromkeys((calls[a][1], calls[b][1]))),
        rule=f"equal calls in a different order mix their tensors: results since call {since} are wrong",
        fix="make the calls in one order on all ranks; if ranks swap roles on purpose: Communicator(crossings=False)",
    )


class CrossingDetector:
    """Finds ranks that make equal calls in a different order, by their call sites.

    If rank a was at X while rank b was at Y, and later a is at Y while b is at X, directly or through a chain of other
    lines, they have crossed. Each rank is compared with rank 0 and with its neighbour; only the latest patterns count.
    """

    LATEST = 64

    def __init__(self, size: int) -> None:
        self._pairs = [*((0, b) for b in range(1, size)), *((b - 1, b) for b in range(2, size))]
        self._seen: dict[tuple[int, tuple[int, ...]], int] = {}

    def add(self, base: int, sites: tuple[int, ...], number: int) -> tuple[int, int, int] | None:
        """Record a pattern; returns (rank, rank, first call that differs) if it crosses an earlier one."""
        key = (base, sites)
        if key in self._seen:
            return None
        self._seen[key] = number
        if len(self._seen) > self.LATEST:
            del self._seen[next(iter(self._seen))]
        for a, b in self._pairs:
            if sites[a] != sites[b]:
                since = self._crossed_since(base, a, b, sites)
                if since:
                    return a, b, since
        return None

    def _crossed_since(self, base: int, a: int, b: int, sites: tuple[int, ...]) -> int:
        """The first call of a chain from b's current line to a's; 0 if there is none."""
        edges: dict[int, list[tuple[int, int]]] = {}
        for (other, old), number in self._seen.items():
            if other == base and old[a] != old[b]:
                edges.setdefault(old[a], []).append((old[b], number))
        reached, todo = {sites[b]: self._next()}, [sites[b]]
        while todo:
            here = todo.pop()
            for site, number in edges.get(here, ()):
                if site not in reached:
                    reached[site] = min(number, reached[here])
                    todo.append(site)
        return reached.get(sites[a], 0)

    def _next(self) -> int:
        return 1 + max(self._seen.values())


class SmallAllGather:
    """All-gather of blocks of a fixed size by Bruck's algorithm: ceil(log2 p) rounds of messages."""

    def __init__(self, transport: Transport, tag: int, size: int) -> None:
        self._transport, self._tag, self._size = transport, tag, size
        self._memory = torch.zeros(transport.size * size, dtype=torch.uint8)
        self._bytes = memoryview(self._memory.numpy().data)

    def __call__(self, block: bytes) -> list[bytes]:
        t, n = self._transport, self._size
        p, rank = t.size, t.rank
        self._bytes[:n] = block
        have = 1  # blocks of ranks rank, rank+1, ..., rank+have-1, in this order
        while have < p:
            more = min(have, p - have)
            into, out = self._memory[have * n : (have + more) * n], self._memory[: more * n]
            receives, sends = t.exchange([(out, (rank - have) % p)], [(into, (rank + have) % p)], self._tag)
            for pending in (*receives, *sends):
                pending.wait()
            have += more
        blocks = [bytes(self._bytes[i * n : (i + 1) * n]) for i in range(p)]
        return [blocks[(r - rank) % p] for r in range(p)]


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 to 2`, `ranks 0, 2 and 5`."""
    all_ranks = list(ranks)
    *others, last = all_ranks
    if not others:
        return f"rank {last}"
    if len(others) > 1 and all_ranks == list(range(others[0], last + 1)):
        return f"ranks {others[0]} to {last}"
    return f"ranks {', '.join(map(str, others))} and {last}"


def _difference(calls: list[list[str]]) -> str:
    """The words in which calls differ, if they have the same structure."""
    if len(calls) == 1:
        return "the calls are equal, so the ranks were given different clusters, links or per_node: give all the same"
    length = len(calls[0])
    if any(len(words) != length for words in calls):
        return "compare the lines named above"
    differing = [sorted({words[i] for words in calls}) for i in range(length) if len({words[i] for words in calls}) > 1]
    return "make them equal: " + ", ".join(" against ".join(values) for values in differing)
