"""The base of communicators, types, requests and so on: handles, compared by what they refer to; and attributes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

from . import constants as C
from .exception import MPIError

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


_keys = itertools.count(100)


class _Key:
    """The callbacks of an attribute, for copying and freeing its owner."""

    def __init__(self, copy: Any, delete: Any) -> None:
        self.copy, self.delete = copy, delete


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


class Attributes(Handle):
    """A handle with attributes by key and an error handler."""

    __slots__ = ()
    _keyvals: ClassVar[dict[int, _Key]] = {}

    @property
    def _state(self) -> Any:
        raise NotImplementedError

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[..., Any] | bool | None = None,
        delete_fn: Callable[..., None] | None = None,
        nopython: bool = False,
    ) -> int:
        """Make a key. `copy_fn(owner, key, value)` returns the value of a copy; `delete_fn` is called at the end."""
        key = next(_keys)
        cls._keyvals[key] = _Key(copy_fn, delete_fn)
        return key

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a key."""
        if cls._keyvals.pop(keyval, None) is None:
            raise MPIError(C.ERR_KEYVAL, f"key {keyval}", rule="a key of Create_keyval")
        return C.KEYVAL_INVALID

    def Get_attr(self, keyval: int) -> Any:
        """The value of a key, or None."""
        return self._state.attributes.get(keyval, self._predefined(keyval))

    def _predefined(self, keyval: int) -> Any:
        _ = self._state
        return {C.TAG_UB: C.TAG_LIMIT, C.WTIME_IS_GLOBAL: 0, C.LASTUSEDCODE: C.ERR_LASTCODE}.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set the value of a key."""
        if keyval not in self._keyvals:
            raise MPIError(C.ERR_KEYVAL, f"key {keyval}", rule="a key of Create_keyval")
        if keyval in self._state.attributes:
            self.Delete_attr(keyval)
        self._state.attributes[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete the value of a key."""
        attributes = self._state.attributes
        if keyval not in attributes:
            raise MPIError(C.ERR_KEYVAL, f"key {keyval}", rule="a key that has a value")
        key = self._keyvals.get(keyval)
        if key is not None and key.delete is not None:
            key.delete(self, keyval, attributes[keyval])
        del attributes[keyval]

    def _copy_attributes_to(self, copied: Attributes) -> None:
        """Copy the attributes whose keys allow it."""
        for keyval, value in self._state.attributes.items():
            copy = self._keyvals[keyval].copy if keyval in self._keyvals else None
            if copy is True:
                copied._state.attributes[keyval] = value
            elif callable(copy) and (new := copy(self, keyval, value)) is not NotImplemented:
                copied._state.attributes[keyval] = new

    def _delete_attributes(self) -> None:
        for keyval in list(self._state.attributes):
            self.Delete_attr(keyval)

    def Get_errhandler(self) -> Errhandler:
        """The error handler that was set."""
        return Errhandler(self._state.errhandler or ERRORS_RETURN)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set an error handler; errors are raised all the same."""
        self._state.errhandler = Errhandler(errhandler)
