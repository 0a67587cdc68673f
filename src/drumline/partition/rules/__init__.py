"""Sharding rules of operators, one file per family. Importing this package registers them all."""

from . import (
    attention,
    common,
    convolution,
    embedding,
    loss,
    matmul,
    norm,
    pointwise,
    pool,
    reduction,
    shape,
    spatial,
)

__all__ = [
    "attention",
    "common",
    "convolution",
    "embedding",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "pool",
    "reduction",
    "shape",
    "spatial",
]
