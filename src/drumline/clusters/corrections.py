"""The `Corrections` value: measured over predicted time of earlier runs on a machine, by part of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .measured import STRICT

LEAST, MOST = 0.2, 5.0
"""Bounds of a factor; larger deviations have other causes."""


@dataclass(frozen=True, slots=True)
class CorrectionFactor:
    """A factor on one part of a step. An empty `kind` or `job` matches all."""

    __pydantic_config__ = STRICT
    part: str
    """`forward`, `backward`, `communication` or `optimizer`."""
    value: Annotated[float, Field(ge=LEAST, le=MOST)]
    """Measured over predicted time."""
    precision: str
    """Precision of the plan."""
    kind: str = ""
    """The kind of plan: `one`, `replicas`, `sharded`, `fully sharded`, `split by pp, tp`; empty: any."""
    ranks: Annotated[int, Field(ge=0)] = 0
    """Ranks of the plan; 0: any."""
    job: str = ""
    """The digest of a model; empty: any."""
    runs: Annotated[int, Field(ge=1)] = 1
    """Number of runs that it was learnt from."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors from general to specific; all that match are multiplied."""

    __pydantic_config__ = STRICT
    factor: tuple[CorrectionFactor, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.factor)
