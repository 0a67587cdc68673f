"""Kind and cost of an operator: operations, bytes, depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ..torchkit.schemas import argument_names

_NAMES: dict[str, str] = {}
for _kind, _words in {
    "matmul": "mm addmm bmm baddbmm addbmm mv addmv dot vdot linear matmul _scaled_mm _grouped_mm",
    "conv": "convolution _convolution mkldnn_convolution cudnn_convolution conv_transpose2d",
    "conv_backward": "convolution_backward",
    "recurrent": "mkldnn_rnn_layer _cudnn_rnn",
    "recurrent_backward": "mkldnn_rnn_layer_backward _cudnn_rnn_backward",
    "special": "exp exp_ gelu gelu_backward tanh tanh_ tanh_backward sigmoid sigmoid_ sigmoid_backward silu silu_ "
    "silu_backward log log_ log1p expm1 erf erf_ pow sin cos softplus softplus_backward mish mish_backward elu "
    "elu_backward log_sigmoid_forward log_sigmoid_backward logit atan atan2 native_dropout bernoulli_ rsqrt "
    "binary_cross_entropy binary_cross_entropy_with_logits binary_cross_entropy_backward",
    "norm": "native_layer_norm native_group_norm _fused_rms_norm",
    "norm_backward": "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward",
    "batch_norm": "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "_batch_norm_with_update cudnn_batch_norm",
    "batch_norm_backward": "native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward",
    "softmax": "_softmax _log_softmax _safe_softmax logsumexp",
    "softmax_backward": "_softmax_backward_data _log_softmax_backward_data",
    "reduce": "sum mean amax amin max min argmax argmin prod var var_mean std norm linalg_vector_norm cumsum "
    "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss topk sort any all",
    "pool": "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d max_pool3d_with_indices",
    "pool_backward": "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward "
    "max_pool3d_with_indices_backward",
    "gather_backward": "embedding_dense_backward",
    "cat": "cat stack",
    "gather": "embedding index index_put index_put_ _unsafe_index _unsafe_index_put "
    "index_select index_add index_add_ gather gather_backward scatter scatter_ scatter_add scatter_add_ masked_select "
    "nonzero _embedding_bag upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d "
    "upsample_bilinear2d_backward grid_sampler_2d grid_sampler_2d_backward",
}.items():
    _NAMES.update(dict.fromkeys(_words.split(), _kind))


_SPARSE_READS = {
    "embedding": 0,
    "nll_loss_forward": 0,
    "nll_loss_backward": 1,
    "nll_loss2d_forward": 0,
    "nll_loss2d_backward": 1,
    "index": 0,
    "index_select": 0,
    "gather": 0,
}
"""Operators that read a few values of one argument -> the position of that argument."""


def kind_of(name: str) -> str:
    """The kind of an operator by its name; unknown ones are elementwise."""
    if "scaled_dot_product" in name or "attention" in name:
        return "attention_backward" if "backward" in name else "attention"
    return _NAMES.get(name, "pointwise")


def kind_of_call(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
    """The kind of one call; casts, changes of memory order and expanded inputs are kinds of their own."""
    kind = kind_of(name)
    if kind not in ("pointwise", "special"):
        return kind
    largest = max((t.numel() for t in outputs), default=0)
    whole = [t for t in [*inputs, *outputs] if t.numel() == largest and t.dim() > 1 and not _is_expanded(t)]
    if len({_last_dim(t) for t in whole}) > 1:
        return "transpose"
    if len({_order(t) for t in whole if t.shape == whole[0].shape}) > 1:
        return "strided"
    read = [t.element_size() for t in inputs if t.is_floating_point() and t.numel() == largest]
    written = [t.element_size() for t in outputs if t.is_floating_point() and t.numel() == largest]
    if kind == "pointwise" and read and written and min(read) != max(written):
        return "widen" if min(read) < max(written) else "narrow"
    if kind == "pointwise" and any(_is_expanded(t) or 1 < t.numel() < largest for t in inputs):
        return "broadcast"
    return kind


def _is_expanded(t: torch.Tensor) -> bool:
    """Whether several of its places are one value in memory."""
    return any(n > 1 and stride == 0 for n, stride in zip(t.shape, t.stride(), strict=True))


def copied_first(kind: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs that an operator copies first: norms need contiguous rows."""
    if kind not in ("norm", "norm_backward"):
        return []
    largest = max(t.numel() for t in inputs)
    return [t for t in inputs if t.numel() == largest and not t.is_contiguous()]


def sparsely_read(name: str, args: Any) -> torch.Tensor | None:
    """The argument of which an operator reads no more values than it writes, or None."""
    place = _SPARSE_READS.get(name)
    argument = args[place] if place is not None and place < len(args) else None
    return argument if isinstance(argument, torch.Tensor) else None


def _order(t: torch.Tensor) -> tuple[int, ...]:
    """Its dims in memory order, outermost first."""
    return tuple(sorted((d for d in range(t.dim()) if t.shape[d] > 1), key=lambda d: -t.stride()[d]))


def _last_dim(t: torch.Tensor) -> int:
    """The dim that is contiguous in memory."""
    return min((d for d in range(t.dim()) if t.shape[d] > 1), key=lambda d: t.stride()[d], default=0)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | torch.Size):
        return [t for v in value for t in tensors(v)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return [t for key in value.__dataclass_fields__ for t in tensors(getattr(value, key, None))]
    return []


def size_of(t: torch.Tensor) -> float:
    """Bytes of a tensor's values; an expanded tensor counts what is stored."""
    stored = math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride != 0)
    return float(stored * t.element_size())


def flops_of(func: Any, kind: str, args: Any, kwargs: Any, out: Any) -> float:
    """Operations of one call: torch's count where it has one, else one per value read or written."""
    if kind in ("attention", "attention_backward"):
        return _attention_flops(func, kind, args, kwargs)
    if kind in ("recurrent", "recurrent_backward"):
        return _recurrent_flops(kind, args)
    if func.overloadpacket.__name__ == "convolution_backward":
        return _convolution_flops(args)
    counter = flop_registry.get(func.overloadpacket)
    if counter is not None:
        return float(counter(*args, **kwargs, out_val=out))
    outputs = sum(t.numel() for t in tensors(out))
    if kind.startswith(("reduce", "norm", "softmax", "batch_norm", "pool")):
        return float(max(t.numel() for t in [*tensors(out), *tensors((args, kwargs))]))
    return float(outputs)


def depth_of(kind: str, args: Any, out: Any) -> float:
    """The longest chain of dependent unit operations inside one call; reductions are trees."""
    inputs = [t for t in tensors(args) if t.dim() > 0]
    results = tensors(out)
    if not inputs or not results:
        return 1.0
    if kind == "matmul":
        # the inner dim: values of both factors over those of the result
        a, b = inputs[-2:] if len(inputs) >= 2 else (inputs[0], inputs[0])
        inner = math.sqrt(max(1.0, a.numel() * b.numel() / max(1, results[0].numel()) / (_batch(a) or 1)))
        return 1.0 + math.ceil(math.log2(max(1.0, inner)))
    if kind in ("conv", "conv_backward") and len(inputs) >= 2:
        weight = inputs[-1] if kind == "conv_backward" else inputs[1]
        return 1.0 + math.ceil(math.log2(max(1, weight.numel() // max(1, weight.shape[0]))))
    if kind.startswith(("norm", "softmax", "batch_norm")):
        return 2.0 + 2 * math.ceil(math.log2(max(2, inputs[0].shape[-1])))
    if kind in ("attention", "attention_backward"):
        s, d = inputs[0].shape[-2:]
        return 4.0 + math.ceil(math.log2(max(2, d))) + 2 * math.ceil(math.log2(max(2, s)))
    if kind in ("recurrent", "recurrent_backward"):
        return _recurrent_depth(kind, inputs)
    if kind in ("reduce", "pool", "pool_backward"):
        ratio = inputs[0].numel() / max(1, results[0].numel())
        return max(1.0, float(math.ceil(math.log2(max(1.0, ratio)))))
    return 1.0


def _attention_flops(func: Any, kind: str, args: Any, kwargs: Any) -> float:
    """Two matmuls forward, five backward; a causal mask halves the work of fused kernels."""
    first = 1 if kind == "attention_backward" else 0  # the gradient of the output comes before them
    q, k, v = [t for t in tensors(args) if t.dim() == 4][first : first + 3]
    products = 2.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
    names = argument_names(func)
    given = dict(zip(names, args, strict=False)) | kwargs  # some kernels have other switches, too
    return products * (2.5 if kind == "attention_backward" else 1.0) / (2.0 if given.get("is_causal") else 1.0)


def _convolution_flops(args: Any) -> float:
    """Of a backward: as many as the forward for each gradient computed. torch's count ignores groups."""
    output, x, weight, _, _, _, _, transposed, _, _, wanted = args
    places = math.prod((x if transposed else output).shape[2:])
    return float(2 * x.shape[0] * places * weight.numel() * sum(wanted[:2]))


def _recurrent_flops(kind: str, args: Any) -> float:
    """Every weight matrix multiplies every vector of the sequence once; twice that in the backward."""
    inputs = tensors(args)
    vectors = inputs[0].numel() / max(1, inputs[0].shape[-1])
    weights = sum(t.numel() for t in inputs[1:5] if t.dim() == 2)
    return 2.0 * vectors * weights * (2.0 if kind == "recurrent_backward" else 1.0)


def _recurrent_depth(kind: str, inputs: list[torch.Tensor]) -> float:
    """Tokens form a chain: at each a matmul with the state, or with the gradients of its gates, and six operations."""
    matrices = [t for t in inputs if t.dim() == 2]
    width = matrices[min(1, len(matrices) - 1)].shape[1] if matrices else inputs[0].shape[-1]
    matmul = 1.0 + math.ceil(math.log2(max(1, 4 * width if kind == "recurrent_backward" else width)))
    return matmul + inputs[0].shape[0] * (matmul + 6)


def _batch(a: torch.Tensor) -> int:
    return a.shape[0] if a.dim() == 3 else 1
