"""What a message was: its source, tag and size."""

from __future__ import annotations

from array import array
from typing import Any, Self

from . import constants as C
from .datatype import Datatype
from .types import BYTE

_SOURCE, _TAG, _ERROR, _CANCELLED, _NBYTES = range(5)


class Status:
    """Filled by receives, probes and waits."""

    __slots__ = ("__weakref__", "_v")
    _v: array[int]

    def __new__(cls, status: Status | None = None) -> Self:
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"Status of a {type(status).__name__}")
        self = super().__new__(cls)
        self._v = array("q", status._v if status is not None else _EMPTY)
        return self

    def _fill(
        self,
        source: int = C.ANY_SOURCE,
        tag: int = C.ANY_TAG,
        nbytes: int = 0,
        *,
        error: int = C.SUCCESS,
        cancelled: bool = False,
    ) -> None:
        self._v[:] = array("q", (source, tag, error, cancelled, nbytes))

    def __eq__(self, other: object) -> bool:
        return self._v == other._v if isinstance(other, Status) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # a status changes

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self._v.tolist()))

    def Get_source(self) -> int:
        """Who sent it."""
        return self._v[_SOURCE]

    def Set_source(self, source: int) -> None:
        """Say who sent it."""
        self._v[_SOURCE] = source

    def Get_tag(self) -> int:
        """Its tag."""
        return self._v[_TAG]

    def Set_tag(self, tag: int) -> None:
        """Say its tag."""
        self._v[_TAG] = tag

    def Get_error(self) -> int:
        """How it ended."""
        return self._v[_ERROR]

    def Set_error(self, error: int) -> None:
        """Say how it ended."""
        self._v[_ERROR] = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """How many elements came; UNDEFINED where the last is not whole."""
        nbytes, size = self._v[_NBYTES], datatype._layout.size
        if size == 0:
            return 0 if nbytes == 0 else C.UNDEFINED
        return nbytes // size if nbytes % size == 0 else C.UNDEFINED

    def Get_elements(self, datatype: Datatype) -> int:
        """How many numbers came, also of an element that is not whole."""
        nbytes, layout = self._v[_NBYTES], datatype._layout
        if layout.size == 0:
            return 0
        found = nbytes // layout.size * len(layout.basics)
        rest = nbytes % layout.size
        for basic in layout.basics:
            if rest == 0:
                break
            rest -= basic.size
            if rest < 0:
                return C.UNDEFINED
            found += 1
        return found

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Say how many elements came."""
        self._v[_NBYTES] = count * datatype._layout.size

    def Is_cancelled(self) -> bool:
        """Whether it was taken back."""
        return bool(self._v[_CANCELLED])

    def Set_cancelled(self, flag: bool) -> None:
        """Say whether it was taken back."""
        self._v[_CANCELLED] = flag

    def tomemory(self) -> memoryview:
        """The numbers themselves."""
        return memoryview(self._v)

    def py2f(self) -> list[int]:
        """The numbers as Fortran would see them."""
        return self._v.tolist()

    @classmethod
    def f2py(cls, arg: list[int]) -> Self:
        """From such numbers."""
        made: Self = _rebuild(cls, arg)
        return made

    source = property(Get_source, Set_source, doc="Who sent it.")
    tag = property(Get_tag, Set_tag, doc="Its tag.")
    error = property(Get_error, Set_error, doc="How it ended.")
    count = property(Get_count, lambda self, n: self.Set_elements(BYTE, n), doc="How many bytes came.")
    cancelled = property(Is_cancelled, Set_cancelled, doc="Whether it was taken back.")


_EMPTY = (C.ANY_SOURCE, C.ANY_TAG, C.SUCCESS, 0, 0)


def _rebuild(cls: type[Any], values: list[int]) -> Any:
    made = cls()
    made._v[:] = array("q", values)
    return made
