"""Copies of the buffers that a forward changes (running statistics), so that a bad step leaves nothing behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


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
        for held in self._buffers:
            self._again(held)
        self._settled = self._settled or not self._undone
        self._undone = False

    def _again(self, held: _Buffer) -> None:
        now = held.module._buffers.get(held.name)
        if now is None or now.is_inference():
            return
        same = now is held.tensor and now._version == held.version
        if same and held.copy is None:
            return
        if same and not self._settled and not self._undone and held.copy is not None and torch.equal(now, held.copy):
            held.copy = None
        elif held.copy is None or now is not held.tensor:
            held.copy = now.clone()
        else:
            held.copy.copy_(now)
        held.tensor, held.version = now, now._version

    @torch.no_grad()
    def undo(self) -> None:
        """Put the buffers back to what they were when `keep` was called last."""
        for held in self._buffers:
            held.module._buffers[held.name] = held.tensor
            if held.copy is not None:
                held.tensor.copy_(held.copy)
                held.version = held.tensor._version
        self._undone = True
