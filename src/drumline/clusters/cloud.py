"""Measured times of one kind of kernel at many shapes: a matrix product is not told by its operations alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Seconds of a kernel at each of some shapes; what lies between them is for `cost.clouds` to say."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    kernel: str
    """A kind of operators whose time depends on more than their amount: see `model.profile.KINDS`."""
    dtype: str
    """`fp32`, `tf32`, `bf16`, ...: as in the plan notation's `precision`."""
    shapes: tuple[tuple[Size, ...], ...]
    """The sizes of each, in the order of `Op.shape`."""
    seconds: tuple[Size, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.seconds) or not self.shapes:
            raise ValueError(f"cloud {self.kernel}: {len(self.shapes)} shapes but {len(self.seconds)} times")
        if len({len(shape) for shape in self.shapes}) > 1:
            raise ValueError(f"cloud {self.kernel}: its shapes have different numbers of sizes")
