"""What an operator does where its tensors are split: a file for each family. Importing this registers them all."""

from . import (
    attention,
    convolution,
    embedding,
    local,
    loss,
    matmul,
    moved,
    norm,
    pointwise,
    pool,
    reduction,
    shape,
    spatial,
)

__all__ = [
    "attention",
    "convolution",
    "embedding",
    "local",
    "loss",
    "matmul",
    "moved",
    "norm",
    "pointwise",
    "pool",
    "reduction",
    "shape",
    "spatial",
]
