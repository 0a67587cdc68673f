"""A single number that a model draws decides something, such as whether a layer is left out of a step.

Tensors without values have no such number. It is taken to be the middle of what could be drawn, so that layers are
counted which are dropped now and then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class MiddleDraws(TorchFunctionMode):
    """While it is entered, `torch.rand` of one number gives one half, which fake tensors remember."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.rand:
            given = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if math.prod(given) == 1:
                number = torch.tensor([0.5], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
                return number.view(tuple(given))
        return func(*args, **kwargs)
