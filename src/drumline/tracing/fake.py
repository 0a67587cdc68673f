"""The job's model and batches without their memory: built on fake tensors, of any size."""

from __future__ import annotations

import logging
import traceback
import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules import transformer

from ..core.errors import JobError, TraceError
from ..core.job import Job, guard, line_of
from ..datasets.stream import check_dataset, collate
from .grouped import group_in_any_type
from .running import with_values

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise when a program asks for a value."""


def fake_mode() -> FakeTensorMode:
    """Tensors with shapes and types but without values."""
    # what goes wrong is raised, and told in one message; the logger would add a traceback
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    _ask_no_masks()
    group_in_any_type()
    return FakeTensorMode(allow_non_fake_inputs=True)


def _ask_no_masks() -> None:
    """Let torch's own transformer take a mask as it is, where it has no values.

    It looks whether a mask is the causal one, to choose a faster kernel; the result is the same with the mask itself.
    """
    plain = transformer._detect_is_causal_mask
    if not getattr(plain, "asks_no_masks", False):

        def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
            if isinstance(mask, FakeTensor) or getattr(mask, "is_meta", False):
                return is_causal is True
            return bool(plain(mask, is_causal, size))

        detect.asks_no_masks = True  # type: ignore[attr-defined]  # so that it is done once
        transformer._detect_is_causal_mask = detect


class Never:
    """Nought, as the share of layers that are dropped by chance: nothing that is drawn is below it.

    A number would be compared with a tensor that has no value.
    """

    def __gt__(self, other: object) -> bool:
        return isinstance(other, int | float) and other < 0

    def __lt__(self, other: object) -> bool:
        return isinstance(other, int | float) and other > 0

    def __bool__(self) -> bool:
        return False

    def __float__(self) -> float:
        return 0.0


def fake_model(job: Job, mode: FakeTensorMode) -> tuple[nn.Module, list[str]]:
    """The job's model without its parameters' memory, and what has to be said about it."""
    model, notes = _built(job, mode)
    for module in model.modules():
        share = getattr(module, "layerdrop", None)  # models of transformers draw, whether layers are dropped or not
        if isinstance(share, int | float) and share == 0:
            module.layerdrop = Never()  # type: ignore[assignment]  # it is no module
    return model, notes


def _built(job: Job, mode: FakeTensorMode) -> tuple[nn.Module, list[str]]:
    try:
        with mode, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # to copy a module, as torch's own transformer does with its layers, torch asks where its numbers lie
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return _check_model(job.model()), []
    except (JobError, KeyboardInterrupt):
        raise
    except Exception as first:
        # A constructor may read values (`x.item()`), which fake tensors do not have. Those that know the meta device
        # make what they read on the CPU.
        model = _on_meta(job)
        if model is not None:
            _forget_values(model, mode)
            return model, []
        # The others are built for real, and then what they hold is forgotten.
        with with_values(), torch.random.fork_rng(devices=[]):
            model = _check_model(guard(job.model, "the job's model()"))
        why = (str(first).splitlines() or [""])[0]
        _forget_values(model, mode)
        return model, [f"the model was allocated to be traced, because its constructor reads values ({why})"]


def _on_meta(job: Job) -> nn.Module | None:
    """The model on the meta device, if it can be built there."""
    try:
        with with_values(), torch.device("meta"), torch.random.fork_rng(devices=[]):
            return _check_model(job.model())
    except (JobError, KeyboardInterrupt):
        raise
    except Exception:
        return None


def dtype_of(t: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type that a tensor gets where floating-point numbers get `dtype`; complex ones keep both of their parts."""
    if dtype is None or not (t.is_floating_point() or t.is_complex()):
        return t.dtype
    return dtype.to_complex() if t.is_complex() else dtype


def moved(model: nn.Module, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The model on a device, its floating-point tensors of a type. `model.to` refuses tensors without values."""
    done: dict[int, torch.Tensor] = {}  # tied ones stay tied

    def move(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in done:
            new = t.detach().to(device, dtype_of(t, dtype))
            done[id(t)] = nn.Parameter(new, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else new
        return done[id(t)]

    with mode:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for key, t in table.items():
                    if t is not None:
                        table[key] = move(t)  # type: ignore[assignment]  # a parameter for a parameter
    return model


def fake_batch(job: Job, mode: FakeTensorMode, *, sample: tuple[Any, Any], n: int) -> tuple[Any, Any]:
    """A batch of n samples shaped like the given one, on fake tensors.

    Collating two and three copies shows which dim of each tensor counts samples, whatever the collate function does.
    """
    with with_values():  # to collate may read numbers
        two, three = collate(job, [sample] * 2), collate(job, [sample] * 3)
    return _grow(two[0], three[0], n, mode), _grow(two[1], three[1], n, mode)


def first_sample(job: Job) -> tuple[Any, Any]:
    """The sample that stands for all: the first one."""
    with with_values():
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
                made.setdefault(id(p), nn.Parameter(_forgotten(p.detach(), mode), requires_grad=p.requires_grad))
                module._parameters[name] = made[id(p)]
        for name, b in module._buffers.items():
            if b is not None:
                made.setdefault(id(b), _forgotten(b, mode))
                module._buffers[name] = made[id(b)]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:  # one that is no buffer
                setattr(module, name, made.setdefault(id(value), _forgotten(value, mode)))


def _forgotten(t: torch.Tensor, mode: FakeTensorMode) -> Any:
    """The tensor without values, on the CPU."""
    if not t.is_meta:
        return mode.from_tensor(t)
    with mode:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")


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


def assumed(model: nn.Module) -> list[str]:
    """What a trace takes for granted."""
    mixed = any(type(m).__name__.endswith("Experts") for m in model.modules())
    return ["the mixture of experts is traced at uniform load: every expert gets as many tokens"] if mixed else []


def untraceable(model: nn.Module | str, e: BaseException) -> TraceError:
    """The error for a model, or one of that name, that asks for values while it is traced."""
    name = model if isinstance(model, str) else type(model).__name__
    text = (str(e).strip().splitlines() or [type(e).__name__])[0]
    return TraceError(
        f"{name} cannot be traced: {type(e).__name__}: {text[:200]}",
        where=line_of(e) or _library_line(e),
        rule="its operators may depend on the shapes of its input, not on the values",
        fix="move the decision out of forward, or express it with torch.where",
    )


def _library_line(e: BaseException) -> str:
    """The innermost line of another library than torch that the error passed through: whose model it is."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "site-packages" in f.filename]
    names = [f.filename.rpartition("site-packages")[2].lstrip("/\\") for f in frames]
    found = [(name, f) for name, f in zip(names, frames, strict=True) if not name.startswith(("torch/", "torch\\"))]
    return f"{found[-1][0]}, line {found[-1][1].lineno}: {found[-1][1].line}" if found else ""
