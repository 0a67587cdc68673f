"""Tells apart calls that look alike: equal operation, type, size and line, but another tensor.

Where a caller knows a name that is the same on all ranks (a bucket, a parameter), it names the call, and ranks whose
names differ are refused. Other tensors are numbered in the order in which a line first used them. Ranks number their
own tensors, so a rank that uses them in another order from the start has the same numbers as the others; but a rank
that changes its order later is found, as calls that cross (call_check.CrossingDetector).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from torch import Tensor

from .call_check import CallSignature, CallSite, digest

_MASK = (1 << 64) - 1
_ODD = 0xD1B54A32D192ED03
"""Spreads the number of a tensor over all 64 bits."""
_names: dict[int, str] = {}
"""The names of calls by thread, while they have one: looked up for every call, and mostly empty."""


@contextmanager
def naming_calls(name: str) -> Iterator[None]:
    """Give the calls of this thread a name, which must be the same on all ranks."""
    thread = threading.get_ident()
    before = _names.get(thread, "")
    _names[thread] = name
    try:
        yield
    finally:
        if before:
            _names[thread] = before
        else:
            del _names[thread]


def current_name() -> str:
    """The name of this thread's calls; empty if they have none."""
    return _names.get(threading.get_ident(), "") if _names else ""


def named_call(call: CallSignature, name: str) -> CallSignature:
    """A call with its name, if it has one."""
    return _named(call, name) if name else call


@lru_cache(maxsize=4096)
def _named(call: CallSignature, name: str) -> CallSignature:
    words = name.replace(" ", "_")
    return CallSignature(f"{call.text} name={words}", call.hash ^ digest(f"name {name}"))


class TensorOrder:
    """Numbers the tensors of each line of a program in the order of their first use."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[weakref.ref[Tensor], int]] = {}
        self._counts: dict[int, int] = {}

    def number(self, site: int, tensor: Tensor) -> int:
        """The number of a tensor in its line, from 0; a new tensor gets a new one."""
        key = site, id(tensor)
        known = self._known.get(key)
        if known is not None and known[0]() is tensor:
            return known[1]
        number = self._counts.get(site, 0)
        self._counts[site] = number + 1
        self._known[key] = weakref.ref(tensor, lambda _: self._known.pop(key, None)), number
        return number

    def at(self, site: CallSite, tensor: Tensor) -> CallSite:
        """The line of a call, with a hash that also depends on the tensor."""
        number = self.number(site.hash, tensor)
        return CallSite(site.text, (site.hash + number * _ODD) & _MASK, site.name) if number else site
