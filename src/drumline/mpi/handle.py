"""What communicators, types, requests and so on have in common: a handle on something, compared by what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

NAMED: dict[str, Handle] = {}
"""The handles that are part of the interface, by name: they travel between ranks as names."""
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_things: WeakValueDictionary[int, Any] = WeakValueDictionary()
_next: Iterator[int] = itertools.count(1)


class Handle:
    """A reference to `_h`; None is the null handle. Copies refer to the same thing, and freeing one nulls that one."""

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
        """A handle that is part of the interface."""
        NAMED[name] = self = cls._of(thing)
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle) or other._family is not self._family:
            return NotImplemented
        return self._h is other._h

    __hash__ = None  # type: ignore[assignment]  # handles change when they are freed

    def __bool__(self) -> bool:
        return self._h is not None

    def __reduce__(self) -> tuple[Any, ...]:
        for name, constant in NAMED.items():
            if constant is self:
                return (_named, (name,))
        for name, constant in NAMED.items():
            if constant._family is self._family and constant._h is self._h:
                return (_copy_of, (type(self), name))
        raise ValueError(f"a {type(self).__name__} of this process means nothing to another")

    @property
    def handle(self) -> int:
        """The handle as a number of this process."""
        if self._h is None:
            return 0
        if self._h not in _numbers:
            number = next(_next)
            _numbers[self._h], _things[number] = number, self._h
        return _numbers[self._h]

    @classmethod
    def fromhandle(cls, handle: int) -> Self:
        """The handle of a number."""
        return cls._of(None if handle == 0 else _things[handle])

    def toint(self) -> int:
        """The handle as a number of this process."""
        return self.handle

    @classmethod
    def fromint(cls, arg: int) -> Self:
        """The handle of a number."""
        return cls.fromhandle(arg)

    def py2f(self) -> int:
        """The handle as Fortran would see it: the same number."""
        return self.handle

    @classmethod
    def f2py(cls, arg: int) -> Self:
        """The handle of a number that Fortran saw."""
        return cls.fromhandle(arg)

    def free(self) -> None:
        """Free it, unless it is null or part of the interface."""
        if self._h is not None and all(one._h is not self._h for one in NAMED.values()):
            self.Free()

    def Free(self) -> None:
        """Let go of what the handle refers to."""
        self._h = None


def _named(name: str) -> Handle:
    return NAMED[name]


def _copy_of(cls: type[Handle], name: str) -> Handle:
    return cls(NAMED[name])
