"""Compares the calls of the ranks of a group of torch, before data moves: new calls by an all-gather of 16 bytes,
repeated calls not at all, and calls that deviate from this rank's own earlier ones through the store.

A rank that deviates does not take part in the call. It asks through the store what the others do: those that deviate
too have written it there; those that follow the usual sequence wait for this rank, and a thread of theirs answers.
"""

from __future__ import annotations

import contextlib
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist

from ...core.errors import GaveUp, InputError
from ..call_check import (
    CALL_BYTES,
    CallSignature,
    CallSite,
    CrossingDetector,
    crossed_calls,
    decode_calls,
    different_calls,
    encode_call,
)
from ..call_sequence import CallSequence, Judgement, KnownCall
from ..signed_store import AlteredStore, SignedStore
from .open_calls import OpenCalls

_IDS = struct.Struct("<QQ")
_STUCK = 0.2
"""Seconds that a call takes before this rank looks whether another one asks about it."""
_LOOK = 0.1
"""Seconds between two looks."""
_FIRST_ASK, _ASK = 0.0002, 0.01
"""Seconds between two reads of the store by a rank that asks, at first and at most."""

Gather = Callable[[bytes], list[bytes]]
"""All-gathers blocks of equal size over the group."""


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    signature: CallSignature
    site: CallSite

    @property
    def ids(self) -> bytes:
        return _IDS.pack(self.signature.hash, self.site.hash)

    @property
    def record(self) -> bytes:
        """Hashes, text and line of the call, for the other ranks to read."""
        return self.ids + encode_call(self.signature.text, self.site)

    @property
    def short_record(self) -> bytes:
        """The record without its padding."""
        return self.ids + encode_call(self.signature.text, self.site).rstrip(b"\0")


class CallComparison:
    """The calls of one rank of one group, compared with those of the others."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, gather: Gather) -> None:
        self._store, self._rank, self._size, self._timeout = SignedStore(store), rank, size, timeout
        self._gather = gather
        self.sequence, self._crossings = CallSequence(), CrossingDetector(size)
        self.open_calls = OpenCalls()
        self.number = 0
        """Number of calls so far."""
        self._written: set[int] = set()
        self._refusals: set[int] = set()
        """Calls that this rank has refused itself, so that it waits in none of them."""
        self._asks = False
        """Whether this rank waits for the answers of others."""
        self.alone = False
        """Whether this rank has refused a call in which others wait for it."""

    def follow(self, expected: KnownCall) -> None:
        """The next call is the usual one, `sequence.expected`: there is nothing to compare."""
        self.number += 1
        self.sequence.follow(expected)

    def enter(self, signature: CallSignature, site: CallSite) -> bool:
        """Compare the next call as far as needed, or raise; returns whether it was the expected one.

        It is among the open calls from then on.
        """
        expected = self.sequence.expected
        if expected is not None and expected.call == signature.hash and expected.site in (0, site.hash):
            self.follow(expected)
            self.open_calls.begin(self.number, signature, site)
            return True
        self.number = number = self.number + 1
        self.open_calls.begin(number, signature, site)
        try:
            self._enter_unusual(_Call(number, signature, site))
        except BaseException:
            self.open_calls.end(number)
            raise
        return False

    def _enter_unusual(self, call: _Call) -> None:
        """Compare a call that does not repeat an earlier one."""
        judgement = self.sequence.judge(call.signature.hash, call.site.hash)
        if judgement is Judgement.COMPARE:
            self._compare(call, self._gather(call.ids), lambda: self._gather(call.record))
        elif judgement is Judgement.DEVIATES:
            self._asks = True
            records = self._ask(call)
            self._asks, self.alone = False, True
            self._compare(call, [record[: _IDS.size] for record in records], lambda: records)
            self.alone = False
            self.sequence.excuse(call.signature.hash)
        self.sequence.advance(call.signature.hash)

    def _compare(self, call: _Call, gathered: list[bytes], records: Callable[[], list[bytes]]) -> None:
        pairs = [_IDS.unpack(ids) for ids in gathered]
        sites = tuple(site for _, site in pairs)
        which = f"call {call.number}"
        if any(signature != call.signature.hash for signature, _ in pairs):
            raise self._refused(call, different_calls(_texts(records()), which))
        if len(set(sites)) > 1:
            crossed = self._crossings.add(call.signature.hash, sites, call.number)
            if crossed is not None:
                raise self._refused(call, crossed_calls(_texts(records()), *crossed, which))
        self.sequence.learn(call.signature.hash, sites[0] if len(set(sites)) == 1 else 0)

    def _refused(self, call: _Call, error: InputError) -> InputError:
        """Leave the error in the store, for ranks that wait for this one."""
        self._refusals.add(call.number)
        text = json.dumps([call.number, error.what, error.where, error.rule, error.fix])
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.set("refused", text)
        return error

    def refusal(self) -> InputError | None:
        """Why another rank has refused a call that this one takes part in, if it has."""
        with contextlib.suppress(RuntimeError):
            if self._store.check(["refused"]):
                number, what, where, rule, fix = json.loads(self._store.get("refused"))
                if number not in self._refusals:
                    return InputError(what, where=where, rule=rule, fix=fix)
        return None

    # -- calls that deviate -------------------------------------------------------------------------------------------

    def _ask(self, call: _Call) -> list[bytes]:
        """The records of all ranks about this call, by rank."""
        self._write(call)
        self._store.set("asked", str(call.number))
        end = time.monotonic() + self._timeout
        missing, pause = [s for s in range(self._size) if s != self._rank], _FIRST_ASK
        while missing := [s for s in missing if not self._store.check([f"call/{call.number}/{s}"])]:
            if time.monotonic() > end:
                raise GaveUp(
                    f"{call.signature} at {call.site} differs from earlier rounds, and rank {missing[0]} makes no call",
                    rule=f"all ranks make the same calls, within {self._timeout:g} s",
                )
            time.sleep(pause)
            pause = min(2 * pause, _ASK)
        records = [self._store.get(f"call/{call.number}/{s}") for s in range(self._size)]
        self._forget(call.number)
        return records

    def _forget(self, number: int) -> None:
        """Delete this rank's records of earlier calls: all ranks have come to this one, so they have read them."""
        for old in [n for n in self._written if n < number]:
            self._written.discard(old)
            self._store.delete_key(f"call/{old}/{self._rank}")

    def _write(self, call: _Call) -> None:
        if call.number not in self._written:
            self._written.add(call.number)
            self._store.set(f"call/{call.number}/{self._rank}", call.short_record)

    def answer(self) -> None:
        """Answer a rank that asks, if a call of this rank takes long. Called by a thread a few times a second."""
        now = time.perf_counter_ns()
        waits = self.open_calls.waits()
        if not any(now - since > 1e9 * _STUCK for _, _, since in waits.values()):
            return
        if self._store.check(["asked"]):
            # a rank that asks too may have asked last: what others asked before about its earlier calls is not seen
            numbers = {int(self._store.get("asked")), *(waits if self._asks else ())}
            for number, signature, site in [*((n, *waits[n][:2]) for n in waits), *self.open_calls.ended()]:
                if number in numbers:
                    self._write(_Call(number, signature, site))


def _texts(records: Iterable[bytes]) -> list[tuple[str, str]]:
    return decode_calls(record[_IDS.size : _IDS.size + CALL_BYTES] for record in records)


_looks: list[Callable[[], None]] = []
_thread: threading.Thread | None = None
_last_look = threading.Event()


def start_answering(look: Callable[[], None]) -> None:
    """Let a thread of this process call `look` a few times a second, for a group."""
    global _thread
    _looks.append(look)
    _last_look.clear()
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_serve, name="call comparison", daemon=True)
        _thread.start()


def stop_answering(look: Callable[[], None]) -> None:
    """The group has ended. A thread that is in torch's store when the interpreter ends would abort the process."""
    with contextlib.suppress(ValueError):
        _looks.remove(look)
    if not _looks and _thread is not None and _thread is not threading.current_thread():
        _last_look.set()
        _thread.join(1.0)


def _serve() -> None:
    """Thread: look after all groups; it ends with the last one."""
    while _looks:
        _last_look.wait(_LOOK)
        for look in list(_looks):
            with contextlib.suppress(RuntimeError, AlteredStore):  # the store is gone, or the rank that asks finds out
                look()
