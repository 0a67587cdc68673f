"""Modules whose operators depend on values cannot be traced. They are left out, and what stands around them is traced.

Hooks at the module boundaries tell which module asked for a value. That module alone is then built for real and run on
a few made-up samples, which shows what it gives; in the trace a stand-in gives the same shapes, and takes part in the
backward, so that its parameters, its inputs and its outputs are counted, and its operators are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..core.errors import TraceError
from .fake import UNTRACEABLE
from .running import with_values

Seen = TypeVar("Seen")
MOST = 8
"""Modules that are left out before a model is given up."""


def seen_around(model: nn.Module, samples: int, record: Callable[[], Seen], notes: list[str]) -> Seen:
    """What `record` gives, a trace of that many samples; modules that ask for values are left out, and noted."""
    for name in [n for n, m in model.named_modules() if isinstance(m.forward, _StandIn)]:
        del model.get_submodule(name).forward  # of a trace of another size
    out: list[str] = []
    while True:
        with _boundaries(model) as running:
            try:
                found = record()
                break
            except TraceError as e:
                if not isinstance(e.__cause__, UNTRACEABLE) or not any(running) or len(out) == MOST:
                    raise
                name = running[-1]
        out.append(_leave_out(model, name, samples))
    notes += out
    return found


@contextmanager
def _boundaries(model: nn.Module) -> Iterator[list[str]]:
    """Inside: the modules that are running, outermost first. After an error, those in which it came up."""
    running: list[str] = []
    hooks = []
    for name, module in model.named_modules():

        def enter(_: nn.Module, __: Any, name: str = name) -> None:
            running.append(name)

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            running.pop()  # not called after an error

        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _leave_out(model: nn.Module, name: str, samples: int) -> str:
    """Put a stand-in before a module's forward, for a trace of that many samples; what to say of it."""
    module = model.get_submodule(name)
    module.forward = _StandIn(module, samples)
    return (
        f"{name} ({type(module).__name__}) decides by values and was not seen: its parameters, inputs and outputs are "
        "counted, its operators and what they keep are not"
    )


class _StandIn:
    """Gives what a module gives, without values."""

    def __init__(self, module: nn.Module, samples: int) -> None:
        self._module, self._samples = module, samples
        self._plain: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, _ = tree_flatten((args, kwargs))
        inputs = [t for t in given if isinstance(t, torch.Tensor)]
        two, three = self._tried(args, kwargs, 2), self._tried(args, kwargs, 3)
        leaves, spec = tree_flatten(two)
        more, _ = tree_flatten(three)
        made = [self._grown(a, b) for a, b in zip(leaves, more, strict=True)]
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        wide = [i for i, t in enumerate(made) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        results = _Unseen.apply([made[i] for i in wide], *inputs, *parameters)  # type: ignore[no-untyped-call]  # torch's
        for i, result in zip(wide, results, strict=True):
            made[i] = result
        return tree_unflatten(made, spec)

    def _tried(self, args: Any, kwargs: Any, n: int) -> Any:
        """What the module gives for n made-up samples."""
        shapes = tree_map(lambda v: _Shape(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        with with_values(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            real, own = _real(self._module), self._real_inputs(shapes, n)
            return type(self._module).forward(real, *own[0], **own[1])

    def _real_inputs(self, shapes: Any, n: int) -> Any:
        def make(v: Any) -> Any:
            if not isinstance(v, _Shape):
                return v
            shape = [d // self._samples * n if d % self._samples == 0 else d for d in v.shape]
            return torch.randn(shape, dtype=v.dtype) if v.dtype.is_floating_point else torch.zeros(shape, dtype=v.dtype)

        return tree_map(make, shapes)

    def _grown(self, two: Any, three: Any) -> Any:
        if not isinstance(two, torch.Tensor):
            return two
        pairs = zip(two.shape, three.shape, strict=True)
        shape = [a if a == b else a + (b - a) * (self._samples - 2) for a, b in pairs]
        return torch.empty(shape, dtype=two.dtype)


class _Shape:
    """A tensor's shape and type: a leaf, where a tensor would be one of a mode."""

    def __init__(self, t: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(t.shape), t.dtype


def _real(module: nn.Module) -> nn.Module:
    """A copy of a module, with memory, and small numbers in it."""
    held = {id(t): _made(t) for t in (*module.parameters(), *module.buffers())}
    real = copy.deepcopy(module, held)
    for inner in real.modules():  # nobody watches it
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    return real


def _made(t: torch.Tensor) -> torch.Tensor:
    wide = t.dtype.is_floating_point
    value = torch.randn(tuple(t.shape), dtype=t.dtype) * 0.02 if wide else torch.zeros(tuple(t.shape), dtype=t.dtype)
    return nn.Parameter(value, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else value


class _Unseen(torch.autograd.Function):
    """From inputs and parameters to outputs, by nothing."""

    @staticmethod
    def forward(ctx: Any, made: list[torch.Tensor], *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*given)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(t) if needed else None for t, needed in wanted)
