"""The cells of one row of a table of runs, by their column; what is empty, and what is wrong, is named."""

from __future__ import annotations

import re

from ..core.errors import InputError

_SILENT = re.compile(r"auto\b.*|not stated.*|unknown|n/?a|-|\d+\.\.\d+", re.IGNORECASE | re.DOTALL)
"""Words in the place of a number that mean: the source does not say."""
_REMARK = re.compile(r"^~\s*|\s*\(.*\)$", re.DOTALL)
"""What may stand around a number: `~0.3`, `8 (assumed)`."""


class Silent(Exception):
    """The row does not say something that its prediction needs: (column, reason)."""


class Cells:
    """The cells of one row, by their column."""

    def __init__(self, row: dict[str, str], where: str) -> None:
        self._row, self.where = row, where

    def text(self, key: str) -> str:
        return self._row[key].strip()

    def at(self, key: str) -> str:
        """Where a cell stands."""
        return f"{self.where}: {key}"

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; a default stands for an empty cell, and without one the row does not say enough."""
        text = self.text(key)
        if not text:
            if default is None:
                raise Silent(key, f"{key} is empty")
            return default
        try:
            value = float(_REMARK.sub("", text))
        except ValueError:
            if _SILENT.fullmatch(text) and default is not None:
                return default
            if _SILENT.fullmatch(text):
                raise Silent(key, f"{key} is {text!r}, not a number") from None
            raise InputError(f"{key} is {text!r}", where=self.at(key), rule="a number, or nothing") from None
        if not 0 < value < 1e18:
            raise InputError(f"{key} is {text}", where=self.at(key), rule="more than 0, and finite")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1."""
        value = self.number(key, default)
        if value != int(value):
            raise InputError(f"{key} is {value:g}", where=self.at(key), rule="a whole number")
        return int(value)
