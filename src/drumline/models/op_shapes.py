"""Sizes by which ranks can split an operator: the meaning of `ProfiledOp.dims`, by kind of operator.

A trace and the zoo write them with `dims`; prices of plans that split the model read them with `shape_of`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from .profile import ProfiledOp


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """Rows times a weight matrix."""

    rows: int
    """Tokens of one sample."""
    inputs: int
    outputs: int
    bias: int
    """1 if a bias is added."""

    @property
    def numbers(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Fused attention."""

    tokens: int
    heads: int
    kv_heads: int
    """Heads of keys and values."""
    width: int
    """Width of a head."""
    causal: int
    """1 if only unmasked pairs are counted under a causal mask."""


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    """Rows looked up in an embedding table."""

    rows: int
    width: int
    tokens: int
    """Tokens of one sample; 0 if all samples look up the same rows."""


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm over the features of each token."""

    width: int
    tensors: int
    """Number of parameters: a scale, and perhaps a shift."""


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A convolution of images."""

    inputs: int
    """Channels."""
    outputs: int
    rows: int
    """Rows of the input image."""
    columns: int
    kernel_rows: int
    kernel_columns: int
    stride_rows: int
    stride_columns: int
    groups: int
    bias: int

    @property
    def numbers(self) -> int:
        """Elements of the weight."""
        return self.inputs * self.outputs * self.kernel_rows * self.kernel_columns // self.groups


OpShape = MatmulShape | AttentionShape | EmbeddingShape | NormShape | ConvolutionShape

_KINDS: dict[str, type[OpShape]] = {
    "matmul": MatmulShape,
    "attention": AttentionShape,
    "gather": EmbeddingShape,
    "norm": NormShape,
    "conv": ConvolutionShape,
}


def dims(shape: OpShape) -> tuple[int, ...]:
    """The form in a profile."""
    return astuple(shape)


def shape_of(op: ProfiledOp) -> OpShape | None:
    """The sizes of an operator, or None."""
    return _KINDS[op.kind](*op.dims) if op.dims else None
