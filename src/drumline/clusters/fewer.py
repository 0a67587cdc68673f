"""Ranks of a node that work while others of it are idle: what was measured of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from .measured import STRICT, CollectiveTable, Seconds


@dataclass(frozen=True, slots=True)
class PartialOccupancy:
    """What is otherwise when so many ranks of a node work. The names are those of `Cluster`."""

    __pydantic_config__ = STRICT
    compute_factor: Annotated[float, Field(gt=0, le=100)] = 1.0
    """The factor on what each takes to compute, against all of them at once."""
    straggler_slowdown: Annotated[float, Field(ge=1, le=100)] = 1.0
    mid_step_message_s: Seconds = 0.0
    sharded_unit_s: Seconds = 0.0
    collective: tuple[CollectiveTable, ...] = ()
    """Of these ranks, the others idle. Where there is none, how they meet was not measured, and is as among all."""

    @property
    def meet(self) -> bool:
        """Whether it was measured how they meet."""
        return bool(self.collective)


def number_as_compute_factor(value: Any) -> Any:
    """A number alone is the pace: so it was written before meetings were measured."""
    return {"pace": value} if isinstance(value, int | float) else value
