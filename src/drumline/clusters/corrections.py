"""The `Corrections` value: by what factors runs on a machine took longer or shorter than predicted, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .measured import STRICT

LEAST, MOST = 0.2, 5.0
"""No correction goes beyond: what is further off is no matter of a factor."""


@dataclass(frozen=True, slots=True)
class CorrectionFactor:
    """One factor on one part of a step. What it leaves open (`kind`, `job`) it holds for all of."""

    __pydantic_config__ = STRICT
    part: str
    """`forward`, `backward`, `communication` or `optimizer`."""
    value: Annotated[float, Field(ge=LEAST, le=MOST)]
    precision: str
    kind: str = ""
    """The kind of plan: `one`, `replicas`, `sharded`, `fully sharded`, `split by pp, tp`; empty: any."""
    ranks: Annotated[int, Field(ge=0)] = 0
    """Of the plan; 0: any."""
    job: str = ""
    """The digest of a model; empty: any."""
    runs: Annotated[int, Field(ge=1)] = 1
    """How many it was learnt from."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors from the general to the special; those that match are multiplied."""

    __pydantic_config__ = STRICT
    factor: tuple[CorrectionFactor, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.factor)
