"""DDP's own bookkeeping keeps its values in a dry run: which parameters were reached, and what each bucket holds.

Its reducer, in C++, reads both from small int32 tensors of its own. These are made real, and what is done
to real ones alone is done for real; all that a model computes on has no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...tracing.kinds import tensors
from ...tracing.running import with_values

_MAKE = (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default)


class RealIntegers(TorchDispatchMode):
    """Entered inside the mode of a dry run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper would cost time at every operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not types and self._own(func, args, kwargs):
            with with_values():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _own(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in _MAKE:
            return kwargs.get("dtype") is torch.int32
        given = tensors(args)
        return bool(given) and all(t.dtype is torch.int32 for t in given)
