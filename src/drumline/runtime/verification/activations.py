"""Records what is compared between runs: the output of every module, the gradient of every output and the gradient of
every parameter, in the order of execution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from ...partition.sharding.layout import Split
from ..strategies.module_outputs import ModuleHooks, ModuleOutput
from ..strategies.strategy import Strategy

Key = tuple[str, int, int, int]
"""Module, micro-batch, call, index of the output."""


class ActivationRecorder:
    """Records outputs and gradients of the first step of a model."""

    def __init__(self) -> None:
        self.outputs: dict[Key, torch.Tensor] = {}
        """In the order in which the modules finished."""
        self.output_gradients: dict[Key, torch.Tensor] = {}
        self.gradients: list[dict[str, torch.Tensor]] = []
        """Parameter gradients of the first and the last step."""
        self.largest: dict[str, torch.Tensor] = {}
        """The largest absolute gradient over all steps, per element of each parameter."""
        self.splits: dict[Key, Mapping[str, Split]] = {}
        """The split of an output over the ranks that share its samples."""
        self._hooks: ModuleHooks | None = None
        self._strategy: Strategy | None = None

    def watch(self, strategy: Strategy, skip: Collection[nn.Module]) -> None:
        """Start recording a plan's modules; `skip` are modules whose hooks do not run."""
        self._strategy = strategy
        strategy.watch_outputs(self._record, skip)

    def watch_model(self, model: nn.Module) -> None:
        """Start recording the modules of a plain model; `micro` says which micro-batch runs."""
        self._hooks = ModuleHooks(model, self._record)

    def micro(self, i: int) -> None:
        """Begin the next micro-batch of a plain model."""
        assert self._hooks is not None
        self._hooks.begin(i)

    def clear(self) -> None:
        """Drop what was recorded: the batch runs again."""
        self.outputs.clear()
        self.output_gradients.clear()

    def stop(self) -> None:
        """Stop recording."""
        if self._hooks is not None:
            self._hooks.remove()
        if self._strategy is not None:
            self._strategy.unwatch_outputs()

    def _record(self, micro: int, output: ModuleOutput, t: torch.Tensor) -> None:
        key = (output.module, micro, output.call, output.which)
        if key in self.outputs or not t.is_floating_point():
            return  # a recomputed module is recorded once
        self.outputs[key], self.splits[key] = t.detach().clone(), output.splits
        if t.requires_grad:
            t.register_hook(self._gradient_hook(key))

    def _gradient_hook(self, key: Key) -> Callable[[torch.Tensor | None], None]:
        def hook(gradient: torch.Tensor | None) -> None:
            if gradient is not None:  # some outputs of a kernel (a cuDNN LSTM's) have no gradient
                self.output_gradients[key] = gradient.detach().clone()

        return hook
