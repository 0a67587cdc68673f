"""Copies of the buffers that a forward changes (running statistics), so that a bad step leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..tracing.running import without_values


@dataclass(slots=True)
class _Buffer:
    module: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    """None where it does not move: a mask or a table of angles costs no memory here."""


class Moving:
    """The buffers of a model as they were before the step.

    All are copied before the first step; those that it left as they were are forgotten. One that begins to move later
    is kept from then on: torch counts most changes of a tensor, though not those of running statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[_Buffer] = []
        self._settled: bool | None = None
        """None before the first step; False until a step has been applied, which shows what moves."""
        self._undone = False

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers as they are now."""
        if self._settled is None:
            self._buffers = [
                _Buffer(module, name, b, b._version, b.clone())
                for module in self._model.modules()
                for name, b in module._buffers.items()
                if b is not None and not b.is_inference()
            ]
            self._settled = False
            return
        moved = [held for held in self._buffers if self._again(held)]
        for dtype in {held.tensor.dtype for held in moved}:  # all of a type at once: on a GPU a copy costs its start
            alike = [held for held in moved if held.tensor.dtype == dtype]
            copies = [held.copy for held in alike if held.copy is not None]
            torch._foreach_copy_(copies, [held.tensor for held in alike])
        self._settled = self._settled or not self._undone
        self._undone = False

    def _again(self, held: _Buffer) -> bool:
        """Look at one buffer; whether its copy is to be made anew."""
        now = held.module._buffers.get(held.name)
        if now is None or now.is_inference():
            return False
        same = now is held.tensor and now._version == held.version
        if same and held.copy is None:
            return False
        again = False
        if same and not self._settled and not self._undone and held.copy is not None and _stayed(held, now):
            held.copy = None
        elif held.copy is None or now is not held.tensor:
            held.copy = now.clone()
        else:
            again = True
        held.tensor, held.version = now, now._version
        return again

    @torch.no_grad()
    def undo(self) -> None:
        """Put the buffers back to what they were when `keep` was called last."""
        for held in self._buffers:
            held.module._buffers[held.name] = held.tensor
            if held.copy is not None:
                held.tensor.copy_(held.copy)
                held.version = held.tensor._version
        self._undone = True


def _stayed(held: _Buffer, now: torch.Tensor) -> bool:
    """Whether a buffer that torch counts no change of is what it was; without values, by what its module is."""
    if without_values(now):
        return not isinstance(held.module, _NormBase)
    return held.copy is not None and torch.equal(now, held.copy)
