"""The optimizer: its fused kernel where the user has not chosen, and the traffic of its step.

On a CPU, Adam and AdamW step tensor by tensor, operator by operator; their fused kernel reads and writes every value
once, which is several times faster. On a GPU it saves launches and temporaries. The numbers are equal up to rounding.
The engine and the trace both use `prefer_fused`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from ..core.errors import TraceError
from ..core.job import Job, call_user_code
from ..torchkit.dispatch_modes import DispatchMode
from ..torchkit.fake_tensors import FakeTensorMode
from ..torchkit.optimizers import mark_fused
from ..torchkit.schemas import schema_of
from .op_costs import size_of, tensors

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def prefer_fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer use its fused kernel, unless the user has chosen how it steps."""
    if type(optimizer) in _KINDS and all(_may(group) for group in optimizer.param_groups):
        for group in optimizer.param_groups:
            group["fused"] = True
        optimizer.defaults["fused"] = True
        mark_fused(optimizer)
    return optimizer


def _may(group: dict[str, object]) -> bool:
    chosen = any(group.get(key) is not None for key in ("foreach", "fused"))
    other = any(group.get(key) for key in ("capturable", "differentiable"))
    parameters = group["params"]
    assert isinstance(parameters, list)
    plain = all(p.device.type in ("cpu", "cuda") and p.dtype in _TYPES for p in parameters)
    return plain and not chosen and not other


class TrafficCounter(DispatchMode):
    """Counts operators and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("prim", "profiler"):  # an optimizer names its step for the profiler
            return out
        moved = sum(size_of(t) for t in tensors((args, kwargs or {}))) + sum(size_of(t) for t in tensors(out))
        if out is None:  # a fused kernel writes what it was given
            given = zip(args, schema_of(func).arguments, strict=False)
            moved += sum(size_of(t) for a, argument in given if argument.is_write for t in tensors(a))
        self.bytes += moved
        self.calls += 1
        return out


def optimizer_costs(job: Job, model: nn.Module, mode: FakeTensorMode) -> dict[str, Any]:
    """State and traffic of the optimizer per trained parameter, from its second step (the first creates the state).

    Each shape is stepped once and counted as often as it occurs in the model.
    """
    shapes = Counter((p.shape, p.dtype) for p in model.parameters() if p.requires_grad)
    names = {(p.shape, p.dtype): name for name, p in model.named_parameters() if p.requires_grad}
    numbers = sum(shape.numel() * k for (shape, _), k in shapes.items())
    state = moved = calls = 0.0
    with mode:
        for (shape, dtype), k in shapes.items():
            p = nn.Parameter(torch.empty(shape, dtype=dtype))
            p.grad = torch.empty_like(p)
            optimizer = prefer_fused(
                call_user_code(job.optimizer_on, "the job's optimizer()", [(names[shape, dtype], p)])
            )
            try:
                optimizer.step()
                with TrafficCounter() as counter:
                    optimizer.step()
            except Exception as e:
                raise TraceError(
                    f"the optimizer {type(optimizer).__name__} cannot be traced: {type(e).__name__}: {str(e)[:200]}"
                ) from e
            if job.ema is not None:  # one more copy; the update reads it and the weight, and writes it
                state, moved, calls = state + k * size_of(p), moved + 3 * k * size_of(p), calls + k
            state += k * sum(size_of(t) for s in optimizer.state.values() for t in tensors(s) if t.dim() > 0)
            moved, calls = moved + k * counter.bytes, calls + k * counter.calls
    return {
        "optimizer": type(optimizer).__name__,
        "state_per_parameter": state / numbers,
        "optimizer_bytes": moved / numbers,
        "optimizer_ops": calls / shapes.total(),
    }
