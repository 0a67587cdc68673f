"""Attributes: values that programs attach to communicators, datatypes and windows, by keys of their own."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from operator import index
from typing import Any, ClassVar, NamedTuple

from . import constants as C
from .exception import MPIError
from .handles import ERRORS_RETURN, Errhandler, Handle

_numbers = itertools.count(100)


class _Key(NamedTuple):
    """A key: for the handles of one family, with the callbacks for copying and freeing its owner."""

    family: type[Handle]
    copy: Any
    delete: Any
    nopython: bool


_keys: dict[int, _Key] = {}


class Attributes(Handle):
    """A handle with attributes by key and an error handler. A value stays with its key's callbacks, so that they are
    called after Free_keyval as well."""

    __slots__ = ()
    _predefined_keys: ClassVar[tuple[int, ...]] = ()

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
        """Make a key. `copy_fn(owner, key, value)` returns the value of a copy, or NotImplemented for none; True
        copies the value itself. `delete_fn(owner, key, value)` is called at the end. `nopython`: values are
        integers."""
        key = next(_numbers)
        _keys[key] = _Key(cls._family, copy_fn, delete_fn, bool(nopython))
        return key

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a key; values that have it remain."""
        cls._key(keyval)
        del _keys[keyval]
        return C.KEYVAL_INVALID

    @classmethod
    def _key(cls, keyval: int) -> _Key:
        key = _keys.get(keyval)
        if key is None or key.family is not cls._family:
            raise MPIError(C.ERR_KEYVAL, f"key {keyval} of a {cls._family.__name__}", rule="a key of its Create_keyval")
        return key

    def Get_attr(self, keyval: int) -> Any:
        """The value of a key, or None."""
        attributes = self._state.attributes
        if keyval in attributes:
            return attributes[keyval][1]
        if keyval in self._predefined_keys:
            return self._predefined(keyval)
        self._key(keyval)
        return None

    def _predefined(self, keyval: int) -> Any:
        """The value of a key of MPI itself."""
        raise NotImplementedError

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set the value of a key."""
        key = self._key(keyval)
        if key.nopython:
            attrval = index(attrval)
        if keyval in self._state.attributes:
            self.Delete_attr(keyval)
        self._state.attributes[keyval] = key, attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete the value of a key, if it has one; it is gone even if its callback fails."""
        attributes = self._state.attributes
        if keyval not in attributes:
            self._key(keyval)
            return
        key, value = attributes[keyval]
        try:
            if key.delete is not None:
                self._call(key.delete, keyval, value)
        finally:
            del attributes[keyval]

    def _copy_attributes_to(self, copied: Attributes) -> None:
        """Copy the attributes whose keys allow it; if a callback fails, the copy is freed."""
        for keyval, (key, value) in list(self._state.attributes.items()):
            if key.copy is None or key.copy is False:
                continue
            try:
                new = value if key.copy is True else self._call(key.copy, keyval, value)
            except MPIError:
                copied.Free()
                raise
            if new is not NotImplemented:
                copied._state.attributes[keyval] = key, new

    def _call(self, function: Callable[..., Any], keyval: int, value: Any) -> Any:
        """Call a callback of the program. As in mpi4py its traceback is printed, and MPI reports ERR_OTHER."""
        try:
            return function(self, keyval, value)
        except Exception as e:
            traceback.print_exc()
            raise MPIError(C.ERR_OTHER, f"the callback of attribute key {keyval} raised {type(e).__name__}: {e}") from e

    def _delete_attributes(self) -> None:
        for keyval in list(self._state.attributes):
            self.Delete_attr(keyval)

    def Get_errhandler(self) -> Errhandler:
        """The error handler that was set."""
        return Errhandler(self._state.errhandler or ERRORS_RETURN)

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set an error handler; errors are raised all the same."""
        self._state.errhandler = Errhandler(errhandler)
