"""What a search says: every candidate, the best first, each loser with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from ..core import files
from ..core.errors import CorruptFile
from .families import Family


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
    """All candidates, best first: those that fit by the objective, then those that do not by memory."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    candidates: tuple[Candidate, ...]
    seconds: float
    """How long the search took."""
    explanation: str
    """One paragraph for a person: what bounds the step, and what the runner-up lacks."""
    objective: str = "time"
    """What was sought: `time`, `memory` or `cost`."""
    families: tuple[Family, ...] = ()
    """The best of each family of plans, with its margin and what would have to change for it to win."""
    interrupted: bool = False
    """Whether the search was stopped: then these are the candidates so far, and a better one may be missing."""
    scored: int = 0
    """How many plans were scored: more than these where the whole space was, and these are its finalists."""
    scored_by: str = ""
    """Whose price that is, and its bound, where it is of the closed form fitted on published runs; else empty."""

    def save(self, path: str | Path) -> None:
        """Write the JSON form."""
        files.write_json(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Answer:
        """Read the JSON form back."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)
