"""What programs hang on communicators, windows and types: attributes by key, and error handlers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

from . import constants as C
from .exception import MPIError
from .handle import Handle

_keys = itertools.count(100)


class _Key:
    """What to do with an attribute when its holder is copied or freed."""

    def __init__(self, copy: Any, delete: Any) -> None:
        self.copy, self.delete = copy, delete


class Errhandler(Handle, family=True):
    """What is done about errors; here they are always raised."""

    __slots__ = ()


class _Named:
    """What a predefined error handler stands for."""


class File(Handle, family=True):
    """Files: not asked for, so there is only the null one."""

    __slots__ = ()


class Session(Handle, family=True):
    """Sessions: not asked for, so there is only the null one."""

    __slots__ = ()


ERRHANDLER_NULL = Errhandler._constant("ERRHANDLER_NULL")
ERRORS_RETURN = Errhandler._constant("ERRORS_RETURN", _Named())
ERRORS_ABORT = Errhandler._constant("ERRORS_ABORT", _Named())
ERRORS_ARE_FATAL = Errhandler._constant("ERRORS_ARE_FATAL", _Named())
FILE_NULL = File._constant("FILE_NULL")
SESSION_NULL = Session._constant("SESSION_NULL")


class Attributes(Handle):
    """Attributes and an error handler."""

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
        """A new key. `copy_fn(holder, key, value)` says what a copy gets, `delete_fn` is told of the end."""
        key = next(_keys)
        cls._keyvals[key] = _Key(copy_fn, delete_fn)
        return key

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Forget a key."""
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
        """Forget the value of a key."""
        attributes = self._state.attributes
        if keyval not in attributes:
            raise MPIError(C.ERR_KEYVAL, f"key {keyval}", rule="a key that has a value")
        key = self._keyvals.get(keyval)
        if key is not None and key.delete is not None:
            key.delete(self, keyval, attributes[keyval])
        del attributes[keyval]

    def _inherit(self, made: Attributes) -> None:
        """What a copy gets."""
        for keyval, value in self._state.attributes.items():
            copy = self._keyvals[keyval].copy if keyval in self._keyvals else None
            if copy is True:
                made._state.attributes[keyval] = value
            elif callable(copy) and (given := copy(self, keyval, value)) is not NotImplemented:
                made._state.attributes[keyval] = given

    def _forget(self) -> None:
        for keyval in list(self._state.attributes):
            self.Delete_attr(keyval)

    def Get_errhandler(self) -> Errhandler:
        """The error handler that was set."""
        return Errhandler(self._state.errhandler or ERRORS_RETURN)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set an error handler; errors are raised all the same."""
        self._state.errhandler = Errhandler(errhandler)
