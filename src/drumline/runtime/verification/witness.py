"""What a run leaves behind to be compared: the output of every module, the gradient of every output, the gradient of
every parameter, in the order in which they came to be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ...partition.layout import Split
from ...tracing.grouped import group_in_any_type
from ...tracing.kinds import tensors

if TYPE_CHECKING:
    from ..parallel.model import SplitModel
    from ..parallel.spreading import Shown

Key = tuple[str, int, int, int]
"""Module, micro-batch, call, which output."""


class Witness:
    """Records the first step of a model."""

    def __init__(self) -> None:
        self.outputs: dict[Key, torch.Tensor] = {}
        """In the order in which modules finished."""
        self.output_gradients: dict[Key, torch.Tensor] = {}
        self.gradients: list[dict[str, torch.Tensor]] = []
        """Of the first step and of the last, by parameter."""
        self.largest: dict[str, torch.Tensor] = {}
        """Of each number of each parameter, the largest gradient of all steps."""
        self._micro = 0
        self._calls: dict[str, int] = {}
        self._hooks: list[Any] = []
        self.splits: dict[Key, Mapping[str, Split]] = {}
        """How an output lies on the ranks that have parts of the same samples."""
        self._split: SplitModel | None = None

    def watch(self, model: nn.Module, blind: Collection[nn.Module] = ()) -> None:
        """Begin to record; `blind` are modules that cannot be looked at."""
        for name, module in model.named_modules():
            if module not in blind:
                self._hooks.append(module.register_forward_hook(self._seen(name)))

    def watch_split(self, model: SplitModel) -> None:
        """Begin to record what a captured graph gives for the user's modules: the parts of this rank."""
        self._split = model

        def seen(micro: int, shown: Shown, t: torch.Tensor) -> None:
            key = (shown.module, micro, shown.call, shown.which)
            if key not in self.outputs and t.is_floating_point():
                self.outputs[key], self.splits[key] = t.detach().clone(), shown.splits
                if t.requires_grad:
                    t.register_hook(self._gradient(key))

        model.watch(seen)

    def micro(self, i: int) -> None:
        """The next micro-batch begins."""
        self._micro, self._calls = i, {}

    def forget(self) -> None:
        """The batch is run again: what was seen of it does not count."""
        self.outputs.clear()
        self.output_gradients.clear()

    def stop(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._split is not None:
            self._split.unwatch()

    def _seen(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            for i, t in enumerate(tensors(output)):
                key = (name, self._micro, call, i)
                if key in self.outputs or not t.is_floating_point():
                    continue  # a module that is recomputed is seen once
                self.outputs[key] = t.detach().clone()
                if t.requires_grad:
                    t.register_hook(self._gradient(key))

        return hook

    def _gradient(self, key: Key) -> Callable[[torch.Tensor | None], None]:
        def hook(gradient: torch.Tensor | None) -> None:
            if gradient is not None:  # of several outputs of a kernel, such as an LSTM's on a GPU, some lead nowhere
                self.output_gradients[key] = gradient.detach().clone()

        return hook


class Exact(TorchFunctionMode):
    """Around runs in float64: a model that computes a part in float32 by its own will gets float64 there.

    Its rounding would hide what float64 is to show. Scripted functions are run as Python, or they could not be seen.
    Torch's own optimizers are left alone: their arithmetic has the type of the parameters, and the steps that they
    count are in float32, which a GPU's fused kernels take for granted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._script: Any = None
        self._updating = False
        self._hooks: list[Any] = []
        group_in_any_type()

    def __enter__(self) -> Exact:
        plain: Any = torch.jit.ScriptFunction.__call__

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return (getattr(function, "_torchdynamo_inline", None) or plain.__get__(function))(*args, **kwargs)

        self._script = plain
        torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign,assignment]  # of any signature
        self._hooks = [register_optimizer_step_pre_hook(self._update), register_optimizer_step_post_hook(self._updated)]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        torch.jit.ScriptFunction.__call__ = self._script  # type: ignore[method-assign]
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's

    def _update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        kinds = type(optimizer).__mro__
        self._updating = any(k.__module__.startswith("torch.optim.") for k in kinds if k is not torch.optim.Optimizer)

    def _updated(self, *_: Any) -> None:
        self._updating = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._updating:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args)
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)
