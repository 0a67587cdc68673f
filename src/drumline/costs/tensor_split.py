"""Tensor parallelism: one rank's part of every layer, and its messages to the other ranks.

Between a column and its row, and in a loss by classes, each rank has 1/n of the features. Elsewhere it has 1/n of the
tokens if n divides them (then a gather leads to columns, and a scatter from the row), and else all of them (then the
row's outputs are all-reduced, and in the backward the gradients of the columns' inputs). Parameters that are whole
while their tokens are divided (`common`) have gradients that are partial sums: they are added up with those of
replicas, once a step (data_parallel_comm.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..core.errors import PlanError
from ..models.op_shapes import ConvolutionShape, EmbeddingShape, MatmulShape, NormShape, shape_of
from ..models.profile import Affine, Layer, Profile, ProfiledOp
from .rank_model import (
    LayerActivationMemory,
    LayerMessage,
    LayerMessages,
    RankModel,
    memory_by_layer,
    tokens_of,
    with_layers,
)
from .tensor_layer import TensorLayer, local_layer
from .tensor_roles import ALONE, COLUMN, HEAD, LOSS, OUTSIDE, ROW, SPLIT, TABLE, roles_of

INDEX_BYTES = 8
"""Bytes of a token id."""


def split_features(rank: RankModel, n: int) -> RankModel:
    """The part of one of n ranks."""
    if n == 1:
        return rank
    profile = rank.profile
    every_role = roles_of(profile, n)
    if not any(role in (*SPLIT, TABLE) for roles in every_role for role in roles):
        raise PlanError(
            f"tp={n}: no layer of {profile.name} can be split over {n} ranks",
            rule="the outputs of some matmul and the inputs of the next one divide by tp",
            fix="tp=1, and dp or pp",
        )
    tokens = tokens_of(profile)
    walk = _Residual(profile, n, tokens if tokens % n == 0 and tokens > 1 else 0)
    earlier = [m for x, m in zip(profile.layers, rank.messages, strict=True) for _ in range(x.repeats)]
    memory = [m for x, m in zip(profile.layers, memory_by_layer(profile), strict=True) for _ in range(x.repeats)]
    parts: list[TensorLayer] = []
    for layer, own, roles, before in zip(profile.each(), memory, every_role, earlier, strict=True):
        messages = walk.layer(layer, roles)
        parts.append(TensorLayer(layer, own, roles, messages, before, walk.tokens, walk.common))
    return _merged(rank, parts, n)


def _merged(rank: RankModel, parts: Sequence[TensorLayer], n: int) -> RankModel:
    """Consecutive equal layers become one again."""
    layers: list[Layer] = []
    memory: list[LayerActivationMemory] = []
    messages: list[LayerMessages] = []
    last: TensorLayer | None = None
    for part in parts:
        if last is not None and part.equals(last):
            layers[-1] = replace(layers[-1], repeats=layers[-1].repeats + 1)
            continue
        layer, own = local_layer(part, n)
        layers.append(layer)
        memory.append(own)
        messages.append((*part.earlier, *part.messages))
        last = part
    return RankModel(with_layers(rank.profile, layers, memory), tuple(messages), rank.notes)


@dataclass(slots=True)
class _Residual:
    """Follows how the residual stream is divided from layer to layer, and so which messages matmuls need."""

    profile: Profile
    n: int
    tokens: int
    """Tokens of a sample, if ranks divide them; else 0."""
    split: bool = False
    """Whether it is divided by tokens now."""
    needs_gradient: bool = False
    """Whether the current value needs a gradient."""
    messages: list[LayerMessage] = field(default_factory=list)
    common: int = 0
    """Parameters of this layer that are whole while their tokens are divided."""
    open: bool = False
    """Whether the walk is between columns and their row: the columns read one value, which moves once."""

    def layer(self, layer: Layer, roles: Sequence[str]) -> LayerMessages:
        """The messages of one layer."""
        self.messages, self.common = [], 0
        residual = any(op.name in ("add", "add_") for op in layer.ops if op.phase == "forward")
        for op, role in zip(layer.ops, roles, strict=True):
            shape = shape_of(op)
            if role == TABLE or isinstance(shape, EmbeddingShape):
                self._table(op, shape, role)
            elif isinstance(shape, MatmulShape | ConvolutionShape):
                self._matmul(op, shape, role, residual)
            elif isinstance(shape, NormShape) and role == OUTSIDE:
                self._whole_parameters(shape.tensors * shape.width)
                self.needs_gradient = True
        if any(role == LOSS and op.kind == "softmax" for op, role in zip(layer.ops, roles, strict=True)):
            self._loss()
        elif self.split and any(op.kind == "softmax" and r == OUTSIDE for op, r in zip(layer.ops, roles, strict=True)):
            number = Affine(float(self.profile.activation_bytes))
            self._send("forward", "all_reduce", number, wide=True)  # the sum of the loss
            self._send("forward", "all_reduce", number)  # how many terms it has, in the type of the logits
        return tuple(self.messages)

    def _send(self, phase: str, collective: str, *sizes: Affine, wide: bool = False) -> None:
        self.messages += [LayerMessage("tp", phase, collective, size, wide) for size in sizes]

    def _table(self, op: ProfiledOp, shape: object, role: str) -> None:
        assert isinstance(shape, EmbeddingShape)
        width = self.profile.activation_bytes
        self.needs_gradient = True
        if shape.tokens:
            size = Affine(0.0, float(width * shape.tokens * shape.width))
            if role == TABLE:
                self._sum(size, wide=True)
            return
        row = shape.width * width
        places = (op.bytes.fixed - shape.rows * row) / (row + INDEX_BYTES)
        size = Affine(max(0.0, places) * row)
        if role == TABLE:
            self._send("forward", "all_reduce", size, wide=True)
        if self.split:
            self._send("backward", "all_gather", size, wide=True)

    def _sum(self, size: Affine, *, wide: bool = False) -> None:
        """Add up partial sums: to parts of the tokens, or to the whole value."""
        if self.tokens:
            self._send("forward", "reduce_scatter", size, wide=wide)
            self._send("backward", "all_gather", size, wide=wide)
            self.split = True
        else:
            self._send("forward", "all_reduce", size, wide=wide)

    def _matmul(self, op: ProfiledOp, shape: MatmulShape | ConvolutionShape, role: str, residual: bool) -> None:
        read, output = _input_and_output(op, shape, self.profile)
        if role in (COLUMN, HEAD, ALONE):
            if not self.open:
                self._enter(read)
            self.open = role == COLUMN
            if role == ALONE:
                self._send("forward", "all_gather", output)
                self.split = False
        elif role == ROW:
            was, self.open = self.split, False
            self._sum(output)
            if self.split and not was and residual:
                self._send("backward", "all_gather", output, wide=True)  # the residual around the layer is cut
            self._whole_parameters(shape.outputs * shape.bias)
        elif role == OUTSIDE:
            self._whole_parameters(shape.numbers + shape.outputs * shape.bias)
        self.needs_gradient = True

    def _enter(self, read: Affine) -> None:
        """Make the input of columns whole, and add up its gradients."""
        if self.split:
            self._send("forward", "all_gather", read, wide=True)
            self._send("backward", "reduce_scatter", read, wide=True)
        elif self.needs_gradient:
            self._send("backward", "all_reduce", read, wide=True)

    def _whole_parameters(self, numbers: int) -> None:
        if self.split:
            self.common += numbers

    def _loss(self) -> None:
        """The largest logit; then the sum of exponentials and the target's logit, of every target."""
        size = self.profile.activation_bytes * self._targets()
        self._send("forward", "all_reduce", Affine(0.0, size), Affine(0.0, 2 * size), wide=True)

    def _targets(self) -> float:
        """Targets of a sample: the rows that the last matmul gives classes for."""
        every = [shape for x in self.profile.layers for op in x.ops if (shape := shape_of(op))]
        last = [s for s in every if isinstance(s, MatmulShape | ConvolutionShape)][-1]
        return float(last.rows if isinstance(last, MatmulShape) else last.rows * last.columns)


def _input_and_output(op: ProfiledOp, shape: MatmulShape | ConvolutionShape, profile: Profile) -> tuple[Affine, Affine]:
    """Bytes of a matmul's inputs and outputs."""
    width = profile.activation_bytes
    if isinstance(shape, MatmulShape):
        return (
            Affine(0.0, float(width * shape.rows * shape.inputs)),
            Affine(0.0, float(width * shape.rows * shape.outputs)),
        )
    read = float(width * shape.inputs * shape.rows * shape.columns)
    return Affine(0.0, read), Affine(0.0, max(0.0, op.bytes.per_sample - read))
