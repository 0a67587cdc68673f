"""What a search says: every candidate, the best first, each loser with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from .. import files
from ..errors import CorruptFile


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan and how it fared."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    plan: str
    step_seconds: float
    memory_bytes: float
    fits: bool
    reason: str
    """Why it won, or by how much and to what it lost."""


@dataclass(frozen=True, slots=True)
class Answer:
    """All candidates, best first: those that fit by time, then those that do not by memory."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    candidates: tuple[Candidate, ...]
    seconds: float
    """How long the search took."""
    explanation: str
    """One paragraph for a person: what bounds the step, and what the runner-up lacks."""

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        files.write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Answer:
        """Read the JSON form back."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)
