"""The answer of a search: every candidate, best first, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict

from ..core import files
from ..core.display import NotebookValue
from ..core.errors import CorruptFile
from ..plans import Plan
from .plan_families import PlanFamily
from .stale_plans import StaleVerdict


def _parsed(value: Any) -> Any:
    return Plan.parse(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan and its score."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    plan: Annotated[Plan, BeforeValidator(_parsed)]
    """In files, its notation."""
    step_seconds: float
    memory_bytes: float
    fits: bool
    reason: str
    """Why it won, or by how much and why it lost."""
    tie: bool = False
    """Whether its time, or its cost, and the least one differ by less than the cost model can distinguish."""
    in_reserve: bool = False
    """Whether it fits only into the memory that is kept free."""


@dataclass(frozen=True, slots=True)
class Answer(NotebookValue):
    """All candidates, best first: the winner, those that fit by the objective, those that fit only into the reserve,
    then those that do not fit by memory."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    candidates: tuple[Candidate, ...]
    seconds: float
    """Duration of the search."""
    explanation: str
    """One paragraph: what bounds the step, how the plan uses the machine, why the alternatives lose."""
    objective: str = "time"
    """`time`, `memory` or `cost`."""
    families: tuple[PlanFamily, ...] = ()
    """The best of each family of plans, with its margin and what would make it win."""
    interrupted: bool = False
    """Whether the user stopped the search: then a better candidate may be missing."""
    scored: int = 0
    """Plans that were scored: more than the candidates where the whole space was scored on arrays."""
    scored_by: str = ""
    """The fitted cost model and its error; empty where prices are summed over operators."""
    stale: StaleVerdict | None = None
    """Where plans were allowed whose replicas do not wait for each other: what became of them."""
    reserve_bytes: float = 0.0
    """Memory of each device that is kept free."""
    idle: str = ""
    """Why devices stay idle, which the explanation says first; empty if the best plan uses all."""

    @property
    def best(self) -> Candidate:
        """The winner."""
        return self.candidates[0]

    def save(self, path: str | Path) -> None:
        """Write JSON, with plans in their notation."""
        table = files.to_plain(self)
        for row, candidate in zip(table["candidates"], self.candidates, strict=True):
            row["plan"] = str(candidate.plan)
        files.write_json(path, table)

    @classmethod
    def load(cls, path: str | Path) -> Answer:
        """Read JSON."""
        return files.from_plain(cls, files.read_json(path), str(path), CorruptFile)
