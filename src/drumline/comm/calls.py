"""Whether all ranks make the same call: compared before a collective moves data, so that a wrong one can be named.

Each rank tells every other a word of 16 bytes: a fingerprint of the call and a hash of the line that made it. Where the
fingerprints differ, the ranks tell each other their calls in words, and every rank raises the same InputError.
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
from .ops import name_of
from .transport import WORD, Transport

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
"""Spreads the sequence number over all 64 bits."""
_TEXT = 768
"""Bytes of a call in words; what is longer is cut."""
_REFUSED = _MASK
_WORD = struct.Struct("<QQ")
assert _WORD.size == WORD


OURS = ("drumline", "torch", "contextlib", "functools", "threading")
"""Packages whose lines are not the user's, where torch calls us."""


@dataclass(frozen=True, slots=True)
class Site:
    """The line of the user's program that made a call."""

    text: str
    hash: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Signature:
    """What all ranks must agree on."""

    text: str
    hash: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank is about, for errors."""

    what: object
    number: int
    site: Site

    def __str__(self) -> str:
        return f"{self.what} (call {self.number}), at {self.site}" if self.number else f"{self.what}, at {self.site}"


def digest(text: str) -> int:
    """64 bits of a text, the same in every process."""
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
) -> Signature:
    """Of a call, in words without spaces inside, so that two calls can be compared word by word."""
    words = [collective]
    if dtype is not None:
        words.append(name_of(dtype))
    if shape is not None:
        words.append(f"({','.join(map(str, shape))})")
    words += [f"op={op}"] if op else []
    words += [f"root={root}"] if root is not None else []
    words += [f"algorithm={algorithm}"] if algorithm else []
    words += [f"segments={segments}"] if segments > 1 else []
    text = " ".join(words)
    return Signature(text, digest(text))


def call_site(skip: tuple[str, ...] = ("drumline",)) -> Site:
    """The first line outside of the packages `skip`, from the innermost outwards; or that of `asked_at`."""
    asked: Site | None = getattr(_asked, "site", None)
    if asked is not None:
        return asked
    frame: FrameType = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in skip and frame.f_back is not None:
        frame = frame.f_back
    return _site(frame.f_code, frame.f_lineno)


_asked = threading.local()


def asked_at(site: Site | None) -> None:
    """What this thread does from now on was asked for at that line, by another thread."""
    _asked.site = site


@lru_cache(maxsize=4096)
def _site(code: CodeType, line: int) -> Site:
    # hosts may have the program in different folders: the name of the file and the line are the same on all
    name = code.co_filename.rpartition("/")[2]
    return Site(f"{code.co_filename}:{line}", digest(f"{name}:{line}"))


class Calls:
    """The calls of one rank of one communicator, and their comparison with the others'."""

    def __init__(
        self, transport: Transport, tag: int, *, check: bool, crossings: bool, shared: int, name: str = ""
    ) -> None:
        self._transport, self._tag, self._check, self._shared = transport, tag, check, shared
        self._number = 0
        self._name = name
        self._size = transport.size
        self._crossings = Crossings(transport.size) if crossings else None
        self._words: Gather | None = None

    def enter(self, call: Signature) -> None:
        """Announce a call, and return when all ranks have announced the same; else raise on all of them."""
        site = call_site()
        self._number += 1
        self._transport.doing = Doing(call, self._number, site)
        if not self._check or self._size == 1:
            return
        base = call.hash ^ self._shared
        self._compare((base + self._number * _ODD) & _MASK, base, site, str(call))

    def refuse(self, error: InputError) -> InputError:
        """Tell the others that this rank's call was refused, so that they do not wait; what to raise here."""
        site = call_site()
        self._number += 1
        if not error.where:
            error.where = str(site)
        if self._check and self._size > 1:
            self._transport.doing = Doing(f"a call that was refused: {error.what}", self._number, site)
            with contextlib.suppress(InputError):  # this rank's own error says more
                self._compare(_REFUSED, 0, site, f"refused: {error.what}")
        return error

    def _compare(self, fingerprint: int, base: int, site: Site, text: str) -> None:
        word = _WORD.pack(fingerprint, site.hash)
        words = self._transport.agree(word)
        if words is None:
            if self._words is None:
                self._words = Gather(self._transport, self._tag, WORD)
            words = self._words(word)
        if words.count(word) == self._size and fingerprint != _REFUSED:
            return
        pairs = [_WORD.unpack(w) for w in words]
        if any(f != fingerprint for f, _ in pairs):
            raise self._different(text, site)
        if self._crossings is not None and fingerprint != _REFUSED:
            crossed = self._crossings.add(base, tuple(where for _, where in pairs), self._number)
            if crossed is not None:
                raise self._crossed(*crossed, text, site)

    def _tell(self, text: str, site: Site) -> list[tuple[str, str]]:
        """Every rank's (call, site), by rank."""
        told = f"{text[: _TEXT // 3]}\n{site.text[-_TEXT // 3 :]}".encode()[:_TEXT]
        texts = Gather(self._transport, self._tag, _TEXT)(told.ljust(_TEXT, b"\0"))
        halves = (raw.rstrip(b"\0").decode(errors="replace").partition("\n") for raw in texts)
        return [(call, where) for call, _, where in halves]

    def _different(self, text: str, site: Site) -> InputError:
        return different_calls(self._tell(text, site), f"call {self._number}{self._name}")

    def _crossed(self, a: int, b: int, since: int, text: str, site: Site) -> InputError:
        return crossed_calls(self._tell(text, site), a, b, since, f"call {self._number}{self._name}")


def different_calls(told: list[tuple[str, str]], which: str) -> InputError:
    """What every rank raises when (call, site) of the ranks differ."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, call in enumerate(told):
        groups.setdefault(call, []).append(rank)
    lines = [f"{ranks_text(ranks)}: {call}, at {where}" for (call, where), ranks in groups.items()]
    words = [call.split(" ") for call in dict.fromkeys(call for call, _ in groups)]
    return InputError(
        f"ranks made different calls ({which}):\n    " + "\n    ".join(lines),
        where="; ".join(dict.fromkeys(where for _, where in told)),
        rule="all ranks call the same collectives in the same order, with the same shape, type, operator and root",
        fix=_difference(words),
    )


def crossed_calls(told: list[tuple[str, str]], a: int, b: int, since: int, which: str) -> InputError:
    """What every rank raises when ranks a and b make equal calls in another order."""
    return InputError(
        f"ranks {a} and {b} make their calls in a different order ({which}):\n"
        f"    rank {a}: {told[a][0]}, at {told[a][1]}\n    rank {b}: {told[b][0]}, at {told[b][1]}\n"
        f"    and since call {since} each has been where the other is now",
        where="; ".join(dict.fromkeys((told[a][1], told[b][1]))),
        rule=f"equal calls in another order mix their tensors: results since call {since} are wrong",
        fix="make the calls in one order on all ranks; if ranks swap roles on purpose: Communicator(crossings=False)",
    )


class Crossings:
    """Where ranks were while they made equal calls. Who was at X while a peer was at Y, and is found at Y while the
    peer is at X, directly or by way of others, makes the same calls in another order.

    Each rank is compared with rank 0 and with its neighbour. Only the latest patterns are remembered.
    """

    LATEST = 64

    def __init__(self, size: int) -> None:
        self._pairs = [*((0, b) for b in range(1, size)), *((b - 1, b) for b in range(2, size))]
        self._seen: dict[tuple[int, tuple[int, ...]], int] = {}

    def add(self, base: int, sites: tuple[int, ...], number: int) -> tuple[int, int, int] | None:
        """Remember a pattern; (rank, rank, the call since which they are apart) if it crosses an earlier one."""
        key = (base, sites)
        if key in self._seen:
            return None
        self._seen[key] = number
        if len(self._seen) > self.LATEST:
            del self._seen[next(iter(self._seen))]
        for a, b in self._pairs:
            if sites[a] != sites[b]:
                since = self._way_back(base, a, b, sites)
                if since:
                    return a, b, since
        return None

    def _way_back(self, base: int, a: int, b: int, sites: tuple[int, ...]) -> int:
        """The first call of a chain that leads from where b is now to where a is; 0 if there is none."""
        edges: dict[int, list[tuple[int, int]]] = {}
        for (other, old), number in self._seen.items():
            if other == base and old[a] != old[b]:
                edges.setdefault(old[a], []).append((old[b], number))
        reached, todo = {sites[b]: self._next()}, [sites[b]]
        while todo:
            here = todo.pop()
            for there, number in edges.get(here, ()):
                if there not in reached:
                    reached[there] = min(number, reached[here])
                    todo.append(there)
        return reached.get(sites[a], 0)

    def _next(self) -> int:
        return 1 + max(self._seen.values())


class Gather:
    """Every rank's block of a known size, by rank: Bruck's all-gather by messages, ceil(log2 p) rounds."""

    def __init__(self, transport: Transport, tag: int, size: int) -> None:
        self._transport, self._tag, self._size = transport, tag, size
        self._memory = torch.zeros(transport.size * size, dtype=torch.uint8)
        self._bytes = memoryview(self._memory.numpy().data)

    def __call__(self, block: bytes) -> list[bytes]:
        t, n = self._transport, self._size
        p, rank = t.size, t.rank
        self._bytes[:n] = block
        have = 1  # the blocks of ranks rank, rank+1, ..., rank+have-1 are here, in this order
        while have < p:
            more = min(have, p - have)
            into, out = self._memory[have * n : (have + more) * n], self._memory[: more * n]
            coming, going = t.exchange([(out, (rank - have) % p)], [(into, (rank + have) % p)], self._tag)
            for pending in (*coming, *going):
                pending.wait()
            have += more
        blocks = [bytes(self._bytes[i * n : (i + 1) * n]) for i in range(p)]
        return [blocks[(r - rank) % p] for r in range(p)]


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 to 2`, `ranks 0, 2 and 5`."""
    found = list(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"ranks {found[0]} to {found[-1]}"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"


def _difference(calls: list[list[str]]) -> str:
    """The words in which calls differ, where they are built alike."""
    if len(calls) == 1:
        return "the calls are equal, so the ranks were given different clusters, links or per_node: give all the same"
    length = len(calls[0])
    if any(len(words) != length for words in calls):
        return "compare the lines named above"
    apart = [sorted({words[i] for words in calls}) for i in range(length) if len({words[i] for words in calls}) > 1]
    return "make them equal: " + ", ".join(" against ".join(values) for values in apart)
