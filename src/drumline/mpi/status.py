"""Status: the source, tag and size of a message."""

from __future__ import annotations

from array import array
from typing import Any, Self

from . import constants as C
from .datatype import Datatype
from .predefined_types import BYTE

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
        """The source rank."""
        return self._v[_SOURCE]

    def Set_source(self, source: int) -> None:
        """Set the source rank."""
        self._v[_SOURCE] = source

    def Get_tag(self) -> int:
        """The tag."""
        return self._v[_TAG]

    def Set_tag(self, tag: int) -> None:
        """Set the tag."""
        self._v[_TAG] = tag

    def Get_error(self) -> int:
        """The error code."""
        return self._v[_ERROR]

    def Set_error(self, error: int) -> None:
        """Set the error code."""
        self._v[_ERROR] = error

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Number of received elements; UNDEFINED if the last is incomplete."""
        nbytes, size = self._v[_NBYTES], datatype._layout.size
        if size == 0:
            return 0 if nbytes == 0 else C.UNDEFINED
        return nbytes // size if nbytes % size == 0 else C.UNDEFINED

    def Get_elements(self, datatype: Datatype) -> int:
        """Number of received scalars, including those of an incomplete element."""
        nbytes, layout = self._v[_NBYTES], datatype._layout
        if layout.size == 0:
            return 0
        count = nbytes // layout.size * len(layout.scalars)
        rest = nbytes % layout.size
        for scalar in layout.scalars:
            if rest == 0:
                break
            rest -= scalar.size
            if rest < 0:
                return C.UNDEFINED
            count += 1
        return count

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the number of elements."""
        self._v[_NBYTES] = count * datatype._layout.size

    def Is_cancelled(self) -> bool:
        """Whether it was cancelled."""
        return bool(self._v[_CANCELLED])

    def Set_cancelled(self, flag: bool) -> None:
        """Set whether it was cancelled."""
        self._v[_CANCELLED] = flag

    def tomemory(self) -> memoryview:
        """The fields as integers."""
        return memoryview(self._v)

    def py2f(self) -> list[int]:
        """The fields for Fortran."""
        return self._v.tolist()

    @classmethod
    def f2py(cls, arg: list[int]) -> Self:
        """A status from Fortran fields."""
        made: Self = _rebuild(cls, arg)
        return made

    source = property(Get_source, Set_source, doc="The source rank.")
    tag = property(Get_tag, Set_tag, doc="The tag.")
    error = property(Get_error, Set_error, doc="The error code.")
    count = property(Get_count, lambda self, n: self.Set_elements(BYTE, n), doc="Number of received bytes.")
    cancelled = property(Is_cancelled, Set_cancelled, doc="Whether it was cancelled.")


_EMPTY = (C.ANY_SOURCE, C.ANY_TAG, C.SUCCESS, 0, 0)


def _rebuild(cls: type[Any], values: list[int]) -> Any:
    made = cls()
    made._v[:] = array("q", values)
    return made
