"""The role of each operator under tensor parallelism: column, row, between them or outside.

A profile has the operators in the order in which they run, with their sizes, but not the graph of values. So the groups
that the engine finds in its graph are inferred from order and sizes: a matmul whose inputs are the outputs of the
matmuls before it (through attention, or elementwise operators) is the row-parallel layer that closes their
column-parallel group. A norm over features ends a search, and so does a residual around the layer in which the row
would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.errors import PlanError
from ..models.op_shapes import AttentionShape, ConvolutionShape, EmbeddingShape, MatmulShape, NormShape, shape_of
from ..models.profile import Layer, Profile
from ..plans.engine_constants import LEAST_TABLE_ROWS, UNPAIRED_MATMUL_SHARE

COLUMN, ROW, INSIDE, OUTSIDE, HEAD, LOSS, TABLE, ALONE = (
    "column",
    "row",
    "inside",
    "outside",
    "head",
    "loss",
    "table",
    "alone",
)
"""INSIDE: between columns and row; HEAD: the column-parallel LM head, reduced in the LOSS; ALONE: a column-parallel
layer whose output is gathered."""

SPLIT = (COLUMN, ROW, HEAD, ALONE)
"""Matmuls whose weight is divided."""

Place = tuple[int, int]
"""Layer and operator."""
Weight = MatmulShape | ConvolutionShape


def roles_of(profile: Profile, n: int) -> list[tuple[str, ...]]:
    """Roles by layer, repeats one by one, and by operator; those of the backward are left empty."""
    return _Scan(profile, n).run()


@dataclass(slots=True)
class _Scan:
    profile: Profile
    n: int
    layers: Sequence[Layer] = ()
    roles: list[list[str]] = field(default_factory=list)
    pending: list[tuple[Place, Weight]] = field(default_factory=list)
    """Matmuls that have no row yet."""
    between: list[Place] = field(default_factory=list)
    attends: AttentionShape | None = None

    def run(self) -> list[tuple[str, ...]]:
        self.layers = list(self.profile.each())
        self.roles = [[OUTSIDE if op.phase == "forward" else "" for op in x.ops] for x in self.layers]
        head = self._head()
        for i, layer in enumerate(self.layers):
            if any(op.name in ("add", "add_") and op.phase == "forward" for op in layer.ops):
                self._drop()
            for j, op in enumerate(layer.ops):
                if op.phase == "forward":
                    self._visit((i, j), head)
        self._drop()
        return [tuple(roles) for roles in self.roles]

    def _visit(self, at: Place, head: Place | None) -> None:
        op = self.layers[at[0]].ops[at[1]]
        shape = shape_of(op)
        if isinstance(shape, MatmulShape | ConvolutionShape):
            self._matmul(at, shape, head)
        elif isinstance(shape, EmbeddingShape):
            self._drop()
            if (self._divides(shape.rows) and shape.rows >= LEAST_TABLE_ROWS * self.n) or self._is_tied_head(
                shape, head
            ):
                self.roles[at[0]][at[1]] = TABLE
        elif isinstance(shape, NormShape):
            self._drop()
        elif self.pending:
            self.between.append(at)
            self.attends = shape if isinstance(shape, AttentionShape) else self.attends

    def _matmul(self, at: Place, shape: Weight, head: Place | None) -> None:
        if self.pending and self._is_parallel(shape):
            self.pending.append((at, shape))
            return
        if self.pending and self._ends(shape):
            self._mark([place for place, _ in self.pending], COLUMN)
            self._mark(self.between, INSIDE)
            self._mark([at], ROW)
            self._clear()
            return
        attended = self.attends is not None
        self._drop()
        if at == head:
            if self._divides(shape.outputs):
                self._mark([at], HEAD)
                self._mark(self._after(at), LOSS)
        else:
            self.pending = [(at, shape)]
            if attended:
                self._drop()  # the output of attention leads to a residual: it begins no group

    def _is_parallel(self, shape: Weight) -> bool:
        """Whether it reads the input of the pending ones: queries, keys and values; a gate and what it gates."""
        first = self.pending[-1][1]
        if self.attends or type(first) is not type(shape) or shape.inputs != first.inputs:
            return False
        return shape.inputs != first.outputs or not self.between

    def _ends(self, shape: Weight) -> bool:
        """Whether the pending ones lead to it, and n ranks can divide their outputs."""
        outputs = [x.outputs for _, x in self.pending]
        if self.attends is not None:
            return self._divides_heads(self.attends, outputs) and self._divides(shape.inputs)
        alike = all(type(x) is type(shape) and x.outputs % shape.inputs == 0 for _, x in self.pending)
        return alike and all(map(self._divides, [*outputs, shape.inputs])) and _in_one_group(shape, self.pending)

    def _divides_heads(self, a: AttentionShape, outputs: Sequence[int]) -> bool:
        """Whether every rank has whole heads, of queries and of keys. With too few key heads nothing is split."""
        if a.heads % self.n:
            where = self.layers[self.between[-1][0]].name or self.profile.name
            raise PlanError(
                f"tp={self.n} for attention of {a.heads} heads",
                where=where,
                rule=f"tp divides the heads of queries: {a.heads} % {self.n} != 0",
                fix=f"tp={_largest_divisor(a.heads, self.n)}",
            )
        heads = [a.kv_heads, *(k // a.width for k in outputs if k % a.width == 0)]
        return all(map(self._divides, heads))

    def _head(self) -> Place | None:
        """The last matmul, if a softmax over classes follows."""
        last, softmax = None, False
        for i, layer in enumerate(self.layers):
            for j, op in enumerate(layer.ops):
                if op.phase == "forward" and isinstance(shape_of(op), MatmulShape | ConvolutionShape):
                    last, softmax = (i, j), False
                softmax = softmax or (op.phase == "forward" and op.kind == "softmax")
        return last if softmax else None

    def _is_tied_head(self, table: EmbeddingShape, head: Place | None) -> bool:
        if head is None or not self._divides(table.rows):
            return False
        layer = self.layers[head[0]]
        return layer.tied == table.rows * table.width

    def _after(self, at: Place) -> list[Place]:
        return [
            (i, j)
            for i in range(at[0], len(self.layers))
            for j, op in enumerate(self.layers[i].ops)
            if op.phase == "forward" and (i, j) > at
        ]

    def _drop(self) -> None:
        """End a search. Of matmuls without a row, a large one is divided all the same."""
        total = self.profile.parameters
        for place, shape in self.pending:
            if shape.numbers * UNPAIRED_MATMUL_SHARE >= total and self._divides(shape.outputs):
                self._mark([place], ALONE)
        self._clear()

    def _clear(self) -> None:
        self.pending, self.between, self.attends = [], [], None

    def _mark(self, places: Sequence[Place], role: str) -> None:
        for i, j in places:
            self.roles[i][j] = role

    def _divides(self, size: int) -> bool:
        return size % self.n == 0


def _in_one_group(shape: Weight, pending: Sequence[tuple[Place, Weight]]) -> bool:
    return all(getattr(x, "groups", 1) == 1 for x in (shape, *(w for _, w in pending)))


def _largest_divisor(heads: int, n: int) -> int:
    return max(d for d in range(1, n + 1) if heads % d == 0)
