"""What kernels take for themselves while they run, and give back: asked of the GPU that is here, operator by operator.

A convolution may take several times the memory of its tensors, by an algorithm that cuDNN chooses for its shapes. No
formula tells that. So each kind of call is made once for real, alone, on tensors without meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...tracing.kinds import kind_of, tensors
from ...tracing.running import with_values

ASKED = frozenset(
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
"""Kinds of operators that may take memory for themselves; what products take is kept, and known by `measure`."""


class Kernels:
    """Asks a GPU, and remembers what it said."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, int] = {}
        self.refused: dict[str, None] = {}
        """Operators that could not be called so."""

    def takes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes that a call takes at most beside what it is given and what it gives."""
        if kind_of(func._overloadpacket.__name__) not in ASKED:
            return 0
        key = repr((func, tree_map(_said, (args, kwargs)), torch.get_float32_matmul_precision()))
        if key not in self._known:
            self._known[key] = self._ask(func, args, kwargs)
        return self._known[key]

    def _ask(self, func: Any, args: Any, kwargs: Any) -> int:
        with with_values(), torch.random.fork_rng(devices=[self._device]), torch.no_grad():
            try:
                given = tree_map(self._real, (args, kwargs))
                self._call(func, *given)  # the first call may load what stays
                return self._call(func, *given)
            except RuntimeError:  # values that it does not like, or too little memory
                self.refused[func._overloadpacket.__name__] = None
                return 0

    def _call(self, func: Any, args: Any, kwargs: Any) -> int:
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        out = func(*args, **kwargs)
        most = torch.cuda.max_memory_allocated(self._device) - before
        old = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(out)}
        return max(0, most - sum(size for place, size in made.items() if place not in old))

    def _real(self, x: Any) -> Any:
        """A tensor of the same shape with values: zeros, which are also good indices."""
        if not isinstance(x, torch.Tensor):
            return x
        if 0 in x.stride():  # one value, seen many times
            return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(0)


def _said(x: Any) -> Any:
    """What a kernel is chosen by."""
    return (tuple(x.shape), x.stride(), x.dtype, x.device.type) if isinstance(x, torch.Tensor) else x
