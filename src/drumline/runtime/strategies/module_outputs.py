"""Reports what the user's modules return while a step runs: verification and guards look at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...partition.sharding.layout import Split
from ...tracing.op_costs import tensors


@dataclass(frozen=True, slots=True, eq=False)
class ModuleOutput:
    """Names a tensor that one of the user's modules returns in a micro-batch."""

    module: str
    call: int
    """How many times the module ran before in this micro-batch."""
    which: int
    """Its index among the tensors that the call returned."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    """How it is split over ranks, by mesh axis."""


OutputSeen = Callable[[int, ModuleOutput, torch.Tensor], None]
"""(micro-batch, which output, this rank's part of it)."""


class ModuleHooks:
    """Forward hooks on the modules of a model."""

    def __init__(self, model: nn.Module, seen: OutputSeen, skip: Collection[nn.Module] = ()) -> None:
        self._seen, self._micro, self._calls = seen, 0, Counter[str]()
        self._hooks = [m.register_forward_hook(self._hook(n)) for n, m in model.named_modules() if m not in skip]

    def begin(self, micro: int) -> None:
        """Start micro-batch number `micro`."""
        self._micro, self._calls = micro, Counter()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                call = self._calls[name]
                self._calls[name] += 1
                for i, tensor in enumerate(tensors(output)):
                    self._seen(self._micro, ModuleOutput(name, call, i), tensor)

        return hook
