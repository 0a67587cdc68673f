"""Measured tables of a cluster: kernel rates over size, kernel times by shape, collective times, partial occupancy."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from ..core.units import parse_seconds

Positive = Field(gt=0, allow_inf_nan=False)
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
STRICT = ConfigDict(extra="forbid")

_OLD_KERNELS = {"pulse_matmul": "probe_matmul", "pulse_pointwise": "probe_pointwise", "fresh": "new_pages"}
"""Kernel names that earlier releases wrote."""
_Kernel = Annotated[str, BeforeValidator(lambda name: _OLD_KERNELS.get(name, name) if isinstance(name, str) else name)]


@dataclass(frozen=True, slots=True)
class KernelCurve:
    """Rate of one kind of kernel over its size: points, straight lines between them in log-log, flat outside."""

    __pydantic_config__ = STRICT
    kernel: _Kernel
    """`matmul`, `conv`, `pointwise`, ...: the kinds of operators, see `models.profile.KINDS`."""
    dtype: str
    """`fp32`, `bf16`, ...: as in the plan notation's `precision`."""
    sizes: tuple[float, ...]
    """Operations for compute-bound kernels, bytes for memory-bound kernels."""
    rates: tuple[Annotated[float, Positive], ...]
    """Operations per second, or bytes per second."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.rates) or not self.sizes:
            raise ValueError(f"curve {self.kernel}: {len(self.sizes)} sizes but {len(self.rates)} rates")
        _check_growing(f"curve {self.kernel}", self.sizes)

    def at(self, size: float) -> float:
        """The rate at a size."""
        if size <= self.sizes[0]:
            return self.rates[0]
        if size >= self.sizes[-1]:
            return self.rates[-1]
        return _log_between(self.sizes, self.rates, size)


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Seconds of one kind of kernel at each of some shapes; `costs` interpolates between them."""

    __pydantic_config__ = STRICT
    kernel: _Kernel
    """A kind of operator whose time depends on more than its amount of work: see `models.profile.KINDS`."""
    dtype: str
    """`fp32`, `tf32`, `bf16`, ...: as in the plan notation's `precision`."""
    shapes: tuple[tuple[Annotated[float, Positive], ...], ...]
    """The sizes of each, in the order of an operator's `shape`."""
    seconds: tuple[Annotated[float, Positive], ...]
    """Time of each shape."""

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.seconds) or not self.shapes:
            raise ValueError(f"shape times of {self.kernel}: {len(self.shapes)} shapes but {len(self.seconds)} times")
        if len({len(shape) for shape in self.shapes}) > 1:
            raise ValueError(f"shape times of {self.kernel}: its shapes have different numbers of sizes")


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured times of one collective over the bytes of the buffer that it is called with."""

    __pydantic_config__ = STRICT
    collective: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`."""
    transport: str
    """`shm`, `gloo`, `nccl` or `mpi`."""
    ranks: Count
    """Ranks that took part."""
    bytes: tuple[float, ...]
    """Sizes of the buffer, growing."""
    seconds: tuple[Annotated[float, Positive], ...]
    """Time of each size."""
    algorithm: str = "native"
    """As `drumline bench --list` names them; `native` is the transport's own."""
    segments: Count = 1
    """Parts that each chunk was cut into."""

    def __post_init__(self) -> None:
        if len(self.bytes) != len(self.seconds) or not self.bytes:
            raise ValueError(f"{self.collective}: {len(self.bytes)} sizes but {len(self.seconds)} times")
        _check_growing(self.collective, self.bytes)

    def at(self, size: float) -> float:
        """The time for `size` bytes: between points in log-log, below them flat, above them along the last slope."""
        if size <= self.bytes[0]:
            return self.seconds[0]
        if size >= self.bytes[-1]:
            return self.seconds[-1] * size / self.bytes[-1]
        return _log_between(self.bytes, self.seconds, size)


@dataclass(frozen=True, slots=True)
class PartialOccupancy:
    """Numbers that differ when only some ranks of a node are active. The fields are named as in `Cluster`."""

    __pydantic_config__ = STRICT
    OLD_KEYS: ClassVar[dict[str, str]] = {
        "pace": "compute_factor",
        "straggle": "straggler_slowdown",
        "stall": "mid_step_message_s",
        "unit": "sharded_unit_s",
    }
    compute_factor: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Compute time of a rank, relative to all ranks being active."""
    straggler_slowdown: Annotated[float, Field(ge=1, le=100)] = 1.0
    """As the key of the same name at the top, with these ranks."""
    mid_step_message_s: Seconds = 0.0
    """As above."""
    sharded_unit_s: Seconds = 0.0
    """As above."""
    collective: tuple[CollectiveTable, ...] = ()
    """Tables of these ranks, the others idle. Empty where synchronisation was not measured: all ranks' numbers hold."""


def as_partial_occupancy(value: Any) -> Any:
    """Read a number alone as the compute factor, the form of earlier releases."""
    return {"compute_factor": value} if isinstance(value, int | float) else value


def _check_growing(name: str, sizes: tuple[float, ...]) -> None:
    if sizes[0] <= 0 or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"{name}: sizes must be positive and grow")


def _log_between(xs: tuple[float, ...], ys: tuple[float, ...], x: float) -> float:
    i = bisect.bisect_right(xs, x)
    x0, x1, y0, y1 = xs[i - 1], xs[i], ys[i - 1], ys[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp((1 - share) * math.log(y0) + share * math.log(y1))
