"""The base of communicators, types, requests and so on: handles, compared by what they refer to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

PREDEFINED: dict[str, Handle] = {}
"""Predefined handles by name; they are pickled as names."""
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_things: WeakValueDictionary[int, Any] = WeakValueDictionary()
_next: Iterator[int] = itertools.count(1)


class Handle:
    """A reference to `_h`; None is the null handle. Copies share the object; freeing one makes that one null."""

    __slots__ = ("__weakref__", "_h")
    _family: ClassVar[type[Handle]]
    _h: Any

    def __init_subclass__(cls, *, family: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if family:
            cls._family = cls  # handles of different families are never equal, not even null ones

    def __new__(cls, other: Handle | None = None) -> Self:
        self = super().__new__(cls)
        if other is None:
            self._h = None
        elif isinstance(other, cls) or issubclass(cls, type(other)):
            self._h = other._h
        else:
            raise TypeError(f"{cls.__name__} of a {type(other).__name__}")
        return self

    @classmethod
    def _of(cls, thing: Any) -> Self:
        self = cls.__new__(cls)
        self._h = thing
        return self

    @classmethod
    def _constant(cls, name: str, thing: Any = None) -> Self:
        """Make a predefined handle."""
        PREDEFINED[name] = self = cls._of(thing)
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle) or other._family is not self._family:
            return NotImplemented
        return self._h is other._h

    __hash__ = None  # type: ignore[assignment]  # handles change when they are freed

    def __bool__(self) -> bool:
        return self._h is not None

    def __reduce__(self) -> tuple[Any, ...]:
        for name, constant in PREDEFINED.items():
            if constant is self:
                return (_named, (name,))
        for name, constant in PREDEFINED.items():
            if constant._family is self._family and constant._h is self._h:
                return (_copy_of, (type(self), name))
        raise ValueError(f"a {type(self).__name__} of this process cannot be sent to another")

    @property
    def handle(self) -> int:
        """The handle as a number, valid in this process."""
        if self._h is None:
            return 0
        if self._h not in _numbers:
            number = next(_next)
            _numbers[self._h], _things[number] = number, self._h
        return _numbers[self._h]

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        """The handle with a number."""
        return cls._of(None if handle == 0 else _things[handle])

    def toint(self) -> int:
        """The handle as a number, valid in this process."""
        return self.handle

    @classmethod
    def fromint(cls, arg: int) -> Self:
        """The handle with a number."""
        return cls.fromhandle(arg)

    def py2f(self) -> int:
        """The Fortran handle: the same number."""
        return self.handle

    @classmethod
    def f2py(cls, arg: int) -> Self:
        """The handle with a Fortran number."""
        return cls.fromhandle(arg)

    def free(self) -> None:
        """Free it, unless it is null or predefined."""
        if self._h is not None and all(handle._h is not self._h for handle in PREDEFINED.values()):
            self.Free()

    def Free(self) -> None:
        """Release the object; the handle becomes null."""
        self._h = None


def _named(name: str) -> Handle:
    return PREDEFINED[name]


def _copy_of(cls: type[Handle], name: str) -> Handle:
    return cls(PREDEFINED[name])


class Errhandler(Handle, family=True):
    """An error handler; here errors are always raised."""

    __slots__ = ()


class _PredefinedHandler:
    """The object of a predefined error handler."""


class File(Handle, family=True):
    """Files are not supported: only FILE_NULL exists."""

    __slots__ = ()


class Session(Handle, family=True):
    """Sessions are not supported: only SESSION_NULL exists."""

    __slots__ = ()


ERRHANDLER_NULL = Errhandler._constant("ERRHANDLER_NULL")
ERRORS_RETURN = Errhandler._constant("ERRORS_RETURN", _PredefinedHandler())
ERRORS_ABORT = Errhandler._constant("ERRORS_ABORT", _PredefinedHandler())
ERRORS_ARE_FATAL = Errhandler._constant("ERRORS_ARE_FATAL", _PredefinedHandler())
FILE_NULL = File._constant("FILE_NULL")
SESSION_NULL = Session._constant("SESSION_NULL")
