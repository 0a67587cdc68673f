"""The sizes that a kernel's time depends on, for `Op.shape`, and the type that it computes in, for `Op.dtype`.

In the order in which `cost.clouds` reads them:
  matmul: factors of one call, rows, columns, inner dim
  conv, conv_backward: samples, channels in and out of a group, values of the output, of the filter, stride,
    groups, 2 where channels lie last in memory or 1
  attention, attention_backward: heads of all samples, queries, keys, width of a head, 2 if a mask halves the work or 1
  recurrent, recurrent_backward: steps, samples, width in, width of the state
  batch_norm, batch_norm_backward: samples, channels, places
  norm, norm_backward (of layers): rows, width
  reduce, where rows are added up: rows, width
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .kinds import tensors

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def sizes_of(name: str, kind: str, args: Any, kwargs: Any, out: Any) -> tuple[int, ...]:
    """The sizes of one call; nothing where they are not known."""
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
    if name == "sum" and kind == "reduce":
        return rows_of(args[0], args[1] if len(args) > 1 else None)
    return ()


def rows_of(x: torch.Tensor, dims: Any) -> tuple[int, ...]:
    """Rows and width of what is added up over some dims; nothing where it does not lie in memory as rows."""
    if not dims or x.dim() < 2:
        return ()
    kept = set(range(x.dim())) - {d % x.dim() for d in dims}
    if len(kept) != 1:
        return ()
    dim = kept.pop()
    width = x.shape[dim]
    return (x.numel() // width, width) if x.stride(dim) == 1 and width > 1 else ()


def type_of(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    """The type of the largest tensor, if it is half a float."""
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
    if transposed:  # the other way round: what is computed is the gradient of a convolution
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
    """A layer's input is steps x samples x width; its second matrix takes the state, of which each gate has one."""
    found = tensors(args)
    x = found[0]
    matrices = [t for t in found[1:] if t.dim() == 2]
    if x.dim() != 3 or len(matrices) < 2:
        return ()
    return (x.shape[0], x.shape[1], x.shape[2], matrices[1].shape[1])
