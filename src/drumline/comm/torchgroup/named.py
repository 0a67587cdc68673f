"""A process group in Python, as torch asks for it: which rank this is, how many there are, and what it is called."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_ProcessGroup: Any = dist.ProcessGroup
"""Untyped: torch's annotations describe overloads that only its own groups have."""


class NamedGroup(_ProcessGroup):  # type: ignore[misc]  # see above
    """The base of our process groups. What they do with tensors is theirs."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name, self._number, self._size = name, rank, size
        self._group_name = self._group_desc = ""

    def rank(self) -> int:
        """This rank's number."""
        return self._number

    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def name(self) -> str:
        """The backend's name."""
        return self._name

    def getBackendName(self) -> str:
        """The same, as C++ asks for it."""
        return self._name

    def _get_backend_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        """The name under which torch knows the group."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self._group_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text
        super()._set_group_desc(text)
