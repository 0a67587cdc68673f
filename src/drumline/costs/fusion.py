"""Savings of a fused kernel for each chain of elementwise operators, from the data flow of a model.

A fused kernel keeps values in registers that would be written to memory and read again. A value that another operator
reads, or that the backward needs, is still written; only its reads inside of the chain are saved.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..models.affine import Affine
from ..models.data_flow import DataFlow


@dataclass(frozen=True, slots=True)
class FusedChain:
    """Elementwise operators that one kernel could compute."""

    operators: tuple[int, ...]
    """Their numbers in the data flow, in order; at least two."""
    written: Affine
    """Bytes of values that would no longer be written."""
    read: Affine
    """Bytes that would no longer be read."""

    @property
    def bytes(self) -> Affine:
        """Bytes that memory would no longer move."""
        return self.written + self.read


def fused_chains(flow: DataFlow) -> tuple[FusedChain, ...]:
    """The largest chains, found in the order of the operators: each joins those of its elementwise inputs.

    Two operators are in one chain if one reads the other's result as a whole, and no operator outside of the chain lies
    between two of its members.
    """
    groups = _Groups(flow)
    for reader, operator in enumerate(flow.operators):
        if operator.elementwise:
            for writer in _elementwise_inputs(flow, reader):
                groups.join(writer, reader)
    members: dict[int, list[int]] = defaultdict(list)
    for number in range(len(flow.operators)):
        members[groups.of[number]].append(number)
    return tuple(_chain(flow, own) for own in members.values() if len(own) > 1)


def _elementwise_inputs(flow: DataFlow, reader: int) -> list[int]:
    """The elementwise operators whose whole results an operator reads."""
    return [
        writer
        for value, size in flow.read_by[reader]
        if (writer := flow.values[value].writer) >= 0
        and flow.operators[writer].elementwise
        and size == flow.values[value].bytes
    ]


class _Groups:
    """Sets of operators that grow while no path leaves one and comes back."""

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow
        self.of = list(range(len(flow.operators)))
        self.members = [[i] for i in self.of]
        """By group."""
        self.ancestors: list[int] = []
        """By operator, as a bit set."""
        for needs in flow.needs:
            own = 0
            for n in needs:
                own |= 1 << n | self.ancestors[n]
            self.ancestors.append(own)

    def join(self, a: int, b: int) -> None:
        """Make two groups one, unless an operator outside of both lies between them."""
        first, second = self.of[a], self.of[b]
        if first == second:
            return
        union = self.members[first] + self.members[second]
        inside = sum(1 << n for n in union)
        inputs = {n for member in union for n in self.flow.needs[member]}.difference(union)
        if any(self.ancestors[n] & inside for n in inputs):
            return
        self.members[first], self.members[second] = union, []
        for n in union:
            self.of[n] = first


def _chain(flow: DataFlow, members: list[int]) -> FusedChain:
    inside = set(members)
    written = read = Affine()
    for member in members:
        for value in flow.written_by[member]:
            reads = flow.readers[value]
            own = [r for r in reads if r.reader in inside]
            read = sum((r.bytes for r in own), read)
            if own and len(own) == len(reads) and not flow.values[value].saved:
                written = written + flow.values[value].bytes
    return FusedChain(tuple(members), written, read)
