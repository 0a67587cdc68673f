"""Modules whose operators depend on values: skipped, so that the rest of the model is traced.

Hooks at module boundaries show which module asked for a value. That module alone is built with real tensors and run on
a few random samples, which shows its output shapes. In the trace a stand-in returns the same shapes and takes part in
the backward. So the module's parameters, inputs and outputs are counted, and its operators are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.errors import TraceError
from ..torchkit.fake_tensors import VALUE_REQUESTS, with_real_tensors
from ..torchkit.modules import clear_forward_hooks
from ..torchkit.pytree import tree_flatten, tree_map, tree_unflatten

Result = TypeVar("Result")
MAX_SKIPPED = 8
"""Modules to skip before the trace is given up."""


def record_with_stand_ins(model: nn.Module, samples: int, record: Callable[[], Result], notes: list[str]) -> Result:
    """The result of `record`, a trace of that many samples. Modules that ask for values are skipped and noted."""
    for name in [n for n, m in model.named_modules() if isinstance(m.forward, _StandIn)]:
        del model.get_submodule(name).forward  # left by a trace of another size
    skipped: list[str] = []
    while True:
        with _boundaries(model) as running:
            try:
                result = record()
                break
            except TraceError as e:
                if not isinstance(e.__cause__, VALUE_REQUESTS) or not any(running) or len(skipped) == MAX_SKIPPED:
                    raise
                name = running[-1]
        skipped.append(_skip(model, name, samples))
    notes += skipped
    return result


@contextmanager
def _boundaries(model: nn.Module) -> Iterator[list[str]]:
    """Inside: the running modules, outermost first. After an error, those in which it occurred."""
    running: list[str] = []
    hooks = []
    for name, module in model.named_modules():

        def enter(_: nn.Module, __: Any, name: str = name) -> None:
            running.append(name)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            running.pop()  # not called after an error, so the stack stays

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _skip(model: nn.Module, name: str, samples: int) -> str:
    """Replace a module's forward by a stand-in, for a trace of `samples` samples; returns a note for the report."""
    module = model.get_submodule(name)
    module.forward = _StandIn(module, samples)
    return (
        f"{name} ({type(module).__name__}) depends on values and was not traced: its parameters, inputs and outputs "
        "are counted, its operators and their saved tensors are not"
    )


class _StandIn:
    """Returns a module's outputs, without values."""

    def __init__(self, module: nn.Module, samples: int) -> None:
        self._module, self._samples = module, samples
        self._plain: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments, _ = tree_flatten((args, kwargs))
        inputs = [t for t in arguments if isinstance(t, torch.Tensor)]
        two, three = self._run_real(args, kwargs, 2), self._run_real(args, kwargs, 3)
        leaves, spec = tree_flatten(two)
        more, _ = tree_flatten(three)
        made = [self._scaled(a, b) for a, b in zip(leaves, more, strict=True)]
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        wide = [i for i, t in enumerate(made) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        results = _Untraced.apply([made[i] for i in wide], *inputs, *parameters)  # type: ignore[no-untyped-call]  # torch's
        for i, result in zip(wide, results, strict=True):
            made[i] = result
        return tree_unflatten(made, spec)

    def _run_real(self, args: Any, kwargs: Any, n: int) -> Any:
        """The module's output for n random samples."""
        shapes = tree_map(lambda v: _Shape(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        with with_real_tensors(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            real, inputs = _real(self._module), self._real_inputs(shapes, n)
            return type(self._module).forward(real, *inputs[0], **inputs[1])

    def _real_inputs(self, shapes: Any, n: int) -> Any:
        def make(v: Any) -> Any:
            if not isinstance(v, _Shape):
                return v
            shape = [d // self._samples * n if d % self._samples == 0 else d for d in v.shape]
            return torch.randn(shape, dtype=v.dtype) if v.dtype.is_floating_point else torch.zeros(shape, dtype=v.dtype)

        return tree_map(make, shapes)

    def _scaled(self, two: Any, three: Any) -> Any:
        if not isinstance(two, torch.Tensor):
            return two
        pairs = zip(two.shape, three.shape, strict=True)
        shape = [a if a == b else a + (b - a) * (self._samples - 2) for a, b in pairs]
        return torch.empty(shape, dtype=two.dtype)


class _Shape:
    """A tensor's shape and type, as a leaf that no mode handles."""

    def __init__(self, t: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(t.shape), t.dtype


def _real(module: nn.Module) -> nn.Module:
    """A real copy of a module, with small random parameters."""
    copies = {id(t): _made(t) for t in (*module.parameters(), *module.buffers())}
    real = copy.deepcopy(module, copies)
    for inner in real.modules():  # without the hooks of the trace
        clear_forward_hooks(inner)
    return real


def _made(t: torch.Tensor) -> torch.Tensor:
    wide = t.dtype.is_floating_point
    value = torch.randn(tuple(t.shape), dtype=t.dtype) * 0.02 if wide else torch.zeros(tuple(t.shape), dtype=t.dtype)
    return nn.Parameter(value, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else value


class _Untraced(torch.autograd.Function):
    """Connects inputs and parameters to outputs without computing anything."""

    @staticmethod
    def forward(ctx: Any, made: list[torch.Tensor], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*given)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(t) if needed else None for t, needed in wanted)
