"""Copies the buffers that a forward changes (running statistics), so that a bad step can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...torchkit.fake_tensors import has_no_values
from ...torchkit.modules import RunningNormBase
from ...torchkit.operators import foreach_copy_


@dataclass(slots=True)
class _Buffer:
    module: nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    """None for a constant buffer: a mask or a rotary table costs no memory here."""


class _Settled:
    """The copies to make before every step, while no buffer is replaced and no constant changes."""

    def __init__(self, buffers: Sequence[_Buffer]) -> None:
        self._places = [(b.module._buffers, b.name, b.tensor) for b in buffers]
        self._constants = [(b.tensor, b.version) for b in buffers if b.copy is None]
        self._groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for b in buffers:
            if b.copy is not None:  # one launch per dtype: a GPU copy costs its launch
                copies, tensors = self._groups.setdefault(b.tensor.dtype, ([], []))
                copies.append(b.copy)
                tensors.append(b.tensor)

    def is_valid(self) -> bool:
        """Whether all buffers are those that it knows."""
        return all(buffers.get(name) is tensor for buffers, name, tensor in self._places) and all(
            tensor._version == version for tensor, version in self._constants
        )

    def copy(self) -> None:
        """Copy the buffers as they are now."""
        for copies, tensors in self._groups.values():
            foreach_copy_(copies, tensors)


class BufferSnapshot:
    """The buffers of a model before the step.

    All are copied before the first step; the copies of those that it did not change are dropped. One that changes later
    is copied from then on: torch's version counter sees most changes, though not those of running statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers: list[_Buffer] = []
        self._known: bool | None = None
        """None before the first step; False until a step was applied, which shows which buffers change."""
        self._restored = False
        self._settled: _Settled | None = None
        """Buffers to copy, once they are known."""

    def save(self) -> None:
        """Copy the buffers as they are now."""
        if self._known and not self._buffers:  # a model without any
            return
        with torch.no_grad():
            self._save()

    def _save(self) -> None:
        if self._known is None:
            self._buffers = [
                _Buffer(module, name, b, b._version, b.clone())
                for module in self._model.modules()
                for name, b in module._buffers.items()
                if b is not None and not b.is_inference()
            ]
            self._known = False
            return
        if self._settled is not None and self._settled.is_valid():
            self._settled.copy()
            self._restored = False
            return
        changing = [buffer for buffer in self._buffers if self._refresh(buffer)]
        for dtype in {buffer.tensor.dtype for buffer in changing}:  # one launch per dtype: a GPU copy costs its launch
            same_dtype = [buffer for buffer in changing if buffer.tensor.dtype == dtype]
            copies = [buffer.copy for buffer in same_dtype if buffer.copy is not None]
            foreach_copy_(copies, [buffer.tensor for buffer in same_dtype])
        self._settled = _Settled(self._buffers) if self._known else None
        self._known = self._known or not self._restored
        self._restored = False

    def _refresh(self, buffer: _Buffer) -> bool:
        """Update the record of one buffer; whether its copy must be made again."""
        now = buffer.module._buffers.get(buffer.name)
        if now is None or now.is_inference():
            return False
        same = now is buffer.tensor and now._version == buffer.version
        if same and buffer.copy is None:
            return False
        recopy = False
        if same and not self._known and not self._restored and buffer.copy is not None and _unchanged(buffer, now):
            buffer.copy = None
        elif buffer.copy is None or now is not buffer.tensor:
            buffer.copy = now.clone()
        else:
            recopy = True
        buffer.tensor, buffer.version = now, now._version
        return recopy

    def named(self) -> dict[str, torch.Tensor]:
        """All buffers as they are now, by name."""
        return dict(self._model.named_buffers())

    @torch.no_grad()
    def changing(self) -> dict[str, torch.Tensor]:
        """The buffers that steps have changed so far, by name; constants such as masks are left out."""
        prefixes = {id(module): prefix for prefix, module in self._model.named_modules()}
        changed: dict[str, torch.Tensor] = {}
        for buffer in self._buffers:
            now = buffer.module._buffers.get(buffer.name)
            if now is None or now.is_inference():
                continue
            same = now is buffer.tensor and now._version == buffer.version
            if same and (buffer.copy is None or (not self._known and _unchanged(buffer, now))):
                continue
            prefix = prefixes[id(buffer.module)]
            changed[f"{prefix}.{buffer.name}" if prefix else buffer.name] = now
        return changed

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back to what they were at the last `save`."""
        for buffer in self._buffers:
            buffer.module._buffers[buffer.name] = buffer.tensor
            if buffer.copy is not None:
                buffer.tensor.copy_(buffer.copy)
                buffer.version = buffer.tensor._version
        self._restored = True


def _unchanged(buffer: _Buffer, now: torch.Tensor) -> bool:
    """Whether a buffer without a counted change is unchanged; tensors without values are judged by their module."""
    if has_no_values(now):
        return not isinstance(buffer.module, RunningNormBase)
    return buffer.copy is not None and torch.equal(now, buffer.copy)
