"""The job's model and batches without their memory: built on fake tensors, of any size."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from ..data.stream import check_dataset, collate
from ..errors import JobError, TraceError
from ..job import Job, guard, line_of

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when a program asks for a value."""


def fake_mode() -> FakeTensorMode:
    """Tensors with shapes and types but without values."""
    # what goes wrong is raised, and told in one message; the logger would add a traceback
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_model(job: Job, mode: FakeTensorMode) -> tuple[nn.Module, list[str]]:
    """The job's model without its parameters' memory, and what has to be said about it."""
    try:
        with mode, torch.random.fork_rng(devices=[]):
            return _check_model(job.model()), []
    except (JobError, KeyboardInterrupt):
        raise
    except Exception as first:
        # A constructor may read values (`x.item()`), which fake tensors do not have: build it for real, then forget.
        with torch.random.fork_rng(devices=[]):
            model = _check_model(guard(job.model, "the job's model()"))
        why = (str(first).splitlines() or [""])[0]
        _forget_values(model, mode)
        return model, [f"the model was allocated to be traced, because its constructor reads values ({why})"]


def fake_batch(job: Job, mode: FakeTensorMode, *, sample: tuple[Any, Any], n: int) -> tuple[Any, Any]:
    """A batch of n samples shaped like the given one, on fake tensors.

    Collating two and three copies shows which dim of each tensor counts samples, whatever the collate function does.
    """
    two, three = collate(job, [sample] * 2), collate(job, [sample] * 3)
    return _grow(two[0], three[0], n, mode), _grow(two[1], three[1], n, mode)


def first_sample(job: Job) -> tuple[Any, Any]:
    """The sample that stands for all: the first one."""
    dataset = check_dataset(guard(job.data, "the job's data()"))
    return guard(dataset.__getitem__, "sample 0 of the dataset", 0)  # type: ignore[no-any-return]  # the user's


def call(model: Any, value: Any) -> Any:
    """Call a model with one batch of inputs: a tensor as it is, a tuple spread out, a mapping by name."""
    if isinstance(value, dict):
        return model(**value)
    if isinstance(value, tuple | list):
        return model(*value)
    return model(value)


def _check_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise JobError(f"the job's model() gave {type(model).__name__}", rule="it returns a torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise JobError(f"{type(model).__name__} has no parameter to train", rule="at least one with requires_grad")
    return model


def _forget_values(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put fake tensors in the place of all parameters and buffers; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made.setdefault(id(p), nn.Parameter(mode.from_tensor(p.detach()), requires_grad=p.requires_grad))
                module._parameters[name] = made[id(p)]
        for name, b in module._buffers.items():
            if b is not None:
                made.setdefault(id(b), mode.from_tensor(b))
                module._buffers[name] = made[id(b)]


def _grow(two: Any, three: Any, n: int, mode: FakeTensorMode) -> Any:
    if isinstance(two, torch.Tensor):
        shape = [n if a != b else a for a, b in zip(two.shape, three.shape, strict=True)]
        if two.dim() and all(a == b for a, b in zip(two.shape, three.shape, strict=True)):
            shape = list(two.shape)
        with mode:
            return torch.empty(shape, dtype=two.dtype)
    if isinstance(two, dict):
        return {k: _grow(two[k], three[k], n, mode) for k in two}
    if isinstance(two, tuple | list):
        if len(two) != len(three):  # a list with one item per sample
            return [_grow(two[0], two[0], n, mode) for _ in range(n)]
        return type(two)(_grow(a, b, n, mode) for a, b in zip(two, three, strict=True))
    return two


def untraceable(model: nn.Module, e: BaseException) -> TraceError:
    """The error for a model that asks for values while it is traced."""
    text = (str(e).strip().splitlines() or [type(e).__name__])[0]
    return TraceError(
        f"{type(model).__name__} cannot be traced: {type(e).__name__}: {text[:200]}",
        where=line_of(e),
        rule="its operators may depend on the shapes of its input, not on the values",
        fix="move the decision out of forward, or express it with torch.where",
    )
