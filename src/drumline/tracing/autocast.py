"""GPU behaviour on fake CPU tensors: autocast, dropout, fused attention and recurrent layers.

A trace runs on fake CPU tensors, because a torch without CUDA cannot run the backward of fake CUDA ones. The autocast
lists of a CPU and a GPU differ; the operators that only a GPU computes in fp32 are added while a trace runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..torchkit.libraries import scoped_library

HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16, "fp8": torch.bfloat16}
"""The precisions in which autocast computes matmuls, and its type; `fp8` replaces those of linear layers."""

_FP32_OPERATORS = (
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "logsumexp",
    "cumsum",
    "cumprod",
    "exp",
    "log",
    "log1p",
    "expm1",
    "rsqrt",
    "reciprocal",
    "softplus",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "cosine_similarity",
    "nll_loss",
    "nll_loss_nd",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
    "sum",
    "sum.dim_IntList",
    "prod",
    "norm.Scalar",
    "linalg_vector_norm",
)
"""Operators that CUDA's autocast computes in fp32, and a CPU's in the type of their input."""

_FP32_RESULTS = ("cumsum", "cumprod", "sum", "sum.dim_IntList", "prod")
"""These read half precision as it is and return fp32."""


@contextmanager
def autocast_as_on(device: str, precision: str) -> Iterator[None]:
    """Run the forward and the loss inside: autocast as that kind of device does it."""
    half = HALF_DTYPES.get(precision)
    if half is None:
        yield
    elif device != "cuda":
        with torch.autocast("cpu", dtype=half):
            yield
    else:
        with gpu_autocast_lists(), torch.autocast("cpu", dtype=half):
            yield


@contextmanager
def gpu_autocast_lists() -> Iterator[None]:
    """Make a CPU's autocast use a GPU's lists."""
    with scoped_library("aten", "IMPL", "AutocastCPU") as library:
        for name in _FP32_OPERATORS:
            library.impl(name, _in_fp32(name), allow_override=True)
        library.impl("softmax.int", _softmax("_softmax"), allow_override=True)
        library.impl("log_softmax.int", _softmax("_log_softmax"), allow_override=True)
        library.impl("cross_entropy_loss", _cross_entropy, allow_override=True)
        yield


class _HalfSoftmax(torch.autograd.Function):
    """A softmax whose kernel reads half precision and writes fp32, and whose gradient is in half precision.

    The fake kernel supports fp16 only, so bf16 is viewed as fp16.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
        ctx.dim, ctx.name, ctx.dtype = dim, name, x.dtype
        out: torch.Tensor = getattr(torch.ops.aten, name)(x.view(torch.float16), dim, True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (out,) = ctx.saved_tensors
        backward = getattr(torch.ops.aten, f"{ctx.name}_backward_data")
        return backward(gradient, out, ctx.dim, torch.float16).view(ctx.dtype), None, None


def _softmax(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.aten, name)

    def run(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with torch.autocast("cpu", enabled=False):
            if x.dtype in HALF_DTYPES.values() and dtype in (None, torch.float32):
                return _HalfSoftmax.apply(x.contiguous(), dim, name)  # type: ignore[no-untyped-call]  # torch's own
            return operator(x if dtype is None else x.to(dtype), dim, False)

    return run


# torch makes a name of an operator in Python when it is first read, which would count as calls of the model
_CROSS_ENTROPY, _NLL_LOSS = torch.ops.aten.cross_entropy_loss, torch.ops.aten.nll_loss_nd


def _cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross entropy as a log-softmax and a selection: as one operator its logits would be cast first."""
    with torch.autocast("cpu", enabled=False):
        if x.dtype not in HALF_DTYPES.values() or target.is_floating_point() or label_smoothing:
            return _CROSS_ENTROPY(_to_fp32(x), _to_fp32(target), weight, reduction, ignore_index, label_smoothing)
        dim = 0 if x.dim() == 1 else 1
        logs = _HalfSoftmax.apply(x.contiguous(), dim, "_log_softmax")  # type: ignore[no-untyped-call]  # torch's own
        return _NLL_LOSS(logs, target, weight, reduction, ignore_index)


def _in_fp32(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            half = any(isinstance(a, torch.Tensor) and a.dtype in HALF_DTYPES.values() for a in args)
            if half and name in _FP32_RESULTS and kwargs.get("dtype") is None:
                return operator(*args, **{**kwargs, "dtype": torch.float32})
            return operator(*map(_to_fp32, args), **{k: _to_fp32(v) for k, v in kwargs.items()})

    return run


def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES.values():
        return value.float()
    return value


class GpuOperatorMode(TorchFunctionMode):
    """Dropout keeps a mask of one byte per value, and attention with dropout is fused."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False))
            rest = args[5:]
            if named.get("dropout_p", kwargs.get("dropout_p", 0.0)) and not rest:
                return func(**{**named, **kwargs, "dropout_p": 0.0})
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
