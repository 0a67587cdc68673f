"""Measures the workspace memory of kernels on the local GPU, operator by operator.

A convolution may allocate several times the memory of its tensors, by an algorithm that cuDNN chooses for its shapes.
No formula predicts that. So each distinct call runs once for real, alone, on zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from ...torchkit.fake_tensors import with_real_tensors
from ...torchkit.pytree import tree_map
from ...tracing.op_costs import kind_of, tensors

WITH_WORKSPACE = frozenset(
    {
        "conv",
        "conv_backward",
        "attention",
        "attention_backward",
        "norm",
        "norm_backward",
        "batch_norm",
        "batch_norm_backward",
        "softmax",
        "softmax_backward",
        "reduce",
        "gather",
        "gather_backward",
        "pool",
        "pool_backward",
    }
)
"""Operator kinds that may allocate a workspace; that of matmuls is persistent, and measured by `measure`."""


class KernelWorkspaces:
    """Measures workspaces on a GPU, and caches them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cache: dict[str, int] = {}
        self.refused: dict[str, None] = {}
        """Operators that could not be called this way."""

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Peak bytes that a call allocates beyond its inputs and outputs."""
        if kind_of(func.overloadpacket.__name__) not in WITH_WORKSPACE:
            return 0
        key = repr((func, tree_map(_signature, (args, kwargs)), torch.get_float32_matmul_precision()))
        if key not in self._cache:
            self._cache[key] = self._measure(func, args, kwargs)
        return self._cache[key]

    def _measure(self, func: Any, args: Any, kwargs: Any) -> int:
        with with_real_tensors(), torch.random.fork_rng(devices=[self._device]), torch.no_grad():
            try:
                given = tree_map(self._real, (args, kwargs))
                self._call(func, *given)  # the first call may load persistent state
                return self._call(func, *given)
            except RuntimeError:  # zeros are invalid values for it, or memory is too small
                self.refused[func.overloadpacket.__name__] = None
                return 0

    def _call(self, func: Any, args: Any, kwargs: Any) -> int:
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        out = func(*args, **kwargs)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        inputs = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        outputs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(out)}
        return max(0, peak - sum(size for address, size in outputs.items() if address not in inputs))

    def _real(self, x: Any) -> Any:
        """A tensor of the same shape with zeros, which are also valid indices."""
        if not isinstance(x, torch.Tensor):
            return x
        if 0 in x.stride():  # an expanded tensor
            return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(0)


def _signature(x: Any) -> Any:
    """The properties that determine the choice of a kernel."""
    return (tuple(x.shape), x.stride(), x.dtype, x.device.type) if isinstance(x, torch.Tensor) else x
