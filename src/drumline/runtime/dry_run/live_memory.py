"""Counts the bytes of live tensors operator by operator, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...torchkit.dispatch_modes import UnwrappedDispatchMode
from ...torchkit.fake_tensors import is_shape_only
from ...torchkit.storages import storage_id
from ...tracing.op_costs import size_of, tensors
from ...tracing.recorder import RESERVE
from .kernel_memory import KernelWorkspaces


class LiveMemory(UnwrappedDispatchMode):
    """While entered, counts every storage that an operator creates until it is freed, on one device type.

    Works on tensors with and without values, so that a dry run can be compared with a real one. `workspaces` adds the
    workspace memory of kernels; `rnn_reserve` adds what a GPU's recurrent layers keep beyond a CPU's.
    """

    def __init__(self, device: str, *, workspaces: KernelWorkspaces | None = None, rnn_reserve: bool = False) -> None:
        super().__init__()
        self._device, self._workspaces, self._rnn_reserve = device, workspaces, rnn_reserve
        self.current = 0
        self.peak = 0
        self.phase = self.peak_phase = ""
        """The current phase, and the phase of the peak."""
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._resized: list[torch.UntypedStorage] = []

    def include(self, tensors: Iterable[Any]) -> None:
        """Count tensors that exist already; the local parts of distributed ones."""
        for t in tensors:
            local = t.to_local() if isinstance(t, DTensor) else t
            if isinstance(local, torch.Tensor):
                self._count(local)

    def start(self) -> None:
        """Reset the peak to the current bytes.

        FSDP2 frees and reallocates the memory of persistent storages without an operator, so those are checked again
        after every operator.
        """
        alive = [storage for ref in self._references.values() if (storage := ref()) is not None]
        self._resized = [s for s in alive if s.nbytes() != self._sizes[storage_id(s)]]
        self._update_resized()
        self.peak, self.peak_phase = self.current, self.phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local parts are dispatched here next
        out = func(*args, **(kwargs or {}))
        for t in tensors(out):
            self._count(t)
        if self._rnn_reserve and func is torch.ops.aten.mkldnn_rnn_layer.default:
            self._add_rnn_reserve(*tensors(out))
        if self._resized:
            self._update_resized()
        workspace = self._workspaces.workspace_bytes(func, args, kwargs or {}) if self._workspaces else 0
        if self.current + workspace > self.peak:
            self.peak, self.peak_phase = self.current + workspace, self.phase
        return out

    def _add_rnn_reserve(self, output: torch.Tensor, *others: torch.Tensor) -> None:
        """Add what a GPU's recurrent layer saves for its backward beyond a CPU's, while the CPU's workspace lives."""
        key = storage_id(others[-1])
        if key in self._sizes:
            extra = int(RESERVE * size_of(output))
            self._sizes[key] += extra
            self.current += extra

    def _count(self, t: torch.Tensor) -> None:
        if t.device.type != self._device or is_shape_only(t) or t.layout != torch.strided:
            return
        storage = t.untyped_storage()
        key = storage_id(storage)
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.current += self._sizes[key]
            self._references[key] = weakref.ref(storage, partial(self._freed, key))

    def _freed(self, key: int, _: Any) -> None:
        self.current -= self._sizes.pop(key, 0)
        self._references.pop(key, None)

    def _update_resized(self) -> None:
        for storage in self._resized:
            key, size = storage_id(storage), storage.nbytes()
            self.current += size - self._sizes[key]
            self._sizes[key] = size


def storage_bytes(tensors: Iterable[Any], device: str) -> int:
    """Bytes of the distinct storages behind tensors on a device type."""
    sizes: dict[int, int] = {}
    for t in tensors:
        local = t.to_local() if isinstance(t, DTensor) else t
        if isinstance(local, torch.Tensor) and local.device.type == device:
            storage = local.untyped_storage()
            sizes[storage_id(storage)] = storage.nbytes()
    return sum(sizes.values())
