"""What tensor parallelism does with each operator of a profile: columns, rows, and what is between and beside them.

A profile has the operators in the order in which they run, with their sizes, but not who reads whose result. So the
groups that the engine finds in its graph are told from order and sizes: a product whose inputs are the outputs of the
products before it (by way of attention, or of functions of single values) is their row. A norm over features ends a
search, and so does a residual around the layer in which the row would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.errors import PlanError
from ..models.profile import Layer, Profile
from ..models.shapes import Attention, Convolution, Norm, Product, Table, shape_of

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
"""INSIDE: between columns and row; HEAD: a column whose row is the LOSS; ALONE: a column whose output is gathered."""

SPLIT = (COLUMN, ROW, HEAD, ALONE)
"""Products whose weight is divided."""

LEAST_ROWS = 16
"""A table with fewer rows a rank stays whole."""

ALONE_SHARE = 50
"""A product without a row is divided if it has at least one in so many of the model's numbers."""

Place = tuple[int, int]
"""Layer and operator."""
Weight = Product | Convolution


def roles_of(profile: Profile, n: int) -> list[tuple[str, ...]]:
    """By layer, repeats one by one, and by operator; those of the backward are left empty."""
    return _Scan(profile, n).run()


@dataclass(slots=True)
class _Scan:
    profile: Profile
    n: int
    layers: Sequence[Layer] = ()
    found: list[list[str]] = field(default_factory=list)
    pending: list[tuple[Place, Weight]] = field(default_factory=list)
    """Products that have no row yet."""
    between: list[Place] = field(default_factory=list)
    attends: Attention | None = None

    def run(self) -> list[tuple[str, ...]]:
        self.layers = list(self.profile.each())
        self.found = [[OUTSIDE if op.phase == "forward" else "" for op in x.ops] for x in self.layers]
        head = self._head()
        for i, layer in enumerate(self.layers):
            if any(op.name in ("add", "add_") and op.phase == "forward" for op in layer.ops):
                self._drop()
            for j, op in enumerate(layer.ops):
                if op.phase == "forward":
                    self._meet((i, j), head)
        self._drop()
        return [tuple(words) for words in self.found]

    def _meet(self, at: Place, head: Place | None) -> None:
        op = self.layers[at[0]].ops[at[1]]
        shape = shape_of(op)
        if isinstance(shape, Product | Convolution):
            self._product(at, shape, head)
        elif isinstance(shape, Table):
            self._drop()
            if (self._divides(shape.rows) and shape.rows >= LEAST_ROWS * self.n) or self._is_tied_head(shape, head):
                self.found[at[0]][at[1]] = TABLE
        elif isinstance(shape, Norm):
            self._drop()
        elif self.pending:
            self.between.append(at)
            self.attends = shape if isinstance(shape, Attention) else self.attends

    def _product(self, at: Place, shape: Weight, head: Place | None) -> None:
        if self.pending and self._is_beside(shape):
            self.pending.append((at, shape))
            return
        if self.pending and self._ends(shape):
            self._say([place for place, _ in self.pending], COLUMN)
            self._say(self.between, INSIDE)
            self._say([at], ROW)
            self._forget()
            return
        attended = self.attends is not None
        self._drop()
        if at == head:
            if self._divides(shape.outputs):
                self._say([at], HEAD)
                self._say(self._after(at), LOSS)
        else:
            self.pending = [(at, shape)]
            if attended:
                self._drop()  # what an attention ends with leads to a residual: it begins nothing

    def _is_beside(self, shape: Weight) -> bool:
        """Whether it reads what the pending ones read: queries, keys and values; a gate and what it gates."""
        first = self.pending[-1][1]
        if self.attends or type(first) is not type(shape) or shape.inputs != first.inputs:
            return False
        return shape.inputs != first.outputs or not self.between

    def _ends(self, shape: Weight) -> bool:
        """Whether the pending ones lead to it, and n ranks can share what they give."""
        outputs = [x.outputs for _, x in self.pending]
        if self.attends is not None:
            return self._shares(self.attends, outputs) and self._divides(shape.inputs)
        alike = all(type(x) is type(shape) and x.outputs % shape.inputs == 0 for _, x in self.pending)
        return alike and all(map(self._divides, [*outputs, shape.inputs])) and _in_one_group(shape, self.pending)

    def _shares(self, a: Attention, outputs: Sequence[int]) -> bool:
        """Whether every rank has whole heads, of queries and of keys. Keys may have too few: then all is whole."""
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
        """The last product, if classes are told from what it gives."""
        last, softmax = None, False
        for i, layer in enumerate(self.layers):
            for j, op in enumerate(layer.ops):
                if op.phase == "forward" and isinstance(shape_of(op), Product | Convolution):
                    last, softmax = (i, j), False
                softmax = softmax or (op.phase == "forward" and op.kind == "softmax")
        return last if softmax else None

    def _is_tied_head(self, table: Table, head: Place | None) -> bool:
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
        """Products that no row takes up: a large one is divided all the same."""
        total = self.profile.parameters
        for place, shape in self.pending:
            if shape.numbers * ALONE_SHARE >= total and self._divides(shape.outputs):
                self._say([place], ALONE)
        self._forget()

    def _forget(self) -> None:
        self.pending, self.between, self.attends = [], [], None

    def _say(self, places: Sequence[Place], word: str) -> None:
        for i, j in places:
            self.found[i][j] = word

    def _divides(self, size: int) -> bool:
        return size % self.n == 0


def _in_one_group(shape: Weight, pending: Sequence[tuple[Place, Weight]]) -> bool:
    return all(getattr(x, "groups", 1) == 1 for x in (shape, *(w for _, w in pending)))


def _largest_divisor(heads: int, n: int) -> int:
    return max(d for d in range(1, n + 1) if heads % d == 0)
