"""Sizes of operators: those that set a kernel's time (`shape`, `dtype`), and those to split it by (`dims`).

`ProfiledOp.shape`, in the order in which the kernel cost model reads them:
  matmul: matrices in one call, rows, columns, inner dim
  conv, conv_backward: samples, channels in and out of a group, values of the output, of the filter, stride,
    groups, 2 if channels are last in memory, else 1
  attention, attention_backward: heads of all samples, queries, keys, width of a head, 2 if a mask
    halves the work, else 1
  recurrent, recurrent_backward: steps, samples, width in, width of the state
  batch_norm, batch_norm_backward: samples, channels, positions
  norm, norm_backward (of layers and groups): rows, width
  reduce, where rows are added up: rows, width
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..models.op_shapes import AttentionShape, ConvolutionShape, EmbeddingShape, MatmulShape, NormShape, dims
from .op_costs import tensors

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def sizes_of(name: str, kind: str, args: Any, kwargs: Any, out: Any) -> tuple[int, ...]:
    """The sizes of one call; empty where they are unknown."""
    if kind == "matmul":
        return _product(name, args)
    if kind == "conv":
        return _convolution(args[0], args[1], tensors(out)[0], args[3], args[6], args[8])
    if kind == "conv_backward":
        return _convolution(args[1], args[2], args[0], args[4], args[7], args[9])
    if kind in ("attention", "attention_backward"):
        return _attention(kind, args, kwargs)
    if kind in ("recurrent", "recurrent_backward"):
        return _recurrent(args)
    if kind in ("batch_norm", "batch_norm_backward"):
        x = args[1] if kind == "batch_norm_backward" else args[0]
        return (x.shape[0], x.shape[1], math.prod(x.shape[2:]))
    if name in ("native_layer_norm", "native_layer_norm_backward"):
        x, width = (args[1], args[2]) if name.endswith("backward") else args[:2]
        return (x.numel() // math.prod(width), math.prod(width))
    if name in ("native_group_norm", "native_group_norm_backward"):
        x, groups = (args[1], args[8]) if name.endswith("backward") else (args[0], args[6])
        rows = x.shape[0] * groups
        return (rows, x.numel() // rows)
    if name == "sum" and kind == "reduce":
        return rows_of(args[0], args[1] if len(args) > 1 else None)
    return ()


def rows_of(x: torch.Tensor, dims: Any) -> tuple[int, ...]:
    """Rows and width of a sum over some dims; empty where the tensor is not stored as rows."""
    if not dims or x.dim() < 2:
        return ()
    kept = set(range(x.dim())) - {d % x.dim() for d in dims}
    if len(kept) != 1:
        return ()
    dim = kept.pop()
    width = x.shape[dim]
    return (x.numel() // width, width) if x.stride(dim) == 1 and width > 1 else ()


def type_of(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    """The type of the largest tensor if it is half precision, else empty."""
    largest = max([*inputs, *outputs], key=lambda t: t.numel() if t.is_floating_point() else -1, default=None)
    return "" if largest is None else _TYPES.get(largest.dtype, "")


def _product(name: str, args: Any) -> tuple[int, ...]:
    if name in ("mm", "bmm"):
        a, b = args[:2]
    elif name in ("addmm", "baddbmm"):
        a, b = args[1:3]
    else:
        return ()
    return (a.shape[0] if a.dim() == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1])


def _convolution(x: Any, w: Any, y: Any, stride: Any, transposed: Any, groups: Any) -> tuple[int, ...]:
    if transposed:  # it computes the gradient of a convolution
        x, y = y, x
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return (
        x.shape[0],
        w.shape[1],
        w.shape[0] // groups,
        math.prod(y.shape[2:]),
        math.prod(w.shape[2:]),
        max(stride),
        groups,
        2 if last else 1,
    )


def _attention(kind: str, args: Any, kwargs: Any) -> tuple[int, ...]:
    first = 1 if kind == "attention_backward" else 0  # the gradient of the output comes before them
    q, k, _ = [t for t in tensors(args) if t.dim() == 4][first : first + 3]
    causal = any(a is True for a in args) or bool(kwargs.get("is_causal", False))
    return (q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3], 2 if causal else 1)


def _recurrent(args: Any) -> tuple[int, ...]:
    """(steps, samples, input width, state width): the second matrix multiplies the state."""
    inputs = tensors(args)
    x = inputs[0]
    matrices = [t for t in inputs[1:] if t.dim() == 2]
    if x.dim() != 3 or len(matrices) < 2:
        return ()
    return (x.shape[0], x.shape[1], x.shape[2], matrices[1].shape[1])


Weight = Callable[[torch.Tensor], bool]
"""Whether a tensor is a parameter of the model."""


def dims_of(name: str, kind: str, args: Any, kwargs: Any, samples: int, weight: Weight) -> tuple[int, ...]:
    """The sizes of a call in a forward over a number of samples; empty where none are known."""
    if kind == "matmul":
        return _shared_product(name, args, samples, weight)
    if kind == "attention":
        return _shared_attention(args, kwargs)
    if name == "embedding" and weight(args[0]):
        rows, width = args[0].shape
        return dims(EmbeddingShape(rows, width, args[1].numel() // samples if args[1].numel() % samples == 0 else 0))
    if name in ("native_layer_norm", "_fused_rms_norm"):
        scales = [a for a in args[2:4] if isinstance(a, torch.Tensor)]
        return dims(NormShape(math.prod(args[1]), len(scales)))
    if kind == "conv" and args[0].dim() == 4 and weight(args[1]):
        return _shared_convolution(args)
    return ()


def _shared_product(name: str, args: Any, samples: int, weight: Weight) -> tuple[int, ...]:
    if name not in ("mm", "addmm"):
        return ()
    x, w = args[-2:] if name == "mm" else args[1:3]
    if not weight(w) or x.shape[0] % samples:
        return ()
    return dims(MatmulShape(x.shape[0] // samples, w.shape[0], w.shape[1], int(name == "addmm")))


def _shared_attention(args: Any, kwargs: Any) -> tuple[int, ...]:
    q, k = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4][:2]
    causal = any(a is True for a in args) or bool(kwargs.get("is_causal", False))
    return dims(AttentionShape(q.shape[2], q.shape[1], k.shape[1], q.shape[3], int(causal)))


def _shared_convolution(args: Any) -> tuple[int, ...]:
    x, w, bias, stride, _, _, transposed, _, groups = args
    outputs = w.shape[1] * groups if transposed else w.shape[0]
    return dims(
        ConvolutionShape(
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
