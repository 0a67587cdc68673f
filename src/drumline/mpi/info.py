"""Info: MPI's dictionary of hints."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, ClassVar, Self

from . import constants as C
from .attributes import Attributes
from .exception import MPIError
from .handles import Handle


class _Items(dict[str, str]):
    """A dictionary that supports weak references and is compared by identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # dictionaries have none


class Info(Handle, MutableMapping[str, str], family=True):
    """Strings by key; INFO_NULL is empty and read-only."""

    __slots__ = ()
    _h: _Items | None

    @property
    def _state(self) -> _Items:
        if self._h is None:
            raise MPIError(C.ERR_INFO, "INFO_NULL", rule="an info that exists")
        return self._h

    @classmethod
    def Create(cls, items: Any = None) -> Self:
        """Make an info."""
        info = cls._of(_Items())
        info.update(items or ())
        return info

    def Dup(self) -> Self:
        """A copy."""
        return type(self)._of(_Items(self._state))

    def Free(self) -> None:
        """Free it."""
        _ = self._state
        self._h = None

    def Get(self, key: str) -> str | None:
        """The value of a key, or None."""
        return self._state.get(_key(key))

    def Set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        if len(value) > C.MAX_INFO_VAL:
            raise MPIError(C.ERR_INFO_VALUE, f"a value of {len(value)} characters", rule=f"at most {C.MAX_INFO_VAL}")
        self._state[_key(key)] = str(value)

    def Delete(self, key: str) -> None:
        """Delete a key."""
        if self._state.pop(_key(key), None) is None:
            raise MPIError(C.ERR_INFO_NOKEY, f"no key {key!r}")

    def Get_nkeys(self) -> int:
        """Number of keys."""
        return len(self._state)

    def Get_nthkey(self, n: int) -> str:
        """The key with an index."""
        keys = list(self._state)
        if not 0 <= n < len(keys):
            raise MPIError(C.ERR_ARG, f"key number {n}", rule=f"0 <= n < {len(keys)}")
        return keys[n]

    def __bool__(self) -> bool:
        return self._h is not None

    __eq__ = Handle.__eq__

    def __len__(self) -> int:
        return len(self._h or ())

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._h or ()))

    def __getitem__(self, key: str) -> str:
        return self._h[key] if self._h is not None else _Items()[key]

    def __setitem__(self, key: str, value: str) -> None:
        if self._h is None:
            raise KeyError(key)
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        del (self._h if self._h is not None else _Items())[key]

    def copy(self) -> Self:
        """A copy; null for null."""
        return self.Dup() if self else type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._h is None or self is INFO_ENV:
            return super().__reduce__()
        return (type(self).Create, (dict(self._h),))


def _key(key: str) -> str:
    if not 0 < len(key) <= C.MAX_INFO_KEY:
        raise MPIError(C.ERR_INFO_KEY, f"a key of {len(key)} characters", rule=f"1 to {C.MAX_INFO_KEY}")
    return key


INFO_NULL = Info._constant("INFO_NULL")
INFO_ENV = Info._constant("INFO_ENV", _Items())


class Described(Attributes):
    """A handle with a name and hints."""

    __slots__ = ()
    _null_name: ClassVar[str]

    def Get_name(self) -> str:
        """Its name."""
        return self._h.name if self._h is not None else self._null_name

    def Set_name(self, name: str) -> None:
        """Set its name."""
        self._state.name = name

    name = property(Get_name, Set_name, doc="Its name.")

    def Get_info(self) -> Info:
        """The hints that were set."""
        return Info.Create(self._state.info)

    def Set_info(self, info: Info) -> None:
        """Set hints; none has an effect."""
        self._state.info = dict(info.items())

    info = property(Get_info, Set_info, doc="The hints.")
