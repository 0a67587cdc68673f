"""What was measured over a size: the rate of a kind of kernel, the time of a collective."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

from ..core.units import parse_seconds

Positive = Field(gt=0, allow_inf_nan=False)
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class RateCurve:
    """The rate of one kind of kernel over its size: points, straight lines between them in log-log, flat outside."""

    __pydantic_config__ = STRICT
    kernel: str
    """`matmul`, `conv`, `pointwise`, ...: the kinds of operators, see `model.profile.KINDS`."""
    dtype: str
    """`fp32`, `bf16`, ...: as in the plan notation's `precision`."""
    sizes: tuple[float, ...]
    """Operations for kernels bound by compute, bytes for kernels bound by memory."""
    rates: tuple[Annotated[float, Positive], ...]
    """Operations per second, or bytes per second."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.rates) or not self.sizes:
            raise ValueError(f"curve {self.kernel}: {len(self.sizes)} sizes but {len(self.rates)} rates")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)) or self.sizes[0] <= 0:
            raise ValueError(f"curve {self.kernel}: sizes must be positive and grow")

    def at(self, size: float) -> float:
        """The rate at a size."""
        if size <= self.sizes[0]:
            return self.rates[0]
        if size >= self.sizes[-1]:
            return self.rates[-1]
        return _log_between(self.sizes, self.rates, size)


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured times of one collective over the bytes of the buffer that it is called with."""

    __pydantic_config__ = STRICT
    collective: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`."""
    transport: str
    ranks: Count
    bytes: tuple[float, ...]
    seconds: tuple[Annotated[float, Positive], ...]
    algorithm: str = "native"
    """As `drumline bench --list` names them; `native` is what the transport itself offers."""
    segments: Count = 1
    """Parts that each chunk was cut into."""

    def __post_init__(self) -> None:
        if len(self.bytes) != len(self.seconds) or not self.bytes:
            raise ValueError(f"{self.collective}: {len(self.bytes)} sizes but {len(self.seconds)} times")
        if any(b <= a for a, b in zip(self.bytes, self.bytes[1:], strict=False)) or self.bytes[0] <= 0:
            raise ValueError(f"{self.collective}: sizes must be positive and grow")

    def at(self, size: float) -> float:
        """The time for `size` bytes: between points in log-log, below them flat, above them along the last slope."""
        if size <= self.bytes[0]:
            return self.seconds[0]
        if size >= self.bytes[-1]:
            return self.seconds[-1] * size / self.bytes[-1]
        return _log_between(self.bytes, self.seconds, size)


def _log_between(xs: tuple[float, ...], ys: tuple[float, ...], x: float) -> float:
    i = bisect.bisect_right(xs, x)
    x0, x1, y0, y1 = xs[i - 1], xs[i], ys[i - 1], ys[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
