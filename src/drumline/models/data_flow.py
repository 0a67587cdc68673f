"""The data flow of a forward, as traced: its operators, the values that they write, and who reads each value.

Values from the batch have no writer. Parameters and buffers are not values: an operator names those that it reads, so a
tied weight is one that operators of two layers name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pydantic import ConfigDict

from .affine import Affine

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class FlowOperator:
    """One call of an operator that writes data; views are not listed."""

    __pydantic_config__ = _STRICT
    name: str
    """The operator, such as `addmm`."""
    kind: str
    """One of `models.profile.KINDS`."""
    layer: str
    """The name of its layer in the profile."""
    module: str
    """Path of the module that called it; empty for the model itself and for the loss."""
    flops: Affine
    bytes: Affine
    """Bytes read and written."""
    depth: float
    """Longest chain of dependent unit operations inside of it."""
    parameters: tuple[str, ...] = ()
    """Parameters and buffers that it reads."""
    elementwise: bool = False
    """Whether each value of its result depends on one value of each input, so that it can be fused."""


@dataclass(frozen=True, slots=True)
class FlowValue:
    """A tensor that an operator wrote, or that came with the batch. Writing in place makes a new value."""

    __pydantic_config__ = _STRICT
    writer: int
    """Number of the operator; -1 for the batch."""
    bytes: Affine
    saved: bool = False
    """Whether autograd keeps it for the backward."""


@dataclass(frozen=True, slots=True)
class FlowRead:
    """An operator reads a value, or a part of it."""

    __pydantic_config__ = _STRICT
    value: int
    reader: int
    bytes: Affine


@dataclass(frozen=True)
class DataFlow:
    """The forward of a model and its loss, in the order in which it ran."""

    __pydantic_config__ = _STRICT
    operators: tuple[FlowOperator, ...]
    values: tuple[FlowValue, ...]
    reads: tuple[FlowRead, ...]

    def __post_init__(self) -> None:
        operators, values = len(self.operators), len(self.values)
        for value in self.values:
            if not -1 <= value.writer < operators:
                raise ValueError(f"a value of operator {value.writer}, of {operators} operators")
        for read in self.reads:
            if not (0 <= read.value < values and 0 <= read.reader < operators):
                raise ValueError(f"operator {read.reader} of {operators} reads value {read.value} of {values}")
            if self.values[read.value].writer >= read.reader:
                raise ValueError(f"operator {read.reader} reads value {read.value}, which is written later")

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """The operators whose values each operator reads."""
        needed: list[set[int]] = [set() for _ in self.operators]
        for read in self.reads:
            writer = self.values[read.value].writer
            if writer >= 0:
                needed[read.reader].add(writer)
        return tuple(tuple(sorted(own)) for own in needed)

    @cached_property
    def readers(self) -> tuple[tuple[FlowRead, ...], ...]:
        """The reads of each value."""
        by_value: list[list[FlowRead]] = [[] for _ in self.values]
        for read in self.reads:
            by_value[read.value].append(read)
        return tuple(map(tuple, by_value))

    @cached_property
    def read_by(self) -> tuple[tuple[tuple[int, Affine], ...], ...]:
        """By operator: the values that it reads, each with the bytes of its part."""
        by_reader: list[list[tuple[int, Affine]]] = [[] for _ in self.operators]
        for read in self.reads:
            by_reader[read.reader].append((read.value, read.bytes))
        return tuple(map(tuple, by_reader))

    @cached_property
    def written_by(self) -> tuple[tuple[int, ...], ...]:
        """By operator: the values that it writes."""
        by_writer: list[list[int]] = [[] for _ in self.operators]
        for i, value in enumerate(self.values):
            if value.writer >= 0:
                by_writer[value.writer].append(i)
        return tuple(map(tuple, by_writer))
