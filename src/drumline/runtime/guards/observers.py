"""Observes one rank's own numbers while a step runs: outputs of modules, losses, gradients.

A bad number spreads to the ranks that share a layer, and to later pipeline stages. So all ranks number the outputs
alike: by micro-batch and index in the forward. The rank with the first bad output produced it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from ..core.engine_core import EngineCore
    from ..strategies.module_outputs import ModuleOutput

_STRIDE = 10**7
"""Larger than the number of outputs of a forward, and of gradients of a stage."""


@torch.no_grad()
def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite; integers are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    return bool(torch.isfinite(tensor.detach()).all())


@torch.no_grad()
def is_corrupt(tensor: torch.Tensor) -> bool:
    """Whether it has NaN or +inf; -inf alone is a mask."""
    if not tensor.is_floating_point():
        return not is_finite(tensor)
    return bool((torch.isnan(tensor) | (tensor == math.inf)).any())


class StepObserver:
    """Context around a step that records the first bad output, bad losses and bad gradients of one rank."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        order = engine.strategy.output_order
        self._numbers = None if order is None else {key: i for i, key in enumerate(order)}
        """Output -> its index in the forward; None if all ranks run all modules, and counting suffices."""
        self.loss = False
        """Whether a loss of this rank was bad."""
        self._count = 0
        self._first: tuple[int, str] | None = None
        """Index and module of the first bad output."""
        self._mask: tuple[int, str] | None = None
        """The first output with only -inf, like an attention mask: bad only if the model's own output is bad too."""
        self._last_bad = False
        self._arrived = 0
        self._gradients: dict[str, int] = {}
        """Parameter with a bad gradient -> its position in the backward."""
        self._hooked: set[int] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> StepObserver:
        self._engine.strategy.watch_outputs(self._on_output)
        for name, module in self._engine.model.named_modules():
            if any(isinstance(p, DTensor) for p in module._parameters.values()):
                # a sharded parameter is whole only while its module runs, so it is hooked then
                self._hooks.append(module.register_forward_pre_hook(lambda m, _, name=name: self._hook(name, m)))
            else:
                self._hook(name, module)
        self._engine.losses_ready = self._on_losses  # type: ignore[method-assign]  # this is what it is for
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine.losses_ready
        self._engine.strategy.unwatch_outputs()
        for hook in self._hooks:
            hook.remove()

    def output(self, loss: float) -> tuple[str, int] | None:
        """The module with the first bad output, and its index, given the loss of the step."""
        if self._numbers is not None and math.isfinite(loss):
            return None  # infinities in a captured graph may be masked later: they count only if the loss is bad
        first = self._first or (self._mask if self._last_bad else None)
        return first and (first[1], first[0])

    @property
    def gradients(self) -> tuple[tuple[str, ...], int]:
        """Parameters with a bad gradient on this rank, in the order of the backward, and the position of the first."""
        names = tuple(sorted(self._gradients, key=lambda name: self._gradients[name]))
        return names, self._gradients[names[0]] if names else 0

    def _on_output(self, micro: int, output: ModuleOutput, value: torch.Tensor) -> None:
        self._count += 1
        if is_finite(value):
            return
        index = self._count
        if self._numbers is not None:
            index = micro * _STRIDE + self._numbers[output.module, output.call, output.which]
        if is_corrupt(value):
            self._first = min(self._first or (index, output.module), (index, output.module))
        elif self._numbers is None:
            self._mask = self._mask or (index, output.module)
        self._last_bad |= not output.module

    def _on_losses(self, losses: list[torch.Tensor]) -> None:
        self.loss |= any(not is_finite(loss) for loss in losses)

    def _hook(self, prefix: str, module: nn.Module) -> None:
        """Hook the gradients of a module's own parameters, each once."""
        for key, p in module._parameters.items():
            if p is not None and p.requires_grad and not isinstance(p, DTensor) and id(p) not in self._hooked:
                self._hooked.add(id(p))
                self._hooks.append(p.register_hook(self._gradient(f"{prefix}.{key}" if prefix else key)))

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        before = self._engine.strategy.stages_after(name) * _STRIDE  # a backward begins with the last stage

        def hook(gradient: torch.Tensor) -> None:
            self._arrived += 1
            if not is_finite(gradient):
                self._gradients.setdefault(self._engine.user_name(name), before + self._arrived)

        return hook
