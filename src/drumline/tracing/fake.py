"""The job's model and batches on fake tensors, of any size: nothing is allocated."""

from __future__ import annotations

import math
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..core.errors import JobError, TraceError
from ..core.job import Job, call_user_code, user_line
from ..datasets.batch_form import as_pair
from ..datasets.sources import DataSource, open_data
from ..torchkit import fake_tensors
from ..torchkit.fake_tensors import FakeTensorMode, with_real_tensors
from .fresh_model import fresh_model
from .grouped_matmul import patch_grouped_mm


def fake_mode() -> FakeTensorMode:
    """A mode for tensors with shapes and types but without values."""
    fake_tensors.prepare()
    patch_grouped_mm()
    return FakeTensorMode(allow_non_fake_inputs=True)


class NeverDropped:
    """Zero as a layer-drop probability: no draw is below it.

    A plain 0.0 would be compared with a tensor that has no value.
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
    """The job's model on fake tensors, and notes for the report."""
    model, notes = _built(job, mode)
    for module in model.modules():
        share = getattr(module, "layerdrop", None)  # models of transformers draw even if the probability is 0
        if isinstance(share, int | float) and share == 0:
            module.layerdrop = NeverDropped()  # type: ignore[assignment]  # not a module
    return model, notes


def _built(job: Job, mode: FakeTensorMode) -> tuple[nn.Module, list[str]]:
    try:
        with mode, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # to copy a module, as nn.Transformer does with its layers, torch reads data pointers
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            return fresh_model(job), []
    except (JobError, KeyboardInterrupt):
        raise
    except Exception as first:
        # A constructor may read values (`x.item()`), which fake tensors do not have. Code that supports the meta device
        # creates what it reads on the CPU.
        model = _on_meta(job)
        if model is not None:
            _drop_values(model, mode)
            return model, []
        # Other models are allocated, and then their values are dropped.
        with with_real_tensors(), torch.random.fork_rng(devices=[]):
            model = call_user_code(lambda: fresh_model(job), "the job's model()")
        why = (str(first).splitlines() or [""])[0]
        _drop_values(model, mode)
        return model, [f"the model was allocated to be traced, because its constructor reads values ({why})"]


def _on_meta(job: Job) -> nn.Module | None:
    """The model on the meta device, or None if it cannot be built there."""
    try:
        with with_real_tensors(), torch.device("meta"), torch.random.fork_rng(devices=[]):
            return fresh_model(job)
    except (JobError, KeyboardInterrupt):
        raise
    except Exception:
        return None


def dtype_of(t: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type of a tensor after a cast of floating-point numbers to `dtype`; complex numbers keep both parts."""
    if dtype is None or not (t.is_floating_point() or t.is_complex()):
        return t.dtype
    return dtype.to_complex() if t.is_complex() else dtype


def with_half_parameters(model: nn.Module, keep: tuple[type[nn.Module], ...] = ()) -> nn.Module:
    """The model with its float32 parameters in bf16, except those of the modules to `keep`; tied ones stay tied."""
    kept = {id(p) for module in model.modules() if isinstance(module, keep) for p in module.parameters(recurse=False)}
    for p in model.parameters():
        if p.dtype is torch.float32 and id(p) not in kept:
            p.data = p.data.to(torch.bfloat16)
    return model


def move_model(model: nn.Module, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Move a model of fake tensors to a device and a type; `model.to` refuses tensors without values."""
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


@dataclass(frozen=True, slots=True, eq=False)
class SampleForm:
    """A sample of a job's data, and the source that collates it."""

    value: Any
    source: DataSource

    def batch(self, n: int) -> tuple[Any, Any]:
        """(input, target) of n copies."""
        return as_pair(self.source.collate([self.value] * n))


def fake_batch(mode: FakeTensorMode, *, sample: SampleForm, n: int) -> tuple[Any, Any]:
    """A fake batch of n samples shaped like the given one.

    Collating two and three copies shows which dim of each tensor counts samples, whatever the collate function does.
    """
    with with_real_tensors():  # a collate function may read numbers
        two, three = sample.batch(2), sample.batch(3)
    return _grow(two[0], three[0], n, mode), _grow(two[1], three[1], n, mode)


def first_sample(job: Job) -> SampleForm:
    """The first sample of the job's data; refused before the model is built if it cannot be collated."""
    with with_real_tensors():
        source = open_data(job)
        sample = SampleForm(source.first_sample(), source)
        sample.batch(2)
        return sample


def call_model(model: Any, value: Any) -> Any:
    """Call a model with one batch of inputs: a tensor, a tuple (unpacked) or a mapping (by name)."""
    if isinstance(value, dict):
        return model(**value)
    if isinstance(value, tuple | list):
        return model(*value)
    return model(value)


def _drop_values(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace all parameters and buffers by fake tensors; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made.setdefault(id(p), nn.Parameter(_fake_copy(p.detach(), mode), requires_grad=p.requires_grad))
                module._parameters[name] = made[id(p)]
        for name, b in module._buffers.items():
            if b is not None:
                made.setdefault(id(b), _fake_copy(b, mode))
                module._buffers[name] = made[id(b)]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:  # a tensor that is not a buffer
                setattr(module, name, made.setdefault(id(value), _fake_copy(value, mode)))


def _fake_copy(t: torch.Tensor, mode: FakeTensorMode) -> Any:
    """A fake copy of a tensor, on the CPU."""
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


def trace_assumptions(model: nn.Module) -> list[str]:
    """Assumptions of a trace, as notes for the report."""
    mixed = any(type(m).__name__.endswith("Experts") for m in model.modules())
    return ["the mixture of experts is traced at uniform load: every expert gets as many tokens"] if mixed else []


def untraceable_error(model: nn.Module | str, e: BaseException) -> TraceError:
    """The error for a model (or the name of one) whose operators depend on values."""
    name = model if isinstance(model, str) else type(model).__name__
    text = (str(e).strip().splitlines() or [type(e).__name__])[0]
    return TraceError(
        f"{name} cannot be traced: {type(e).__name__}: {text[:200]}",
        where=user_line(e) or _library_line(e),
        rule="its operators may depend on the shapes of its input, not on the values",
        fix="move the decision out of forward, or express it with torch.where",
    )


def _library_line(e: BaseException) -> str:
    """The innermost line, outside torch, of the library that the model comes from."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "site-packages" in f.filename]
    names = [f.filename.rpartition("site-packages")[2].lstrip("/\\") for f in frames]
    lines = [(name, f) for name, f in zip(names, frames, strict=True) if not name.startswith(("torch/", "torch\\"))]
    return f"{lines[-1][0]}, line {lines[-1][1].lineno}: {lines[-1][1].line}" if lines else ""


class MedianDraws(TorchFunctionMode):
    """Makes `torch.rand` of one number return one half, which fake tensors remember."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.rand:
            given = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if math.prod(given) == 1:
                number = torch.tensor([0.5], dtype=kwargs.get("dtype"), device=kwargs.get("device"))
                return number.view(tuple(given))
        return func(*args, **kwargs)
