"""Ranks of a node that work while others of it are idle: what was measured of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from .curves import STRICT, Seconds, Table


@dataclass(frozen=True, slots=True)
class Fewer:
    """What is otherwise when so many ranks of a node work. The names are those of `Cluster`."""

    __pydantic_config__ = STRICT
    pace: Annotated[float, Field(gt=0, le=100)] = 1.0
    """The factor on what each takes to compute, against all of them at once."""
    straggle: Annotated[float, Field(ge=1, le=100)] = 1.0
    stall: Seconds = 0.0
    unit: Seconds = 0.0
    collective: tuple[Table, ...] = ()
    """Of these ranks, the others idle. Where there is none, how they meet was not measured, and is as among all."""

    @property
    def meet(self) -> bool:
        """Whether it was measured how they meet."""
        return bool(self.collective)


def at_pace(value: Any) -> Any:
    """A number alone is the pace: so it was written before meetings were measured."""
    return {"pace": value} if isinstance(value, int | float) else value
