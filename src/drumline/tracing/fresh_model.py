"""Calls a job's `model()`, and refuses one that returns the same model twice: the second run would begin trained."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..core.errors import JobError
from ..core.job import Job

_MADE: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Modules with parameters of their own that a job's function has returned, and the identity of the function."""


def fresh_model(job: Job) -> nn.Module:
    """A new model of the job."""
    model: Any = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"the job's model() gave {type(model).__name__}", rule="it returns a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(f"{type(model).__name__} has no parameter to train", rule="at least one with requires_grad")
    maker = id(job.model)
    for name, module in model.named_modules():
        if not any(p is not None for p in module._parameters.values()):
            continue
        if _MADE.get(module) == maker:
            _refuse(model, name, module)
        _MADE[module] = maker
    return model


def _refuse(model: nn.Module, name: str, module: nn.Module) -> None:
    part = f"its part {name!r}, a {type(module).__name__}," if name else f"the {type(model).__name__}"
    raise JobError(
        f"the job's model() returned the same model twice: {part} was returned before",
        rule="model() builds a new model whenever it is called: tracing, every run and `verify`'s reference have their "
        "own, and a model that was trained or moved once is not the initial one",
        fix="build it inside the function; a model that exists already: return copy.deepcopy(it)",
    )
