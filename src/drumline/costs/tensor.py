"""Tensor parallelism: one rank's part of every layer, and what it tells the others.

Between columns and row, and in a loss by classes, each rank has 1/n of the features. Beside them it has 1/n of the
tokens where n divides them (then a gather leads to columns, and a scatter from the row), and else all of them (then the
row's results are all-reduced, and in the backward the gradients of what columns read). Parameters that are whole while
their tokens are divided (`common`) have gradients that are summands: they are added up with those of replicas, once a
step (traffic.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..core.errors import PlanError
from ..models.profile import Affine, Layer, Op, Profile
from ..models.shapes import Convolution, Norm, Product, Table, shape_of
from .local import Kept, Local, Talk, Talks, kept_by, with_layers
from .roles import ALONE, COLUMN, HEAD, LOSS, OUTSIDE, ROW, SPLIT, TABLE, roles_of
from .tensor_part import Part, local_layer

INDEX = 8
"""Bytes of an id."""


def by_tensors(local: Local, n: int) -> Local:
    """The part of one of n ranks."""
    if n == 1:
        return local
    profile = local.profile
    words = roles_of(profile, n)
    if not any(word in (*SPLIT, TABLE) for each in words for word in each):
        raise PlanError(
            f"tp={n}: no layer of {profile.name} can be split over {n} ranks",
            rule="some product's outputs and the next one's inputs divide by tp",
            fix="tp=1, and dp or pp",
        )
    tokens = tokens_of(profile)
    state = _Stream(profile, n, tokens if tokens % n == 0 and tokens > 1 else 0)
    said = [t for x, t in zip(profile.layers, local.talks, strict=True) for _ in range(x.repeats)]
    kept = [k for x, k in zip(profile.layers, kept_by(profile), strict=True) for _ in range(x.repeats)]
    parts: list[Part] = []
    for layer, own, roles, before in zip(profile.each(), kept, words, said, strict=True):
        talks = state.layer(layer, roles)
        parts.append(Part(layer, own, roles, talks, before, state.tokens, state.common))
    return _together(local, parts, n)


def tokens_of(profile: Profile) -> int:
    """Of a sample, where samples are tokens; else 0."""
    found = (shape_of(op) for x in profile.layers for op in x.ops)
    tokens = max((s.tokens for s in found if isinstance(s, Table)), default=0)
    return tokens if tokens > 1 else 0


def _together(local: Local, parts: Sequence[Part], n: int) -> Local:
    """Equal layers in a row become one again."""
    layers: list[Layer] = []
    kept: list[Kept] = []
    talks: list[Talks] = []
    last: Part | None = None
    for part in parts:
        if last is not None and part.equals(last):
            layers[-1] = replace(layers[-1], repeats=layers[-1].repeats + 1)
            continue
        layer, own = local_layer(part, n)
        layers.append(layer)
        kept.append(own)
        talks.append((*part.said, *part.talks))
        last = part
    return Local(with_layers(local.profile, layers, kept), tuple(talks), local.notes)


@dataclass(slots=True)
class _Stream:
    """How what passes from layer to layer lies, and so what is said around the products."""

    profile: Profile
    n: int
    tokens: int
    """Those of a sample, where ranks divide them; 0 where they do not."""
    split: bool = False
    """Whether it is divided by tokens."""
    learns: bool = False
    """Whether a gradient goes back to what comes now."""
    told: list[Talk] = field(default_factory=list)
    common: int = 0
    """Numbers of this layer's parameters that are whole while their tokens are divided."""
    open: bool = False
    """Whether columns have been met whose row has not: they read one value, which moves once."""

    def layer(self, layer: Layer, roles: Sequence[str]) -> Talks:
        """What is said in one layer."""
        self.told, self.common = [], 0
        residual = any(op.name in ("add", "add_") for op in layer.ops if op.phase == "forward")
        for op, role in zip(layer.ops, roles, strict=True):
            shape = shape_of(op)
            if role == TABLE or isinstance(shape, Table):
                self._table(op, shape, role)
            elif isinstance(shape, Product | Convolution):
                self._product(op, shape, role, residual)
            elif isinstance(shape, Norm) and role == OUTSIDE:
                self._whole_parameters(shape.tensors * shape.width)
                self.learns = True
        if any(role == LOSS and op.kind == "softmax" for op, role in zip(layer.ops, roles, strict=True)):
            self._loss()
        elif self.split and any(op.kind == "softmax" and r == OUTSIDE for op, r in zip(layer.ops, roles, strict=True)):
            number = Affine(float(self.profile.activation_bytes))
            self._say("forward", "all_reduce", number, wide=True)  # the sum of the loss
            self._say("forward", "all_reduce", number)  # how many terms it has, in the type of the logits
        return tuple(self.told)

    def _say(self, phase: str, collective: str, *sizes: Affine, wide: bool = False) -> None:
        self.told += [Talk("tp", phase, collective, size, wide) for size in sizes]

    def _table(self, op: Op, shape: object, role: str) -> None:
        assert isinstance(shape, Table)
        width = self.profile.activation_bytes
        self.learns = True
        if shape.tokens:
            size = Affine(0.0, float(width * shape.tokens * shape.width))
            if role == TABLE:
                self._settle(size, wide=True)
            return
        row = shape.width * width
        places = (op.bytes.fixed - shape.rows * row) / (row + INDEX)
        size = Affine(max(0.0, places) * row)
        if role == TABLE:
            self._say("forward", "all_reduce", size, wide=True)
        if self.split:
            self._say("backward", "all_gather", size, wide=True)

    def _settle(self, size: Affine, *, wide: bool = False) -> None:
        """Summands are added up: to parts of the tokens, or to a whole."""
        if self.tokens:
            self._say("forward", "reduce_scatter", size, wide=wide)
            self._say("backward", "all_gather", size, wide=wide)
            self.split = True
        else:
            self._say("forward", "all_reduce", size, wide=wide)

    def _product(self, op: Op, shape: Product | Convolution, role: str, residual: bool) -> None:
        read, given = _values(op, shape, self.profile)
        if role in (COLUMN, HEAD, ALONE):
            if not self.open:
                self._enter(read)
            self.open = role == COLUMN
            if role == ALONE:
                self._say("forward", "all_gather", given)
                self.split = False
        elif role == ROW:
            was, self.open = self.split, False
            self._settle(given)
            if self.split and not was and residual:
                self._say("backward", "all_gather", given, wide=True)  # what passes by the layer is cut
            self._whole_parameters(shape.outputs * shape.bias)
        elif role == OUTSIDE:
            self._whole_parameters(shape.numbers + shape.outputs * shape.bias)
        self.learns = True

    def _enter(self, read: Affine) -> None:
        """A value for columns: made whole, its gradients added up."""
        if self.split:
            self._say("forward", "all_gather", read, wide=True)
            self._say("backward", "reduce_scatter", read, wide=True)
        elif self.learns:
            self._say("backward", "all_reduce", read, wide=True)

    def _whole_parameters(self, numbers: int) -> None:
        if self.split:
            self.common += numbers

    def _loss(self) -> None:
        """The largest logit; then the sum of exponentials and the target's logit, of every target."""
        size = self.profile.activation_bytes * self._targets()
        self._say("forward", "all_reduce", Affine(0.0, size), Affine(0.0, 2 * size), wide=True)

    def _targets(self) -> float:
        """Of a sample: what the last product gives classes for."""
        every = [shape for x in self.profile.layers for op in x.ops if (shape := shape_of(op))]
        last = [s for s in every if isinstance(s, Product | Convolution)][-1]
        return float(last.rows if isinstance(last, Product) else last.rows * last.columns)


def _values(op: Op, shape: Product | Convolution, profile: Profile) -> tuple[Affine, Affine]:
    """Bytes that a product reads and gives for its samples."""
    width = profile.activation_bytes
    if isinstance(shape, Product):
        return (
            Affine(0.0, float(width * shape.rows * shape.inputs)),
            Affine(0.0, float(width * shape.rows * shape.outputs)),
        )
    read = float(width * shape.inputs * shape.rows * shape.columns)
    return Affine(0.0, read), Affine(0.0, max(0.0, op.bytes.per_sample - read))
