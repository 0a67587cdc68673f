"""The sizes of traced operators that ranks can share them by, for `Op.dims`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..models.shapes import Attention, Convolution, Norm, Product, Table, dims

Weight = Callable[[torch.Tensor], bool]
"""Whether a tensor is one of the model's own."""


def dims_of(name: str, kind: str, args: Any, kwargs: Any, samples: int, weight: Weight) -> tuple[int, ...]:
    """The sizes of a call in a forward over so many samples; nothing where it has none that are known."""
    if kind == "matmul":
        return _product(name, args, samples, weight)
    if kind == "attention":
        return _attention(args, kwargs)
    if name == "embedding" and weight(args[0]):
        rows, width = args[0].shape
        return dims(Table(rows, width, args[1].numel() // samples if args[1].numel() % samples == 0 else 0))
    if name in ("native_layer_norm", "_fused_rms_norm"):
        scales = [a for a in args[2:4] if isinstance(a, torch.Tensor)]
        return dims(Norm(math.prod(args[1]), len(scales)))
    if kind == "conv" and args[0].dim() == 4 and weight(args[1]):
        return _convolution(args)
    return ()


def _product(name: str, args: Any, samples: int, weight: Weight) -> tuple[int, ...]:
    if name not in ("mm", "addmm"):
        return ()
    x, w = args[-2:] if name == "mm" else args[1:3]
    if not weight(w) or x.shape[0] % samples:
        return ()
    return dims(Product(x.shape[0] // samples, w.shape[0], w.shape[1], int(name == "addmm")))


def _attention(args: Any, kwargs: Any) -> tuple[int, ...]:
    q, k = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4][:2]
    causal = any(a is True for a in args) or bool(kwargs.get("is_causal", False))
    return dims(Attention(q.shape[2], q.shape[1], k.shape[1], q.shape[3], int(causal)))


def _convolution(args: Any) -> tuple[int, ...]:
    x, w, bias, stride, _, _, transposed, _, groups = args
    outputs = w.shape[1] * groups if transposed else w.shape[0]
    return dims(
        Convolution(
            x.shape[1],
            outputs,
            x.shape[2],
            x.shape[3],
            w.shape[2],
            w.shape[3],
            stride[0],
            stride[-1],
            groups,
            int(bias is not None),
        )
    )
